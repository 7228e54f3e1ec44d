"""Plays the rounds: the systems of a block are alive together and take turns, so that all see the same machine."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from benchmarks.averaging import BOUNDS, Answer, Swarm, SwarmError, span_seconds
from benchmarks.averaging_setup import Setup
from benchmarks.peers import vectors
from benchmarks.peers.metering import Meter
from benchmarks.peers.systems import MEGABYTE, System, blocks

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
PAUSE_SECONDS = 0.2
"""Before each turn, so that the one before has come to rest."""
CONTROL_BYTES = 100_000
"""What a peer's p2pd may write in a round on the direct path, where only control messages pass it."""
MEMORY_SHARE = 0.8
"""How much of the free memory the systems that are alive together may take by plan."""
PASSES = 2
"""How often each system is started where not all fit into memory; its rounds are spread over the run."""
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Cell:
    """One size: N peers with a vector of so many megabytes (10^6 bytes) of float32 each."""

    peers: int
    megabytes: float

    @property
    def elements(self) -> int:
        return int(self.megabytes * MEGABYTE / 4)


@dataclass(frozen=True, slots=True)
class Turn:
    """One round of one system.

    Attributes:
        seconds: from the first peer's start, with the group known, to the last peer's end.
        forming_seconds: from the first peer that looked for the group to the last that knew it; None without groups.
        held_bytes: resident memory of the peer that holds most, with its vector, before the round.
        added_bytes: how far a peer's memory rose above that in the round, at most.
        relative_error: the worst peer's, in L2; None where nothing is averaged.
        ok: the result is right at all peers, and took the path that the row is about.
    """

    seconds: float
    forming_seconds: float | None
    cpu_seconds: float
    wire_bytes: int
    p2pd_bytes: int
    held_bytes: int
    added_bytes: int
    relative_error: float | None
    same_bits: bool | None
    ok: bool
    is_warm_up: bool = False


Progress = Callable[[str], None]


async def play(cell: Cell, systems: Sequence[System], rounds: int, progress: Progress) -> dict[str, list[Turn]]:
    """Play that many rounds of each system, and a warm-up before them whenever it is started.

    Raises:
        SwarmError: a system cannot be started, or fails in a round.
    """
    need = (4 * cell.peers + 8) * cell.elements  # the vectors, and their mean in float64
    budget = MEMORY_SHARE * (psutil.virtual_memory().available - need)
    together = blocks(systems, cell.peers, cell.megabytes, budget)
    passes = 1 if len(together) == 1 else min(PASSES, rounds)
    turns: dict[str, list[Turn]] = {system.name: [] for system in systems}
    with tempfile.TemporaryDirectory(prefix="starling-peers-", dir=_roomy(need)) as directory:
        setup = Setup(cell.peers, cell.elements, "fp32", deadline_seconds=120 + 2 * cell.megabytes, vectors=directory)
        for each in range(passes):
            numbers = range(rounds * each // passes, rounds * (each + 1) // passes)
            for block in together:
                await _play_block(setup, block, numbers, turns, progress)
    return turns


def _roomy(need_bytes: float) -> Path | None:
    """Shared memory if there is enough; None: the system's directory for temporary files."""
    is_roomy = SHARED_MEMORY.exists() and shutil.disk_usage(SHARED_MEMORY).free > need_bytes + MEGABYTE
    return SHARED_MEMORY if is_roomy else None


async def _play_block(
    setup: Setup, block: Sequence[System], numbers: range, turns: dict[str, list[Turn]], progress: Progress
) -> None:
    async with _alive(block, setup, progress) as players:
        for number in (numbers[0] - 1, *numbers):
            await asyncio.to_thread(vectors.write, setup, number)
            first = max(number, 0) % len(players)
            for player in (*players[first:], *players[:first]):
                turn = replace(await player.play(number), is_warm_up=number < numbers[0])
                progress(describe(player.system, number, turn))
                turns[player.system.name].append(turn)


@asynccontextmanager
async def _alive(block: Sequence[System], setup: Setup, progress: Progress) -> AsyncIterator[list[Player]]:
    """Start the systems one after the other; end them all at once, which takes seconds each."""
    players: list[Player] = []
    failed: type[BaseException] | None = BaseException
    try:
        for system in block:
            progress(f"starts {system.name}")
            players.append(await Player(system, setup).start())
        yield players
        failed = None
    finally:
        await asyncio.gather(*(player.end(failed) for player in players))


class Player:
    """A system's processes, while it takes part."""

    def __init__(self, system: System, setup: Setup) -> None:
        self.system = system
        self._swarm = Swarm(replace(setup, codec=system.codec, path=system.path), system.module, ENVIRONMENT)

    async def start(self) -> Player:
        """Start the processes; if that fails, none is left.

        Raises:
            SwarmError: a peer does not start.
        """
        try:
            await self._swarm.__aenter__()
        except SwarmError as error:
            raise SwarmError(f"{self.system.name} does not start: {error}") from error
        ups = self._swarm.ups
        self._meter = Meter([up["pid"] for up in ups], [up["daemon"] for up in ups if "daemon" in up])
        return self

    async def end(self, failed: type[BaseException] | None) -> None:
        """End the processes, at once if something failed."""
        await self._swarm.__aexit__(failed)

    async def play(self, number: int) -> Turn:
        """Play one round.

        Raises:
            SwarmError: a peer failed.
        """
        try:
            await self._swarm.all("make", round=number)
            held = self._meter.held_bytes()
            await asyncio.sleep(PAUSE_SECONDS)
            formed = await self._swarm.all("form", round=number)
            async with self._meter.watched() as usage:
                averaged = await self._swarm.all("average", round=number)
            checks = await self._swarm.all("check")
        except SwarmError as error:
            raise SwarmError(f"{self.system.name}, round {number}: {error}") from error
        if "offered" in averaged[0]:  # ours form the group within the round
            formed = [{"began": each["offered"], "ended": each["began"]} for each in averaged]
        seconds, forming = span_seconds(averaged), span_seconds(formed) if "began" in formed[0] else None
        worst, same, right = judged(self.system, checks)
        strayed = self.system.path == "direct" and usage.p2pd_bytes > CONTROL_BYTES * len(checks)
        return Turn(
            seconds, forming, usage.cpu_seconds, usage.wire_bytes, usage.p2pd_bytes, held, usage.added_bytes,
            worst, same, ok=right and not strayed,
        )  # fmt: skip


def judged(system: System, checks: Sequence[Answer]) -> tuple[float | None, bool | None, bool]:
    """Worst relative error, whether all hold the same bits, and whether that is right for this system."""
    if "whole" in checks[0]:
        return None, None, all(check["whole"] for check in checks)
    errors = [float(check["relative_error"]) for check in checks]
    same = len({check["digest"] for check in checks}) == 1
    right = all(error <= BOUNDS[system.codec] for error in errors)  # not so if one is NaN
    return max(errors), same, right and (same or not system.same_bits)


def describe(system: System, number: int, turn: Turn) -> str:
    name = "warm-up" if turn.is_warm_up else f"round {number + 1}"
    return f"{name}: {system.name} {turn.seconds:.3f} s{'' if turn.ok else f': NOT OK: {turn}'}"
