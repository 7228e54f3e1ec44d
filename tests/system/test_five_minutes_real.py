"""Three people at home, each behind a router, type what the documents say: from the wheel to a mean of three."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen

import pytest

from tests.faults.homes import Homes, Router
from tests.faults.network import why_not
from tests.support.installed import JOINS, Installed, make_wheel

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(400)]
MOST_SECONDS = 300.0
HOMES = {"anna": Router.FULL_CONE, "bert": Router.PORT_KEEPING, "carla": Router.SYMMETRIC}
"""anna has told her router to forward a port."""
PORT = 4001


class Terminal:
    """A person's: the lines of a program that was started there."""

    def __init__(self, installed: Installed, *words: str) -> None:
        self.lines: list[str] = []
        self._process: Popen[str] = installed.start(*words)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout
        with self._process.stdout as lines:
            self.lines.extend(lines)

    def until(self, seen: Callable[[str], object], deadline: float) -> str:
        while not (found := next(filter(seen, tuple(self.lines)), "")):
            assert self._process.poll() is None and time.monotonic() < deadline, "".join(self.lines)
            time.sleep(0.1)
        return found

    def end(self) -> int:
        self._process.terminate()
        return self._process.wait(30)


def test_three_homes_average_within_five_minutes_of_installing(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        network = stack.enter_context(Homes())
        people = {}
        for name, router in HOMES.items():
            sockets = tempfile.mkdtemp(prefix="st-", dir="/tmp")
            stack.callback(shutil.rmtree, sockets)
            (tmp_path / name).mkdir()
            people[name] = Installed(tmp_path / name, sockets, network.home(name, router).inside)
        wheel = make_wheel(tmp_path)
        deadline = time.monotonic() + MOST_SECONDS
        for person in people.values():
            person.pip("install", "--no-index", "--no-deps", str(wheel))
        public = f"/ip4/{network.places['anna'].address}/tcp/{PORT}"
        terminals: dict[str, Terminal] = {}

        def starts(name: str, *words: str) -> Terminal:
            terminals[name] = Terminal(people[name], "starling", "join", "--nickname", name, *words)
            stack.callback(terminals[name].end)
            return terminals[name]

        anna = starts("anna", "--listen", f"/ip4/0.0.0.0/tcp/{PORT}", "--announce", public, "--wait-for", "3")
        line = anna.until(JOINS.search, deadline)
        found = JOINS.search(line)
        assert found
        for name in ("bert", "carla"):
            starts(name, *found[1].split()[1:])
        for terminal in terminals.values():
            terminal.until(lambda said: "mean of 3" in said, deadline)
        print(f"a mean of three {MOST_SECONDS - deadline + time.monotonic():.0f} s after the first install")
        seen = json.loads(people["bert"].run("starling", "status", "--json"))
        assert {each["nickname"] for each in seen["peers"] if each["live"]} >= {"anna", "carla"}
        for name, terminal in terminals.items():
            assert terminal.end() == 0, f"{name}:\n{''.join(terminal.lines[-20:])}"
