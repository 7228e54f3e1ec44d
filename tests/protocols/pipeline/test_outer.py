"""Evaluation and text through the pipeline give what the whole outer parameters give, and change nothing."""

from __future__ import annotations

import asyncio
import math
import struct
from dataclasses import replace
from functools import partial

import pytest

from node.session.pipeline_session import generate
from node.tasks.paced_stage import LOGIT_BYTES
from node.training.stage_replica import StageSeconds
from protocols.base import Header, PeerId, PeerSilent, Stream, stage_scope
from protocols.pipeline.held_out import LEAST_SAMPLES, MAX_SAMPLES, HeldOutLoss, spread_order, usual_samples
from protocols.pipeline.job import VersionPassed
from protocols.pipeline.messages import (
    HEADER_LIMIT,
    METHOD,
    OUTER_METHOD,
    Granted,
    JobInput,
    OuterOutput,
    StageBusy,
    StageRequest,
)
from protocols.pipeline.settings import CALL_LIMIT_SECONDS, PipelineSettings
from tests.sim.pipeline_runner import PipelineRunner
from tests.support.outer_stages import PRESET, RUN, OuterSwarm
from tests.support.simulated import simulated

PROMPT = b"the gossip of "


@pytest.mark.parametrize("layout", ((0, 1, 1), (0, 0, 1, 1, 2, 2)))
def test_evaluation_equals_the_whole_models_and_changes_nothing(layout: tuple[int, ...]) -> None:
    swarm = OuterSwarm(layout)
    before = {peer: replica.state() for peer, replica in swarm.replicas.items()}

    async def story() -> None:
        assert await swarm.evaluate() == pytest.approx(swarm.expected(), abs=1e-5)
        assert all(count for peer, count in swarm.jobs.items() if swarm.layout[peer]), "all replicas were used"

    swarm.play(story)
    assert {peer: replica.state() for peer, replica in swarm.replicas.items()} == before


@pytest.mark.parametrize("stages", (2, 3))
@simulated(lambda stages: OuterSwarm(range(stages)))
async def test_text_equals_the_whole_models(swarm: OuterSwarm) -> None:
    """From a prompt shorter than the context to beyond its end."""

    async def logits(tokens: bytes, position: int) -> bytes:
        return await swarm.client.logits(tokens, position, 1, swarm.deadline(600.0))

    shape = swarm.replicas["p0"].task.shape
    for prompt in (PROMPT[:4], PROMPT):
        written = await generate(prompt, 12, 0.0, 0, logits, shape)
        assert written == swarm.whole().generate(prompt, 12) and len(prompt) + len(written) > PRESET.shape.context


@simulated(OuterSwarm, (0, 1, 1))
async def test_replica_that_is_behind_is_busy(swarm: OuterSwarm) -> None:
    """It computes nothing; another one does, or the evaluation waits for it."""
    swarm.trained["p0"] = swarm.trained["p2"] = 2
    loss = await swarm.evaluate(trained=2)
    assert loss == pytest.approx(swarm.expected(), abs=1e-5) and swarm.jobs["p2"] and not swarm.jobs["p1"]
    swarm.trained["p0"] = 3
    waiting = asyncio.create_task(swarm.evaluate(trained=3))
    await asyncio.sleep(60.0)
    assert not waiting.done() and not swarm.jobs["p1"]
    swarm.trained["p1"] = 3
    assert await waiting == loss and swarm.jobs["p1"]


@pytest.mark.parametrize("victim", ("p1", "p3"))
@pytest.mark.parametrize("way", ("killed", "mute"))
@simulated(OuterSwarm, (0, 1, 1, 2, 2))
async def test_replica_that_dies_in_the_middle_costs_a_retry(swarm: OuterSwarm, victim: PeerId, way: str) -> None:

    def strike(peer: PeerId) -> None:
        if peer == victim and swarm.jobs[peer] == 2:
            if way == "killed":
                asyncio.get_running_loop().call_soon(swarm.network.kill, peer)
            else:
                for other in swarm.layout:
                    swarm.network.block(peer, other)

    swarm.on_job = strike
    assert await swarm.evaluate(seconds=60.0) == pytest.approx(swarm.expected(), abs=1e-5)
    assert swarm.jobs[victim] in (2, 3), "it was called no more"
    swarm.network.kill(victim)


