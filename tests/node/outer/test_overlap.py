"""Training that continues while a round averages: scripted rounds, in exact fractions, on virtual time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytest import approx

from node.outer.state import OuterSGD
from node.reporting.report import RoundReport
from protocols.base import ALL, LocalProgress, Outcome, RoundKey, Vector
from tests.support.inline_trainer import TOKENS
from tests.support.scripted_peers import (
    ME,
    OTHER,
    STEP_SECONDS,
    Peer,
    Script,
    committed,
    lost,
    play,
    skipped,
    weighed,
)

HALF = STEP_SECONDS / 2  # cuts and means come in the middle of a step


def in_steps(first: int, *overlaps: int) -> list[dict[str, Any]]:
    """Times of rounds of `first` steps, the overlapped ones before included, and so many overlapped steps."""
    before = (0, *overlaps)
    return [
        {"cut_seconds": (first - done) * STEP_SECONDS - HALF, "mean_seconds": max(0.0, steps * STEP_SECONDS - HALF)}
        for done, steps in zip(before, overlaps, strict=False)
    ]


def overlapped(*scripts: Script, outer: OuterSGD | None = None, step: float = 0.125, fragments: int = 1) -> Peer:
    peer = Peer(*scripts, outer=outer, overlaps=True, fragments=fragments)
    peer.trainer.local_training.learner.step_size = step  # type: ignore[attr-defined]
    peer.outer_loop._average_seconds = math.inf  # as after a round whose averaging took long
    return peer


def value(vector: Vector) -> float:
    """Of a vector whose elements are all equal; they begin at 1."""
    assert torch.equal(vector, vector[:1].expand_as(vector))
    return float(vector[0]) - 1


KEEP: dict[tuple[int, int, int], list[tuple[float, float, float]]] = {
    (1, 8, 1): [(-12, -13, -15), (-26, -27, -29), (-41, -42, -44)],
    (1, 8, 5): [(-12, -17, -27), (-26, -31, -41), (-41, -46, -56)],
    (2, 4, 0): [(-6, -6, -6), (-12, -12, -12), (-19, -19, -19), (-26, -26, -26), (-33.5, -33.5, -33.5)],
    (2, 4, 1): [(-6, -7, -9), (-12, -13, -15), (-19, -20, -22), (-26, -27, -29), (-33.5, -34.5, -36.5)],
    (4, 2, 1): [
        *[(-3, -4, -6), (-6, -7, -9), (-9, -10, -12), (-12, -13, -15)],
        *[(-15.5, -16.5, -18.5), (-19, -20, -22), (-22.5, -23.5, -25.5), (-26, -27, -29)],
        (-29.75, -30.75, -32.75),
    ],
    (4, 6, 5): [
        *[(-9, -14, -24), (-18, -23, -33), (-27, -32, -42), (-36, -41, -51)],
        *[(-46.5, -51.5, -61.5), (-57, -62, -72), (-67.5, -72.5, -82.5), (-78, -83, -93)],
        (-89.25, -94.25, -104.25),
    ],
}
"""Fragments, inner steps of a round, and steps that averaging lasts -> after each outer step, of the fragment that was
averaged, the anchor and the parameters of two peers, whose inner steps subtract 1 and 3. Outer learning rate and
momentum are a half. By hand, of one fragment: the mean is 16, so the momentum is 16, 24, 28, the anchor moves by half
of the mean and a quarter of that; overlapped work stays. A fragment's first mean is of all rounds so far.
"""


@pytest.mark.parametrize(("fragments", "inner_steps", "steps"), KEEP)
def test_trajectory_is_the_one_computed_by_hand(fragments: int, inner_steps: int, steps: int) -> None:
    found: list[tuple[float, float, float]] = []
    peers: list[Peer] = []
    rounds = len(KEEP[fragments, inner_steps, steps])

    def mean(mine: Vector, into: Vector) -> None:
        into.copy_(sum(peer.seen[-1].mine for peer in peers) / 2)  # type: ignore[arg-type]

    async def main() -> None:
        times = in_steps(inner_steps, *[steps] * rounds)
        scripts = [committed(average=mean, **each) for each in times]
        peers.extend(
            overlapped(*scripts, outer=OuterSGD(0.5, 0.5), step=step, fragments=fragments) for step in (1.0, 3.0)
        )
        await asyncio.gather(*(peer.outer_loop.settle() for peer in peers))
        for number in range(rounds):
            for peer in peers:
                peer.outer_loop._average_seconds = math.inf if steps else 0.0  # to overlap even half a step
            part = peers[0].outer_loop.fragments.part(number % fragments)
            reports = await asyncio.gather(*(peer.outer_loop.run_round() for peer in peers))
            assert [report.seconds_overlap for report in reports] == approx([steps * STEP_SECONDS] * 2)
            one, other = (value(peer.trainer.local[part]) for peer in peers)
            found.append((value(peers[0].outer_loop.anchor[part]), one, other))

    play(main())
    assert found == KEEP[fragments, inner_steps, steps]
    assert peers[0].averaged_tokens == [
        TOKENS * inner_steps * min(number + 1, fragments) for number in range(rounds)
    ], "each fragment has its own tokens"


def test_next_round_counts_the_overlapped_work() -> None:
    """Once, and its call counts from the cut."""
    peer = overlapped(*(committed(**times) for times in in_steps(8, 3, 2)))
    reports = play(peer.rounds())
    assert peer.averaged_tokens == [8 * TOKENS, 8 * TOKENS]
    assert peer.offered_tokens == [0, 3 * TOKENS] and peer.seen[1].offers[0].complete
    assert [report.tokens for report in reports] == [11 * TOKENS, 7 * TOKENS]
    assert [report.tokens_overlap for report in reports] == [3 * TOKENS, 2 * TOKENS]
    assert peer.seen[0].since is None and peer.seen[1].since == approx(8 * STEP_SECONDS)
    for report in reports:
        assert report.seconds_overlap < report.seconds_train == approx(report.tokens / TOKENS * STEP_SECONDS)
        assert [report.seconds_average, report.seconds_wait] == approx([0, 0], abs=1e-5)
    assert reports[1].time - reports[0].time == approx(reports[1].seconds_train)


def test_training_continues_during_the_outer_step_and_its_hash() -> None:
    peer = overlapped(committed(**in_steps(8, 3)[0]))

    class SlowCompute:
        async def run(self, work: Callable[[], Any], cost_bytes: int) -> Any:
            await asyncio.sleep(STEP_SECONDS)
            return work()

    async def main() -> RoundReport:
        await peer.outer_loop.settle()
        peer.outer_loop.state.compute = SlowCompute()
        return await peer.outer_loop.run_round()

    report = play(main())
    assert report.tokens_overlap == 6 * TOKENS, "three until the mean; then a copy, the outer step and the hash"
    assert torch.equal(peer.trainer.local, peer.outer_loop.anchor - 6 * 0.125) and peer.averaged_tokens == [8 * TOKENS]


@pytest.mark.parametrize("attempt", [skipped, lost])
def test_attempt_without_a_mean_keeps_all_and_is_due_at_once(attempt: Callable[..., Script]) -> None:
    first, second = in_steps(8, 3, 1)
    second["cut_seconds"] = HALF
    peer = overlapped(attempt(**first), committed(**second))
    reports = play(peer.rounds())
    assert reports[0].tokens == 11 * TOKENS and not reports[0].peers
    again = peer.seen[1].offers[0]
    assert again.tokens == 11 * TOKENS and again.complete, "it need not train the round's steps again"
    assert peer.averaged_tokens[1] == 12 * TOKENS, "all of it is handed in, what came before included"
    gone = peer.seen[1].mine
    assert torch.equal(peer.trainer.local, peer.outer_loop.anchor - 0.125), gone  # one overlapped step


def test_work_without_weight_stays() -> None:
    peer = overlapped(weighed(0.0, average=lambda mine, into: into.fill_(0.5), **in_steps(8, 3)[0]))
    play(peer.rounds())
    assert torch.equal(peer.trainer.local, peer.outer_loop.anchor - 11 * 0.125)
    assert peer.trainer.local_training.tokens == 11 * TOKENS


@pytest.mark.parametrize(("steps_after", "work"), [(0, 0), (2, 3)])
def test_worker_that_dies_meanwhile_loses_only_that_work(steps_after: int, work: int) -> None:
    """It leaves the anchor. What was handed in is counted all the same. The outer step begins half a step before the
    end: a worker that dies after that starts from the new anchor.
    """
    peer = overlapped(committed(**in_steps(8, 5)[0]))
    training = peer.trainer.local_training
    die_seconds = 8 * STEP_SECONDS + (5 - steps_after) * STEP_SECONDS - HALF / 2

    def die() -> None:
        training.write(peer.outer_loop.anchor)
        peer.trainer.resets += 1

    async def main() -> None:
        asyncio.get_running_loop().call_later(die_seconds, die)
        await peer.rounds()

    play(main())
    assert training.tokens == work * TOKENS
    assert torch.equal(peer.trainer.local, peer.outer_loop.anchor - work * 0.125)
    assert peer.averaged_tokens == [8 * TOKENS] and not torch.equal(peer.outer_loop.anchor, torch.ones(10))


def test_worker_that_dies_before_the_outer_step_starts_from_the_new_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = overlapped(committed(**in_steps(8, 3)[0]))
    trainer, read = peer.trainer, peer.trainer.read

    async def die(into: Vector, part: slice = ALL) -> None:
        if len(peer.seen[0].offers) and peer.outer_loop.chain.head.key.round:
            trainer.local_training.write(peer.outer_loop.anchor)
            trainer.resets += 1
        await read(into, part)

    monkeypatch.setattr(trainer, "read", die)
    play(peer.rounds())
    assert torch.equal(trainer.local, peer.outer_loop.anchor) and not trainer.local_training.tokens


@pytest.mark.parametrize("why", ["leaving", "last round", "outside the roster", "alone", "short"])
def test_training_waits_for_the_mean(why: str) -> None:
    roster = {"outside the roster": (OTHER,), "alone": (ME,)}.get(why, (ME, OTHER))
    short = committed(mean_seconds=0.1)
    peer = Peer(short, short, roster=roster, overlaps=True)
    peer.outer_loop.leaving, peer.outer_loop.last_round = why == "leaving", why == "last round"
    if why != "short":
        peer.outer_loop._average_seconds = math.inf
    assert not any(report.seconds_overlap for report in play(peer.rounds()))
    assert torch.equal(peer.trainer.local, peer.outer_loop.anchor) or why in ("short", "outside the roster")


def test_error_while_averaging_ends_the_training() -> None:
    def fail(mine: Vector, into: Vector) -> None:
        raise OSError("the disk is full")

    async def main() -> None:
        with pytest.raises(OSError, match="the disk is full"):
            await peer.rounds()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    peer = overlapped(committed(average=fail, **in_steps(8, 3)[0]))
    play(main())
    assert peer.seen[0].closed


def test_diverged_work_is_dropped_and_training_continues_from_the_anchor() -> None:
    peer = overlapped(committed(average=lambda mine, into: into.fill_(0.5), **in_steps(8, 3)[0]))
    train = peer.trainer.train

    async def diverging(
        key: RoundKey, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool = True
    ) -> LocalProgress:
        work = await train(key, cut, progress, surplus)
        if key.round == 0:
            peer.trainer.local.fill_(torch.inf)
            return peer.trainer.local_training.work()
        return work

    peer.trainer.train = diverging  # type: ignore[method-assign]
    reports: list[RoundReport] = play(peer.rounds())
    assert peer.averaged_tokens == [0] and reports[0].outcome == Outcome.COMMITTED
    assert torch.equal(peer.trainer.local, peer.outer_loop.anchor - 3 * 0.125)
