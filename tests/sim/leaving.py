"""`python -m tests.sim.leaving`: members leave one after the other, with a fault at each message in turn.

All members leave in turn, including the last. All but the last start again from their checkpoints, and must continue
without it. Then the last returns, and all must be on one branch. The scenario is simulated once for each message that a
peer sends or receives between the first leave and the return of the last member, with a fault just before it:

    crash      the peer is killed; after the restarts have begun, it starts again twenty seconds later
    silence    all links of the peer are blocked for forty seconds

All histories must keep the invariants of `tests.support.checkers`, and the swarm must become whole both times. The last
line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from protocols.base import PeerId
from tests.sim.arguments import Parser, at_least, at_least_one
from tests.sim.process import prepare
from tests.sim.scenario_runner import INNER_STEPS, ScenarioRunner, ScenarioSetup

KINDS = ("crash", "silence")
PACE_SECONDS = 0.3
LEAVE_SECONDS = 10.0
"""A peer that has not left by then ends without waiting for the others, as a real peer does."""
DOWN_SECONDS, SILENT_SECONDS = 20.0, 40.0
WHOLE_SECONDS = 240.0
"""From the restart of the former members, or of the last one, until all running peers vote on one branch."""
MAX_VIOLATIONS = 20


class Leaving(ScenarioRunner):
    """Peers that leave, and return from the checkpoints that they wrote when they left."""

    def __init__(self, peers: int, **changes: Any) -> None:
        setup = ScenarioSetup(peers, inner_steps=INNER_STEPS, pace_seconds=PACE_SECONDS, every_rounds=1)
        super().__init__(replace(setup, **changes))

    async def leave_in_turn(self, peers: Sequence[PeerId], pause_seconds: float = 0.0) -> None:
        for peer in peers:
            if peer in self.alive():
                self.leave(peer)
                with suppress(AssertionError):
                    await self.gone(peer, seconds=LEAVE_SECONDS)
            if peer in self.alive():
                self.kill(peer)
            await asyncio.sleep(pause_seconds)


class Play:
    def __init__(self, peers: int, kind: str = "crash", at: int | None = None) -> None:
        self.messages = 0
        self._kind, self._at = kind, at
        self._stage = Leaving(peers)
        self._watching = self._starting = False

    def run(self) -> None:
        self._stage.play(self._story)

    async def _story(self) -> None:
        stage = self._stage
        await stage.rounds(2)
        stage.network.watch, self._watching = self._watch, True
        await stage.leave_in_turn(stage.peers)
        self._starting = True
        *early, last = stage.peers
        await stage.revived(*(peer for peer in early if peer not in stage.alive()))
        await stage.until(lambda: len(stage.alive()) == len(early) and stage.whole(), WHOLE_SECONDS, "all but the last")
        self._watching = False
        await stage.revived(last)
        await stage.until(lambda: len(stage.alive()) == len(stage.peers) and stage.whole(), WHOLE_SECONDS, "all")
        await stage.rounds(2)

    def _watch(self, peer: PeerId, number: int, way: str, other: PeerId) -> None:
        if not self._watching or not self._stage.network.nodes[peer].process.alive:
            return
        self.messages += 1
        if self.messages == self._at:
            self._strike(peer)

    def _strike(self, peer: PeerId) -> None:
        stage, loop = self._stage, asyncio.get_running_loop()
        others = [each for each in stage.peers if each != peer]
        if self._kind == "silence":
            stage.silence(peer)
            loop.call_later(SILENT_SECONDS, partial(stage.heal, [peer], others))
            return
        stage.kill(peer)
        if self._starting:
            loop.call_later(DOWN_SECONDS, partial(stage.revive, peer))


def judged(peers: int, kind: str, at: int) -> str:
    try:
        Play(peers, kind, at).run()
    except Exception as error:  # noqa: BLE001 - any error must be reported with its message
        return f"{type(error).__name__}: {error}"
    return ""


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m tests.sim.leaving", description="Members leave in turn; a fault at every message.")
    parser.add_argument("--peers", type=partial(at_least, 3), default=3)
    parser.add_argument("--kind", choices=KINDS, default="crash")
    parser.add_argument("--every", type=at_least_one, default=1, help="play only every n-th message")
    parser.add_argument("--only", type=at_least_one, help="one message, by its number")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    prepare()
    began = time.monotonic()
    calm = Play(options.peers)
    calm.run()
    points = [options.only] if options.only else list(range(1, calm.messages + 1, options.every))
    found = [judged(options.peers, options.kind, point) for point in points]
    broken = [(at, why) for at, why in zip(points, found, strict=True) if why]
    for at, why in broken[:MAX_VIOLATIONS]:
        print(f"message {at}: {why}")
        print(f"replay: python -m tests.sim.leaving --peers {options.peers} --kind {options.kind} --only {at}")
    result: dict[str, Any] = {"peers": options.peers, "kind": options.kind, "messages": calm.messages}
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({**result, "points": len(points), "failed": len(broken), "real_seconds": seconds}))
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