@pytest.mark.parametrize("moves", ("p0", "p1", "p3"))
@simulated(OuterSwarm, (0, 1, 1, 2))
async def test_evaluation_is_of_one_version_or_ends_with_what_it_has(swarm: OuterSwarm, moves: PeerId) -> None:
    """A new mean is written in the middle of a job, in any stage. What was found before is that of the whole model."""
    found, job = HeldOutLoss(1), {"p0": 6, "p1": 3, "p3": 6}[moves]
    anchor = swarm.replicas[moves].local_training.anchor

    def write() -> None:
        anchor.add_(1.0)

    def settle() -> None:
        swarm.changing.discard(moves)
        swarm.trained[moves] = 2

    def begin(peer: PeerId) -> None:
        if peer == moves and swarm.jobs[peer] == job:
            swarm.changing.add(moves)
            for delay, change in ((0.0, write), (1.0, settle)):
                asyncio.get_running_loop().call_later(delay, change)

    swarm.on_job = begin
    with pytest.raises(VersionPassed, match=r"gone on|have changed"):
        await swarm.client.evaluate(found, swarm.deadline(600.0))
    expected = swarm.expected_losses()
    assert found.losses == {index: pytest.approx(expected[index], abs=1e-4) for index in found.losses}
    assert 0 < found.samples < len(expected) and not found.is_whole
    await asyncio.sleep(1.0)


@simulated(OuterSwarm, (0, 1, 1, 2))
async def test_replica_that_names_an_older_version_is_refused(swarm: OuterSwarm) -> None:
    """It is blamed, and the evaluation goes by the other one."""

    async def lie(stream: Stream, request: StageRequest) -> None:
        size = swarm.settings.sizes.activation_bytes
        await stream.send(Granted())
        await stream.receive(HEADER_LIMIT)
        await stream.receive_into(memoryview(bytearray(size)))
        await stream.send(OuterOutput(0.0, request.trained - 1), bytes(size))
        await stream.receive(HEADER_LIMIT)

    swarm.endpoints["p1"].serve(OUTER_METHOD, StageRequest, lie)
    assert await swarm.evaluate() == pytest.approx(swarm.expected(), abs=1e-5)
    blamed, _, _ = swarm.endpoints["p0"].accounting.take()
    assert {each.peer for each in blamed} == {"p1"} and "after 0 rounds where 1 were asked for" in blamed[0].why


