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
from protocols.base import LocalProgress, Outcome, RoundKey, Vector
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
        {"cut_seconds": (first - done) * STEP_SECONDS - HALF, "mean_seconds": steps * STEP_SECONDS - HALF}
        for done, steps in zip(before, overlaps, strict=False)
    ]


def overlapped(*scripts: Script, outer: OuterSGD | None = None, step: float = 0.125) -> Peer:
    peer = Peer(*scripts, outer=outer, overlaps=True)
    peer.trainer.local_training.learner.step_size = step  # type: ignore[attr-defined]
    return peer


def value(vector: Vector) -> float:
    """Of a vector whose elements are all equal; they begin at 1."""
    assert torch.equal(vector, vector[:1].expand_as(vector))
    return float(vector[0]) - 1


KEEP = {
    1: [(-12, -13, -15), (-26, -27, -29), (-41, -42, -44)],
    5: [(-12, -17, -27), (-26, -31, -41), (-41, -46, -56)],
}
"""Steps that averaging lasts -> after each outer step the anchor, and the parameters of two peers, whose inner steps
subtract 1 and 3. A round has 8 inner steps; outer learning rate and momentum are a half. By hand: the mean is 16, so
the momentum is 16, 24, 28, the anchor moves by half of the mean and a quarter of that; overlapped work stays."""


@pytest.mark.parametrize("steps", KEEP)
def test_trajectory_is_the_one_computed_by_hand(steps: int) -> None:
    found: list[tuple[float, float, float]] = []
    peers: list[Peer] = []

    def mean(mine: Vector, into: Vector) -> None:
        into.copy_(sum(peer.seen[-1].mine for peer in peers) / 2)  # type: ignore[arg-type]

    async def main() -> None:
        scripts = [committed(average=mean, **times) for times in in_steps(8, *[steps] * 3)]
        peers.extend(overlapped(*scripts, outer=OuterSGD(0.5, 0.5), step=step) for step in (1.0, 3.0))
        await asyncio.gather(*(peer.outer_loop.settle() for peer in peers))
        for _ in range(3):
            for peer in peers:
                peer.outer_loop._average_seconds = math.inf  # to overlap even half a step
            reports = await asyncio.gather(*(peer.outer_loop.run_round() for peer in peers))
            assert [report.seconds_overlap for report in reports] == [steps * STEP_SECONDS] * 2
            one, other = (value(peer.trainer.local) for peer in peers)
            found.append((value(peers[0].outer_loop.anchor), one, other))

    play(main())
    assert found == KEEP[steps]


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


@pytest.mark.parametrize("steps_after", [0, 2])
def test_worker_that_dies_meanwhile_loses_only_that_work(steps_after: int) -> None:
    """It leaves the anchor. What was handed in is counted all the same."""
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
    work = 1 + steps_after
    assert training.tokens == work * TOKENS
    assert torch.equal(peer.trainer.local, peer.outer_loop.anchor - work * 0.125)
    assert peer.averaged_tokens == [8 * TOKENS] and not torch.equal(peer.outer_loop.anchor, torch.ones(10))


def test_worker_that_dies_before_the_outer_step_starts_from_the_new_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = overlapped(committed(**in_steps(8, 3)[0]))
    trainer, read = peer.trainer, peer.trainer.read

    async def die(into: Vector) -> None:
        if len(peer.seen[0].offers) and peer.outer_loop.chain.head.key.round:
            trainer.local_training.write(peer.outer_loop.anchor)
            trainer.resets += 1
        await read(into)

    monkeypatch.setattr(trainer, "read", die)
    play(peer.rounds())
    assert torch.equal(trainer.local, peer.outer_loop.anchor) and not trainer.local_training.tokens


@pytest.mark.parametrize("why", ["leaving", "last round", "outside the roster", "alone", "short"])
def test_training_waits_for_the_mean(why: str) -> None:
    roster = {"outside the roster": (OTHER,), "alone": (ME,)}.get(why, (ME, OTHER))
    short = committed(mean_seconds=0.1)
    peer = Peer(short, short, roster=roster, overlaps=True)
    peer.outer_loop.leaving, peer.outer_loop.last_round = why == "leaving", why == "last round"
    reports = play(peer.rounds())
    overlaps = [report.seconds_overlap > 0 for report in reports]
    assert overlaps == ([True, False] if why == "short" else [False, False])
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
