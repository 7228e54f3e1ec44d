"""Control of the connections between peers through a proxy on the router: latency and flipped bits."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Collection
from dataclasses import replace
from typing import Self

from tests.faults.event_log import EventLog
from tests.faults.network import Namespaces
from tests.faults.proxy import PORT, Faults
from tests.faults.steps import Step
from tests.support.paths import REPOSITORY

ACTS = ("delay", "corrupt")
ANSWER_SECONDS = 10.0


class Proxied:
    def __init__(self, network: Namespaces, seed: int) -> None:
        self.network, self._seed = network, seed

    def __enter__(self) -> Self:
        command = [*self.network.inside, sys.executable, "-P", "-m", "tests.faults.proxy", str(self._seed)]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        try:
            self._answer()
            self.network.redirect(PORT)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def suffer(self, faults: Faults) -> dict[str, int]:
        """Set the faults; returns the counts of the former ones. OSError: the proxy is gone."""
        assert self._process.stdin
        self._process.stdin.write(f"{faults.to_json()}\n".encode())
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, int]:
        assert self._process.stdout
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_SECONDS)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise OSError("the proxy between the peers is gone, or does not answer")
        found: dict[str, int] = json.loads(line)
        return found

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=ANSWER_SECONDS)


class Wire:
    def __init__(self, notes: EventLog, proxied: Proxied | None) -> None:
        self._notes, self._proxied = notes, proxied
        self._faults = Faults()

    def heal(self) -> None:
        if self._proxied and self._faults != Faults():
            felt = self._proxied.suffer(Faults())
            if not any(felt.values()):
                self._notes.stuck.append("nothing on the wire met the fault")
            if felt["delayed_bytes"]:
                self._notes.measure("delayed_megabytes", felt["delayed_bytes"] / 1e6)
            if felt["flipped_bits"]:
                self._notes.measure("flipped_bits", felt["flipped_bits"])
            self._faults = Faults()

    def delay(self, targets: tuple[str, ...], step: Step) -> None:
        self._suffer(replace(self._faults, latency_seconds=step.amount, jitter_seconds=step.amount), targets)
        milliseconds = f"{1000 * step.amount:g}"
        self._notes.tell(
            f"latency of {milliseconds} ms and up to {milliseconds} ms of jitter each way", targets, "fault"
        )

    def corrupt(self, targets: tuple[str, ...], step: Step) -> None:
        self._suffer(replace(self._faults, flip_every_bytes=step.amount), targets)
        self._notes.tell(f"a bit of each {step.amount / 1e6:g} MB flips", targets, "fault")

    def _suffer(self, faults: Faults, targets: Collection[str]) -> None:
        assert self._proxied, "a scenario that needs a network of namespaces is refused where there is none"
        places = self._proxied.network.places
        self._faults = replace(faults, addresses=tuple(places[name].address for name in targets))
        self._proxied.suffer(self._faults)
