"""Several ranks behind one worker compute what one process computes, and their peer agrees with others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from node.runtime import tensors
from node.runtime.compute import ThreadCompute
from node.training.remote import RemoteTrainer, WorkerError
from protocols.base import LocalProgress
from protocols.vectors.views import fragment
from tests.support.long import long
from tests.support.other_worker import worker_program
from tests.support.rank_groups import (
    MUON_TOLERANCE,
    RUN,
    STEPS,
    TOLERANCE,
    Apart,
    Training,
    gpt,
    grouped,
    is_statistic,
    ranks_of,
    round_of,
    spec_of,
    vector,
    with_small_data,
)
from tests.support.real_swarm import START_SECONDS, RealSwarm, wait

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

LONG = {
    "gpt-adamw": (
        *("zero1 x1 optimizer", "zero2 x2 optimizer", "zero3 x2 parameters"),
        "tensor x2 apart",
    ),
    "gpt-muon": ("zero2 x4 shared", "zero3 x3 optimizer", "tensor x4 apart"),
    "own": ("zero1 x3 shared",),
    "own plain": ("zero3 x4 apart",),  # batches without targets
    "qwen3 full": ("zero3 x3 apart", "tensor x2 apart"),
    "qwen3 lora": ("zero1 x2 apart",),
    "llama full": ("zero1 x2 shared", "tensor x2 apart"),
    "llama lora": ("zero2 x2 apart", "zero3 x2 optimizer"),
    "gpt2 full": ("zero3 x2 apart",),
    "gpt2 lora": ("zero1 x3 apart",),
}
"""Each kind of model and each optimiser with whole and with divided tensors, as far as they go together; each way to
divide with several numbers of ranks, and each place of the parameters and the moments."""
REFUSED = {
    ("own", "zero3 x2 apart"): "training changes 1.running_mean, which zero3 and tensor parallel cannot average",
    ("qwen3 lora", "tensor x2 apart"): "adapters cannot be divided by tensor parallel",
    ("gpt2 full", "tensor x2 apart"): "the model gpt2 has no plan for tensor parallel",
}


class Reference:
    """One process, beside which groups of ranks train one after another. Its first round is the same for all."""

    def __init__(self, one: RemoteTrainer, home: Path) -> None:
        self.one, self.saved = one, home / "one"

    async def train(self) -> None:
        self.begun = await vector(self.one)
        self.work = await round_of(self.one, 0)
        self.whole, self.position = await vector(self.one), self.one.position
        await self.one.save(self.saved)

    async def again(self, saved: Path) -> tuple[LocalProgress, torch.Tensor]:
        """Its second round, from the optimiser's state that a group has saved."""
        await Training(self.one, 9).end()  # a round is begun once
        await self.one.load(saved, self.position)
        self.held_out = await evaluated(self.one, self.whole)
        return await round_of(self.one, 1), await vector(self.one)


async def evaluated(trainer: RemoteTrainer, whole: torch.Tensor) -> float:
    """The next round begins with these parameters, and not with those that this has gathered."""
    await trainer.write(whole, anchor=0.9 * whole, tokens=1)
    assert torch.equal(await vector(trainer), whole)
    return await trainer.evaluate()


@contextmanager
def on(place: str) -> Iterator[None]:
    """Parameters that lie apart are, for a rank, on a device. What is named is on the host then."""
    try:
        with nullcontext() if place == "shared" else worker_program("tests.gpu.ranks", "node.ranks.worker"):
            yield
    except BaseException as error:
        error.add_note(f"of ranks with {place}")
        raise