def test_first_samples_are_spread_evenly() -> None:
    """However many there are, and whatever their number: a loss is that of all parts of the held-out data."""
    order = list(spread_order())
    assert sorted(order) == list(range(MAX_SAMPLES))
    for count in (13, 40, MAX_SAMPLES):
        taken = [index for index in order if index < count]
        for n in (4, 8, count // 2):
            quarters = [sum(4 * index // count == quarter for index in taken[:n]) for quarter in range(4)]
            assert max(quarters) - min(quarters) <= 2
    assert [usual_samples(*round_) for round_ in ((1, 8), (50, 8), (500, 16))] == [8, 24, 64]
    cut_short = HeldOutLoss(1)
    for index in order[: LEAST_SAMPLES - 1]:
        cut_short.add(index, 2.0)
    assert math.isnan(cut_short.mean)
    cut_short.add(order[LEAST_SAMPLES], 2.0)
    assert cut_short.mean == 2.0


@pytest.mark.parametrize("why", ("a stage is empty", "a replica is slow"))
@simulated(lambda why: OuterSwarm((0, 1), stages=3 if why == "a stage is empty" else 2))
async def test_deadline_ends_an_evaluation(swarm: OuterSwarm) -> None:
    """No task and no stream is left (`play` checks that once more), and the replicas' places are free again."""
    swarm.job_seconds = 0.1 if swarm.stages == 3 else 20.0
    for _ in range(3):
        began = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            await swarm.evaluate(seconds=30.0)
        assert asyncio.get_running_loop().time() == began + 30.0
        await asyncio.sleep(21.0)  # the job that is under way ends
        assert swarm.left() == (1, 0)
    with pytest.raises(TimeoutError):
        await swarm.client.logits(bytes(36), 1, 1, swarm.deadline(0.05))
    await asyncio.sleep(21.0)


async def answer_to(stream: Stream, *frames: tuple[Header, bytes]) -> Header:
    """The answer to the last of these frames, each but the last one answered, too."""
    for header, payload in frames:
        await stream.send(header, payload)
        answer = await stream.receive(HEADER_LIMIT)
    return answer


@simulated(OuterSwarm, (0, 1, 2))
async def test_wrong_requests_are_refused(swarm: OuterSwarm) -> None:
    me, to, size = swarm.member("p0"), swarm.member("p1"), swarm.settings.sizes.activation_bytes
    good = StageRequest(RUN, stage_scope(1), me, to, 0, 1)
    last = replace(good, scope=stage_scope(2), to=swarm.member("p2"))
    nans = struct.pack("<f", math.nan) * (size // 4)
    wrong: list[tuple[str, list[tuple[Header, bytes]]]] = [
        ("another run or stage", [(replace(good, scope=stage_scope(2)), b"")]),
        ("another run or stage", [(replace(good, run=bytes(32)), b"")]),
        ("in the name of p2", [(replace(good, sender=swarm.member("p2")), b"")]),
        ("'outer_logits' that this replica does not do", [(good, b""), (JobInput("outer_logits", 1), bytes(size))]),
        ("'forward' that this replica does not do", [(good, b""), (JobInput("forward", 0), bytes(size))]),
        ("outer parameters with a microbatch", [(replace(good, number=1), b"")]),
        ("not finite", [(good, b""), (JobInput("outer_forward", 0), nans)]),
        ("expected JobInput", [(good, b""), (Granted(), b"")]),
        ("position 13 of 12", [(last, b""), (JobInput("outer_logits", 13), bytes(size))]),
    ]
    for what, frames in wrong:
        request = frames[0][0]
        assert isinstance(request, StageRequest)
        with pytest.raises(PeerSilent):
            async with swarm.endpoints["p0"].open(request.to.peer, OUTER_METHOD, swarm.deadline(60.0)) as stream:
                await answer_to(stream, *frames)
        peer, why = swarm.network.transports[request.to.peer].refused[-1]
        assert peer == "p0" and what in why
    assert await swarm.evaluate() == pytest.approx(swarm.expected(), abs=1e-5), "all places are free again"


@simulated(OuterSwarm, (0, 1, 2))
async def test_microbatch_for_another_stage_or_run_is_refused(swarm: OuterSwarm) -> None:
    """On an open stream, too, on which one was served before."""
    good = StageRequest(RUN, stage_scope(1), swarm.member("p0"), swarm.member("p1"), 1, 0)
    for what, wrong in (
        ("another run or stage", replace(good, scope=stage_scope(2))),
        ("another run or stage", replace(good, run=bytes(32))),
        ("in the name of p2", replace(good, sender=swarm.member("p2"))),
        ("a place without a microbatch", replace(good, number=0)),
    ):
        for before in ((), ((good, b""),)):
            with pytest.raises(PeerSilent):
                async with swarm.endpoints["p0"].open("p1", METHOD, swarm.deadline(60.0)) as stream:
                    await answer_to(stream, *before, (wrong, b""))
            peer, why = swarm.network.transports["p1"].refused[-1]
            assert peer == "p0" and (what in why or (before and "another name" in why))


@pytest.mark.parametrize("holder, seconds", (("alive", CALL_LIMIT_SECONDS), ("mute", 6.0)))
@simulated(OuterSwarm, (0, 0, 1))
async def test_third_request_at_once_is_busy_before_its_payload(swarm: OuterSwarm, holder: str, seconds: float) -> None:
    """And who holds places without sending anything loses them, the sooner if it is believed dead."""
    request = StageRequest(RUN, stage_scope(1), swarm.member("p1"), swarm.member("p2"), 0, 1)
    open_ = partial(swarm.endpoints["p1"].open, "p2", OUTER_METHOD, swarm.deadline(1000.0))
    async with open_() as one, open_() as other:
        assert await answer_to(one, (request, b"")) == await answer_to(other, (request, b"")) == Granted()
        began = asyncio.get_running_loop().time()
        async with open_() as third:
            assert isinstance(await answer_to(third, (request, b"")), StageBusy)
        assert asyncio.get_running_loop().time() - began < 0.3
        if holder == "mute":
            swarm.network.block("p1", "p2")
        assert await swarm.evaluate() == pytest.approx(swarm.expected(), abs=1e-5)
        assert asyncio.get_running_loop().time() - began < seconds + 10.0


@simulated(OuterSwarm, (0, 1, 1, 2))
async def test_bad_output_is_not_sent_on_for_ever(swarm: OuterSwarm) -> None:
    """The last stage refuses what a replica of stage 1 gives: the path starts anew, until it goes by the other one."""
    nans = struct.pack("<f", math.nan) * (swarm.settings.sizes.activation_bytes // 4)
    swarm.replicas["p1"].learner._forward = lambda x: nans  # type: ignore[method-assign]
    assert await swarm.evaluate() == pytest.approx(swarm.expected(), abs=1e-5)
    assert swarm.jobs["p1"]


class EvaluatingRunner(PipelineRunner):
    """A pipeline that trains and can be evaluated meanwhile."""

    def pipeline(self) -> PipelineSettings:
        settings = super().pipeline()
        return replace(settings, sizes=replace(settings.sizes, logit_bytes=LOGIT_BYTES))

    def seconds(self, index: int) -> StageSeconds:
        paced = super().seconds(index)
        return replace(paced, outer=paced.forward)


@simulated(EvaluatingRunner, (0, 0, 1, 1, 2))
async def test_training_goes_on_beside_evaluations(run: EvaluatingRunner) -> None:
    """Also while a replica is killed. The paced task notices weights that change under a lease; `play` checks more."""
    await run.rounds(1)
    for kill in (False, True):
        trained = run.trained("p0")
        found = [HeldOutLoss(trained) for _ in range(2)]
        pairs = zip(("p0", "p1"), found, strict=True)
        both = asyncio.gather(*(run.drivers[peer].evaluate(each, run.now + 120.0) for peer, each in pairs))
        if kill:
            run.kill("p2")
        await both
        assert [each.mean for each in found] == [1.0, 1.0]
        logits = await run.drivers["p0"].logits(b"", 1, trained, run.now + 120.0)
        assert logits == bytes(LOGIT_BYTES)
        await run.rounds(1)
