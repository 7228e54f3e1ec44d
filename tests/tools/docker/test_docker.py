"""The swarm in containers, as far as no container is needed: its settings, and what is made of what Docker says."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import cast

from tests.docker.cases import Struck
from tests.docker.swarm import Swarm
from tests.docker.verdict import forks, unnamed
from tests.faults.recording import Limits, Recording
from tests.support.paths import REPOSITORY


def test_env_example_lists_every_setting_with_its_default() -> None:
    compose = (REPOSITORY / "docker/compose.yaml").read_text()
    settings = {name: default for name, default in re.findall(r"\$\{(\w+):?-([^}]*)\}", compose)}
    example = (REPOSITORY / "docker/.env.example").read_text()
    assert dict(re.findall(r"^#(\w+)=(.*)$", example, re.MULTILINE)) == settings


def test_build_arguments_have_one_default() -> None:
    compose = (REPOSITORY / "docker/compose.yaml").read_text()
    dockerfile = (REPOSITORY / "docker/Dockerfile").read_text()
    for name, default in re.findall(r'^ARG (\w+)="?([^"\n]*)"?$', dockerfile, re.MULTILINE):
        assert re.search(rf"{name}: \$\{{{name}:?-{re.escape(default)}\}}", compose)


def test_fork_of_unharmed_peer_is_a_violation() -> None:
    now = time.time()
    fork = {"outcome": "fork", "peer": "A", "round": 7, "time": now + 5}
    play = _play({"founder": [fork]}, {"founder": "A", "peer-1": "B"}, now)
    struck = Struck("network", ("founder",), now, now + 6, ("founder",), {"recovery_seconds": 2.0})
    assert not list(forks(play, [struck]))
    struck.targets = ("peer-1",)
    assert [each.invariant for each in forks(play, [struck])] == ["fork"]
    struck.targets, struck.over = ("founder",), now + 1
    assert [each.round for each in forks(play, [struck])] == [7]


def test_container_that_ends_without_a_directory_is_a_violation() -> None:
    spells = [SimpleNamespace(name=name, code=1, container=64 * "c") for name in ("", "founder")]
    found = unnamed(cast(Swarm, SimpleNamespace(spells=spells)))
    assert [(each.invariant, each.peer) for each in found] == [("exit-code", 12 * "c")]


def _play(histories: dict[str, list[dict[str, object]]], ids: dict[str, str], now: float) -> Recording:
    return Recording(
        scenario="docker", seed=0, protocol="butterfly", task="gpt", limits=Limits(), calm=(now, now), healed=now,
        ended=now, should=(), ids=ids, events=(), histories=histories, logs={}, incarnations={}, left={},
    )  # fmt: skip
