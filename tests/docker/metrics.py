"""What a Prometheus beside the founder reads, as docker/compose.metrics.yaml starts it. No Prometheus is needed."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.docker.engine import Engine
from tests.support.paths import REPOSITORY
from tests.support.real_swarm import wait

UP_SECONDS, DOWN_SECONDS, SCRAPE_SECONDS, POLL_SECONDS = 120.0, 60.0, 45.0, 1.0
_FILES = ("docker/compose.yaml", "docker/compose.metrics.yaml")
_IDLE = {"services": {"prometheus": {"entrypoint": ["sh", "-c", "exec sleep infinity"]}}}
_SCRAPE = """
import os, urllib.request
place = "/state/starling/peer-1"
assert os.listdir(place) == ["metrics.token"], os.listdir(place)
token = open(f"{place}/metrics.token").read().strip()
request = urllib.request.Request("http://127.0.0.1:7717/metrics", headers={"Authorization": f"Bearer {token}"})
print(urllib.request.urlopen(request, timeout=5).read().decode())
"""
"""Run in Prometheus' container: prints the founder's metrics. It fails if more than the token is there to be read."""


def faults(engine: Engine, tag: str, variables: Mapping[str, str], home: Path) -> Iterator[str]:
    """Start a founder and Prometheus' container, with the image `tag`; what does not hold, in words."""
    project, idle = f"starling-metrics-{uuid.uuid4().hex[:8]}", home / "idle.yaml"
    idle.write_text(json.dumps(_IDLE))  # YAML, too
    files = [argument for each in (*(REPOSITORY / each for each in _FILES), idle) for argument in ("-f", str(each))]
    variables = {**variables, "PROMETHEUS_IMAGE": tag, "PROMETHEUS_PORT": "0", "WAIT_FOR": "1"}

    def compose(*arguments: str, seconds: float) -> str:
        return engine.compose("-p", project, *files, *arguments, seconds=seconds, variables=variables)

    try:
        compose("up", "--detach", "--no-build", "--scale", "peer=0", seconds=UP_SECONDS)
        founder, prometheus = (compose("ps", "--quiet", each, seconds=20).strip() for each in ("founder", "prometheus"))
        yield from _unread(engine, prometheus, "the metrics of a founder that has just started")
        engine.run("restart", "--time", "20", founder, seconds=DOWN_SECONDS)
        yield from _unread(engine, prometheus, "the metrics of a founder that has started again")
    finally:
        compose("down", "--volumes", "--timeout", "5", seconds=DOWN_SECONDS)


def _unread(engine: Engine, prometheus: str, what: str) -> Iterator[str]:
    said = ""

    def read() -> bool:
        nonlocal said
        try:
            return "\nstarling_round{" in engine.run("exec", prometheus, "python", "-c", _SCRAPE)
        except subprocess.SubprocessError as error:
            said = str(getattr(error, "stderr", "") or error).strip().rpartition("\n")[2]
            return False

    try:
        wait(what, read, SCRAPE_SECONDS, POLL_SECONDS)
    except AssertionError:
        yield f"Prometheus does not read {what}: {said}"
