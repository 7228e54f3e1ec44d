"""Tests the compose swarm: builds an image, starts a founder and three peers, injects faults, and judges the result.
Then it does the same with six containers of a run in three stages.

    python -m tests.docker                          # make docker-test
    python -m tests.docker --base IMAGE --pip-args "--extra-index-url https://download.pytorch.org/whl/cpu"

The test uses the running Docker engine. If there is none, it starts one in a network namespace, which leaves the
machine's firewall unchanged. Where no base image can be pulled, it makes one from Debian's packages. It removes
everything at the end, also after an error. The directory of `--dir` holds the logs of containers and peers,
timeline.txt and result.json.
Exit code: 0 passed, 1 failed, 77 this machine does not allow the test, and one line says what is missing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tests.docker import image, invited, metrics, staged, verdict
from tests.docker.cases import Cases
from tests.docker.engine import Engine, NotHere, engine, firewall
from tests.docker.swarm import Swarm
from tests.faults.shell import from_shell
from tests.support.history import one_mean
from tests.support.real_swarm import wait

PROGRAM = "python -m tests.docker"
NOT_HERE = 77
DIRECTORY = Path("build/docker")
HEALTHY_SECONDS, CALM_SECONDS, AGAIN_SECONDS = 90.0, 15.0, 60.0
SUBNET = "172.30.78.0/24"
RUN = """name = "docker-test"
[recipe]
rounds = 10000
inner_steps = 10
[gpt]
preset = "w64"
rows = 4
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__.partition("\n")[0])
    parser.add_argument("--base", default="", help="the image to build on")
    parser.add_argument("--pip-args", help="arguments of pip in the build; default: wheels fetched here before")
    parser.add_argument("--dir", type=Path, default=DIRECTORY)
    options = parser.parse_args(arguments)
    say = _Clock()
    place = options.dir.absolute()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        return _test(options, place, say)
    except NotHere as why:
        print(f"docker-test: not here: {why}", file=sys.stderr)
        return NOT_HERE
    except AssertionError as error:  # a wait that timed out
        print(f"docker-test: FAIL: {error}", file=sys.stderr)
        return 1
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or getattr(error, "stdout", None) or ""
        said = said.decode(errors="replace") if isinstance(said, bytes) else said
        print(f"docker-test: {error}: {said[-1000:]}", file=sys.stderr)
        return 1


class _Clock:
    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, line: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f}  {line}", flush=True)


def _test(options: argparse.Namespace, place: Path, say: Callable[[str], None]) -> int:
    failed: list[str] = []
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="starling-docker-", dir="/var/tmp")))
        running = stack.enter_context(engine(home))
        say(f"{running.versions}{', one of our own' if running.own else ''}")
        tag = f"starling-test:{uuid.uuid4().hex[:12]}"
        if not running.own:  # otherwise it is removed with the engine
            stack.callback(_forget, running, tag)
        built = _build(running, tag, options, home, say)
        failed += image.faults(running, tag)
        (place / "run.toml").write_text(RUN)
        variables = {"STARLING_IMAGE": tag, "RUN_FILE": str(place / "run.toml"), "SUBNET": SUBNET, "WAIT_FOR": "2"}
        began = time.monotonic()
        failed += metrics.faults(running, tag, variables, home)
        say(f"metrics: looked at in {time.monotonic() - began:.0f} s")
        began = time.monotonic()
        found = _play(running, variables, place, say)
        found["figures"] |= built
        failed += found.pop("failed")
        for plays in (staged.plays, invited.plays):
            for play in plays(running, variables, place, say):
                found["figures"]["cases"] += play.cases
                failed += play.failed
        seconds = time.monotonic() - began
        found["figures"]["test_seconds"] = seconds
    if running.before is not None and (after := firewall()) != running.before:
        failed.append(f"the machine's firewall has changed: {set(running.before) ^ set(after)}")
    lines = verdict.table(found["figures"])
    (place / "table.md").write_text("\n".join(lines) + "\n")
    (place / "result.json").write_text(json.dumps(found | {"failed": failed}, default=list) + "\n")
    print("\n".join(lines))
    print(verdict.summary(found["figures"]))
    for each in failed:
        say(f"FAIL  {each}")
    say(f"docker-test: {'FAIL' if failed else 'PASS'}, {seconds:.0f} s since the image was built; kept in {place}")
    return 1 if failed else 0


def _build(
    running: Engine, tag: str, options: argparse.Namespace, home: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    base = image.base(running, options.base, home)
    say(f"base image {base}")
    context = image.context(home / "context")
    arguments = image.pip_arguments(running, base, options.pip_args, context)
    say(f"pip in the build: {'as in the Dockerfile' if arguments is None else arguments}")
    seconds = image.build(running, tag, base, arguments, context)
    size = image.size_bytes(running, tag)
    say(f"image built in {seconds:.0f} s, {size / 1e9:.2f} GB")
    return {"build_seconds": seconds, "image_bytes": size}


def _forget(running: Engine, tag: str) -> None:
    with suppress(subprocess.SubprocessError):
        running.run("image", "rm", "--force", tag, seconds=60)


def _play(running: Engine, variables: dict[str, str], place: Path, say: Callable[[str], None]) -> dict[str, Any]:
    swarm = Swarm(running, f"starling-test-{uuid.uuid4().hex[:8]}", variables, place)
    with ExitStack() as stack:
        stack.callback(swarm.remove)
        swarm.compose("config", "--quiet")
        cases = Cases(swarm, say)
        calm, more, failed = _calm(swarm, cases)
        for case in cases.all():
            case()
            swarm.look_at_health()
            if cases.struck[-1].failed and not _together(swarm):
                say("the swarm does not come together again: nothing more is done to it")
                break
        more |= {"memory_bytes_at_the_end": swarm.memory_bytes()}
        leaving, stopped = cases.leave()
        more |= {"stop_seconds": stopped}
        swarm.keep_logs()
        played = verdict.play(swarm, cases.events, cases.struck, calm, leaving)
        judged = verdict.judged(played, swarm, cases.struck, place / "timeline.txt", say)
        figures = verdict.figures(played, swarm, cases.struck) | more
    first, last = figures["held_out_loss"]
    if not last < first:
        failed.append(f"the held-out loss did not fall: {first:.3f} -> {last:.3f}")
    failed += verdict.broken(judged)
    return {"verdict": judged.as_dict(), "figures": figures, "failed": failed}


def _calm(swarm: Swarm, cases: Cases) -> tuple[tuple[float, float], dict[str, Any], list[str]]:
    """Start the swarm, and wait without faults; returns begin and end of this calm, figures, and failures."""
    cases.up()
    began = time.time()
    failed = []
    with suppress(AssertionError):
        wait("all are healthy", lambda: {*swarm.look_at_health().values()} == {"healthy"}, HEALTHY_SECONDS, 2.0)
    if (states := {*swarm.look_at_health().values()}) != {"healthy"}:
        failed.append(f"after {HEALTHY_SECONDS:g} s of health checks the containers are {', '.join(sorted(states))}")
    if any(swarm.health.values()):
        failed.append(f"health checks failed in the calm: {sum(code != 0 for code in swarm.health.values())}")
    failed += swarm.privileges()
    time.sleep(max(0.0, began + CALM_SECONDS - time.time()))
    return (began, time.time()), {"memory_bytes": swarm.memory_bytes()}, failed


def _together(swarm: Swarm) -> bool:
    began, peers = time.time(), swarm.peers
    try:
        wait("a mean of all", lambda: one_mean(peers, began), AGAIN_SECONDS, 0.5)
    except AssertionError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(from_shell(main, PROGRAM))
