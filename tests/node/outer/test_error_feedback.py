"""Error feedback in a peer's rounds: the residual, when it changes, and that it survives a restart."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from node.outer.error_feedback import ErrorFeedback, feedback
from node.outer.replicated_loop import ReplicatedOuterLoop
from node.outer.state import OuterSGD, OuterState
from node.storage.checkpoint import FEEDBACK, newest
from node.storage.checkpoint_manager import CheckpointManager
from node.tasks.base import Step
from protocols.base import AveragingResult, Contribution, Layout, LocalProgress, Outcome, Vector
from protocols.history.chain import Chain
from protocols.vectors.codec import codec
from protocols.vectors.views import norm
from tests.sim.host import SimClock, SimCompute
from tests.sim.scenario import Scenario
from tests.sim.scenario_runner import ScenarioRunner, ScenarioSetup
from tests.sim.world import Outcome as Played
from tests.sim.world import play as play_world
from tests.support.checkpoints import Disk, Worker, like
from tests.support.inline_trainer import ELEMENTS, InlineTrainer, PlainLearner
from tests.support.long import long
from tests.support.scripted_peers import ME, OTHER, RUN, Peer, Script, ScriptedAverager, lost, play, skipped, weighed
from tests.support.simulated import on_virtual_time, simulated

TOPK = codec("topk")
WIDE = 5000
EVERY_ROUNDS = 3

COUNTED = AveragingResult(Outcome.COMMITTED, contributions={ME.peer: Contribution(1, 1)}, weights={ME.peer: 1.0})
WITHOUT_ME = AveragingResult(Outcome.COMMITTED, contributions={OTHER.peer: Contribution(1, 1)}, weights={ME.peer: 1.0})
OF_ANOTHER_PLAN = AveragingResult(Outcome.COMMITTED, contributions={ME.peer: Contribution(1, 1)})


def counted() -> Script:
    return Script(end=COUNTED)


def play_with_feedback(*scripts: Script) -> tuple[Peer, ErrorFeedback]:
    """A peer that has played these rounds with topk, and its error feedback."""
    peer = Peer(*scripts)
    peer.outer_loop.feedback = error_feedback = ErrorFeedback(TOPK, ELEMENTS, SimCompute())
    play(peer.rounds())
    return peer, error_feedback


def units(*places: float) -> list[float]:
    return [float(place) for place in places]


# -- when it advances -------------------------------------------------------------------------------------------------


def test_unsent_residual_joins_the_next_pseudo_gradient() -> None:
    """One of ten elements travels: the first of the equal ones, then one with the largest residual."""
    peer, error_feedback = play_with_feedback(counted(), counted())
    first, second = (seen.mine for seen in peer.seen)
    assert first.tolist() == units(0.5, *[0] * 9)
    more = torch.tensor(0.5).mul(0.95).add(0.5)
    sent = float(more.to(torch.bfloat16))
    assert second.tolist() == units(0, sent, *[0] * 8)
    assert (
        error_feedback.residual[0] == 0.5
        and error_feedback.residual[1] == more - sent
        and (error_feedback.residual[2:] == more).all()
    )


def test_round_without_own_plan_leaves_no_residual() -> None:
    """A skipped or undecided round sends nothing; a mean of an earlier plan does not say what was counted."""
    peer, error_feedback = play_with_feedback(skipped(), lost(), counted())
    assert [float(seen.mine[0]) for seen in peer.seen] == [0.5, 1.0, 1.5]
    assert error_feedback.residual.tolist() == units(0, *[1.5] * 9)
    _, error_feedback = play_with_feedback(counted(), Script(end=OF_ANOTHER_PLAN))
    assert not error_feedback.residual.any()


def test_uncounted_work_is_dropped_and_residual_stays() -> None:
    peer, error_feedback = play_with_feedback(counted(), Script(end=WITHOUT_ME), counted())
    _, second, third = (seen.mine for seen in peer.seen)
    assert torch.equal(second, third) and float(second[1]) > 0.9
    assert error_feedback.residual[0] == 0.5


def test_late_step_is_kept_whole() -> None:
    """The peer keeps the whole step, not the part of it that the codec would have sent."""
    peer, _ = play_with_feedback(weighed(0.0, average=lambda mine, into: into.fill_(1)))
    assert torch.equal(peer.trainer.written[-1], peer.outer_loop.anchor - 0.5)


def test_offer_norm_includes_the_residual() -> None:
    peer, error_feedback = play_with_feedback(counted(), counted())
    first, second = peer.seen
    assert first.work.norm == pytest.approx(0.5 * math.sqrt(10))
    assert second.work.norm == pytest.approx(0.5 * math.sqrt(10) + 0.95 * 0.5 * 3)
    assert norm([second.mine]) <= second.work.norm
    assert error_feedback.offered(LocalProgress(0, 1.0, 1.0, 0.0)).norm == 0.0
    assert error_feedback.offered(LocalProgress(1, 1.0, 1.0, 1e30)).norm == 1e30


def test_only_topk_has_error_feedback() -> None:
    assert [feedback(codec(name), 3, SimCompute()) is None for name in ("fp32", "int8", "int4", "e3m0", "topk")] == [
        True, True, True, True, False
    ]  # fmt: skip


# -- in a checkpoint --------------------------------------------------------------------------------------------------


@on_virtual_time
async def test_residual_round_trips_and_unreadable_is_reset(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, again = (ErrorFeedback(TOPK, 100, SimCompute()) for _ in range(2))
    made.residual.copy_(torch.arange(100.0) - 50)
    await made.save(tmp_path / "file")
    await again.load(tmp_path / "file")
    assert torch.equal(again.residual, made.residual) and not caplog.records
    assert again.offered(LocalProgress(1, 1.0, 1.0, 0.0)).norm == pytest.approx(0.95 * norm([made.residual]))
    (tmp_path / "file").write_bytes(b"nothing like it")
    await again.load(tmp_path / "file")
    assert not again.residual.any() and "the error feedback is lost" in caplog.messages[0]
    await again.load(None)
    assert not again.residual.any() and len(caplog.records) == 1


class Waves(PlainLearner):
    """A `Learner` without memory, whose steps differ by round and step."""

    def __init__(self) -> None:
        self.layout = Layout(((("waves", (WIDE,)),),))
        self.vector: Vector = torch.ones(WIDE)

    def step(self, round_number: int, step: int) -> Step:
        wave = torch.arange(WIDE) * (7 * round_number + step + 3) % 1009
        self.vector.sub_(wave.float() * 2**-10)
        return Step(1.0, 100)


class CheckpointedPeer:
    """A peer that goes on from a chain and keeps checkpoints."""

    def __init__(self, place: Path, chain: Chain, rounds: int) -> None:
        self.trainer, self.chain = InlineTrainer(Waves(), inner_steps=2, step_seconds=0.5), chain
        self.error_feedback = ErrorFeedback(TOPK, WIDE, SimCompute())
        first = replace(like(place), layout=self.trainer.layout)
        self.checkpoints = CheckpointManager(
            place,
            first,
            every_rounds=EVERY_ROUNDS,
            limit_bytes=1 << 30,
            disk=Disk(),
            inner=Worker(),
            feedback=self.error_feedback,
        )
        averager = ScriptedAverager(*[counted() for _ in range(rounds)])
        self.outer_loop = ReplicatedOuterLoop(
            chain,
            averager,
            state=OuterState(torch.ones(WIDE), OuterSGD(0.7, 0.9), SimCompute()),
            trainer=self.trainer,
            wall=SimClock().wall,
            feedback=self.error_feedback,
            checkpoints=self.checkpoints,
        )
        self.averager = averager

    async def play(self) -> Chain | None:
        """Play all rounds; returns the chain as it was when the checkpoint was made."""
        kept = None
        async with self.checkpoints:
            await self.outer_loop.settle()
            for _ in list(self.averager.scripts):
                await self.outer_loop.run_round()
                if self.chain.head.key.round == EVERY_ROUNDS:
                    kept = self.chain.copy()
        return kept


@on_virtual_time
async def test_restarted_peer_continues_to_identical_bits(tmp_path: Path) -> None:
    async def restarted(chain: Chain, with_feedback: bool) -> CheckpointedPeer:
        checkpoint = newest(tmp_path)
        peer = CheckpointedPeer(tmp_path / str(with_feedback), chain.copy(), 2)
        await peer.outer_loop.start_from(checkpoint.snapshot())
        if with_feedback:
            await peer.error_feedback.load(checkpoint.feedback)
        await peer.play()
        return peer

    first = CheckpointedPeer(tmp_path, Chain(RUN, "run", (ME, OTHER), bytes(32)), EVERY_ROUNDS + 2)
    chain = await first.play()
    assert chain and newest(tmp_path).round == EVERY_ROUNDS
    assert newest(tmp_path).feedback == newest(tmp_path).path / FEEDBACK
    second, forgetful = await restarted(chain, True), await restarted(chain, False)
    assert torch.equal(second.outer_loop.anchor, first.outer_loop.anchor)
    assert (
        torch.equal(second.error_feedback.residual, first.error_feedback.residual)
        and first.error_feedback.residual.any()
    )
    assert second.chain.head.key.lineage == first.chain.head.key.lineage
    assert not torch.equal(forgetful.outer_loop.anchor, first.outer_loop.anchor)


# -- a whole swarm ----------------------------------------------------------------------------------------------------


@simulated(ScenarioRunner, ScenarioSetup(4, fork_peers=0, codec="topk", elements=3000, chunk_elements=4096))
async def test_replay_after_absence_clears_the_residual(swarm: ScenarioRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer finds the parts of rounds of three and of four members, which have different sizes."""
    forgotten: list[tuple[str, bool]] = []

    def forget(name: str, error_feedback: ErrorFeedback, real: Callable[[slice], None], part: slice) -> None:
        forgotten.append((name, bool(error_feedback.residual.any())))
        real(part)
        assert not error_feedback.residual.any()

    await swarm.rounds(2)
    for name, outer_loop in swarm.replicas.items():
        error_feedback = outer_loop.feedback
        assert isinstance(error_feedback, ErrorFeedback)
        monkeypatch.setattr(error_feedback, "forget", partial(forget, name, error_feedback, error_feedback.forget))
    swarm.cut(["p3"], swarm.peers)
    await asyncio.sleep(30.0)
    swarm.heal(["p3"], swarm.peers)
    await swarm.until(swarm.whole, 30.0, "a whole roster")
    assert sum(each["replayed_rounds"] for each in swarm.caught_up("p3")) > 0
    assert forgotten == [("p3", True)]


@cache
def played_with(name: str) -> Played:
    played = play_world(Scenario(peers=4, rounds=3, seed=5, codec=name, elements=60_000, chunk_elements=8192))
    assert not played.violations
    return played


@pytest.mark.parametrize("name, factor", [("topk", 12), *long(("int4", 6), ("e3m0", 6))])
def test_lossy_codec_swarm_holds_identical_bits(name: str, factor: float) -> None:
    """The swarm sends less than in float32 by `factor`, votes and headers included."""
    played, plain = played_with(name), played_with("fp32")
    for reports in zip(*played.histories.values(), strict=True):
        assert {report["outcome"] for report in reports} == {"committed"}
        assert len({report["params_hash"] for report in reports}) == 1
        assert all(len(report["peers"]) == 4 for report in reports)
    assert len({anchor.numpy().tobytes() for anchor in played.anchors.values()}) == 1
    assert sum(plain.sent_bytes.values()) / sum(played.sent_bytes.values()) > factor