@pytest.mark.parametrize(
    "task, divisions",
    [("gpt-adamw", ("zero1 x2 shared",)), ("own", ("zero2 x3 apart",)), *long(*LONG.items())],
)
async def test_ranks_compute_what_one_process_does(
    task: str,
    divisions: tuple[str, ...],
    compute: ThreadCompute,
    models: Callable[[str], Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one_spec = spec_of(task, models, tmp_path)
    async with RemoteTrainer(one_spec, compute) as one:
        reference = Reference(one, tmp_path)
        await reference.train()
        for division in divisions:
            with on(division.split()[-1]):
                async with RemoteTrainer(grouped(one_spec, division), compute) as group:
                    await compare(task, reference, group, tmp_path)
                    if task == "own":
                        have_same_buffers(group, tmp_path)
                        assert (
                            "running_mean, 1.running_var: each rank follows its own batches, and after" in caplog.text
                        )
                        assert "num_batches_tracked, latest: each rank has its own during a round, and t" in caplog.text
        assert one.restarts == 0


@pytest.mark.long
@pytest.mark.parametrize(("division", "tolerance"), [("zero2 x2 apart", 1e-5), ("zero3 x2 apart", 0.1)])
async def test_norm_of_ranks_is_that_of_the_fragment(division: str, tolerance: float, compute: ThreadCompute) -> None:
    """With divided tensors, one that the fragment cuts is taken to have changed alike everywhere."""
    with on("apart"):
        async with RemoteTrainer(grouped(gpt(fragments=3), division), compute) as group:
            begun = await vector(group)
            for index in range(3):
                training = Training(group, 0, fragment=index)
                await training.until_tokens(1)
                work = await training.end()
                part = fragment(len(begun), 3, index)
                moved = (await vector(group) - begun)[part].norm()
                assert work.norm > 0 and work.norm == pytest.approx(float(moved), rel=tolerance)


async def compare(task: str, reference: Reference, group: RemoteTrainer, home: Path) -> None:
    """Two rounds. The second begins with the optimiser's state of the other."""
    one, tolerance = reference.one, MUON_TOLERANCE if "muon" in task else TOLERANCE
    assert group.layout == one.layout and torch.equal(await vector(group), reference.begun)
    tensors.write(home / "other", {"exp_avg": torch.zeros(3)}, {})
    with pytest.raises(WorkerError, match="its tensors are not those of this model"):
        await group.load(home / "other", group.position)
    work, begun, whole = reference.work, reference.begun, reference.whole
    for number in range(2):
        found = await round_of(group, number)
        assert found.tokens == work.tokens > 0 and group.position == 4 * STEPS * (number + 1)
        assert found.loss == pytest.approx(work.loss, rel=tolerance)
        assert found.norm == pytest.approx(work.norm, rel=1e-2 if task == "own" else tolerance)
        apart, other = Apart(one, whole, begun), await vector(group)
        assert apart.of(other, lambda name: not is_statistic(name)) <= tolerance
        if task == "own":
            assert 0 <= apart.of(other, is_statistic, begun=0.0) < 0.5
        if number == 0:
            await group.save(home / "group")
            assert (home / "group").stat().st_size == reference.saved.stat().st_size
            work, whole = await reference.again(home / "group")
            await group.load(reference.saved, reference.position)
            begun = reference.whole
            assert await evaluated(group, begun) == pytest.approx(reference.held_out, rel=1e-6)
    for each in (one, group):
        await each.write(whole)
    assert torch.equal(await vector(group), whole)
    assert await group.evaluate() == pytest.approx(await one.evaluate(), rel=1e-6)
    if not task.startswith("own"):
        assert await group.generate(b"1. Ann", 4) == await one.generate(b"1. Ann", 4)
    assert group.restarts == 0


def have_same_buffers(group: RemoteTrainer, home: Path) -> None:
    """At the beginning of the second round, also those that no vector holds. Random numbers differ."""
    written = (home / f"{each.pid}-{4 * STEPS + rank}" for rank, each in enumerate(ranks_of(group)))
    first, *others = map(torch.load, written)
    changed = {"1.running_mean", "1.running_var", "1.num_batches_tracked", "latest"}
    assert first.keys() == changed | {"int16", "uint16", "float8_e4m3fn", "expanded"}
    assert first["1.num_batches_tracked"] and first["latest"].abs().sum()
    assert others and all(torch.equal(first[name].double(), other[name].double()) for other in others for name in first)
    drawn = {(home / f"{each.pid}-drawn").read_text() for each in ranks_of(group)}
    assert len(drawn) == 1 + len(others)


@pytest.mark.long
@pytest.mark.parametrize("task, division", REFUSED)
async def test_ranks_refuse_what_cannot_be_divided(
    task: str, division: str, compute: ThreadCompute, models: Callable[[str], Path]
) -> None:
    with pytest.raises(WorkerError, match=REFUSED[task, division]):
        async with RemoteTrainer(grouped(spec_of(task, models), division), compute):
            pass


def test_peers_of_two_ranks_and_of_one_agree(tmp_path: Path) -> None:
    with RealSwarm(tmp_path, RUN, with_small_data) as swarm:
        a = swarm.found("a", "--ranks", "2", "--shard", "zero2")
        assert "2 ranks train together (zero2), on the CPU" in a.said()
        (b,) = swarm.join("b", via=a)
        report = wait("both are in one mean", lambda: swarm.all_in_one_mean([a, b]), START_SECONDS)
        assert len(report["peers"]) == 2
