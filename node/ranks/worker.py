"""The worker of a peer with several devices: rank 0 of their group.

python -m node.ranks.worker MEMORY SOCKET      # as node.training.worker, whose commands it has
"""

from __future__ import annotations

import base64
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeAlias

import torch
import torch.distributed as dist

from node.ranks.cluster import Machines, gather
from node.ranks.group import RankGroup, carry_out
from node.ranks.memory import choice
from node.ranks.zero import ZeroLearner
from node.runtime import tensors
from node.runtime.notes import note, warn
from node.tasks.base import Step, Task
from node.tasks.bystanders import listed
from node.tasks.extra import EXTRA
from node.tasks.hf.data_set import is_streamed
from node.tasks.hf.memory import available_bytes
from node.tasks.hf.settings import ModelPins
from node.tasks.hf.streamed import new_home
from node.tasks.recipe import Recipe
from node.tasks.spec import WorkerSpec
from node.training import worker
from node.training.build import Job, MakeLearner, build, device_of
from node.training.inner_optimizer import LOSS_SCALE, moment_entries
from node.training.shared import Shared
from node.training.trainer import LocalTraining
from node.training.worker import STATE_ABOUT, CommandRejected, Worker, WorkerBroken
from protocols.base import Layout, Vector

if TYPE_CHECKING:
    from node.ranks.dtensors import ShardedLearner

CPU = torch.device("cpu")
RankLearner: TypeAlias = "ZeroLearner | ShardedLearner"


class Rank:
    """What one rank does: its methods and its learner's are the commands of the group."""

    def __init__(self, spec: WorkerSpec, group: RankGroup, own_data: bool = False) -> None:
        self._spec, self._group, self._own_data = spec, group, own_data
        self._device = spec.devices[group.rank - group.machines.first]
        group.meet(device_of(self._device))
        self._make: MakeLearner = self._choose

    def command(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self if hasattr(Rank, name) else self.learner, name)
        return found

    def divide(self, shard: str) -> None:
        """All ranks call it together."""
        spec, group, self.shard = self._spec, self._group, shard
        if shard == "zero3":
            from node.ranks.dtensors import ShardedLearner, make_mesh  # FSDP takes seconds to import

            mesh = make_mesh(group, spec.tensor_parallel)
            self._make = partial(ShardedLearner, group=group, mesh=mesh, offload=spec.offload)
        else:
            keeps = shard == "zero1"
            self._make = partial(ZeroLearner, group=group, keeps_gradients=keeps, offload=bool(spec.offload))

    def free_bytes(self) -> int:
        """The least that a rank may take. All ranks call it together."""
        mine = available_bytes(self._group.device) // self._spec.devices.count(self._device)
        return self._group.least(mine)

    def _choose(self, task: Task, recipe: Recipe, **more: Any) -> Any:
        """Rank 0 knows the model, and decides how it is divided. Then it makes the learner."""
        group = self._group
        spec, is_shared = (
            replace(self._spec, devices=(self._device,) * group.size),
            group.device == CPU and not group.far,
        )
        group.tell_all("free_bytes")
        free, autocast = self.free_bytes(), more.get("autocast")
        chosen = choice(task, spec, free, is_shared=is_shared, is_fresh=group.founds, autocast=autocast)
        if group.founds:
            (note if chosen.fits else warn)(chosen.line)
        group.tell_all("divide", shard=chosen.shard)
        self.divide(chosen.shard)
        if chosen.shard != "zero3" and hasattr(task, "device"):  # else it is divided first, or a user's own
            task.module.to(group.device)
            task.device = group.device
        return self._make(task, recipe, **more)

    def build(self, resume: bool, of_first: dict[str, Any] | None = None) -> None:
        """`of_first`: what the other machines compare with."""
        spec, is_first = replace(self._spec, device=self._device), not self._group.rank
        on_cpu = is_first or self.shard == "zero3"  # rank 0 does not know yet how the model is divided
        make = partial(build, allocate=self._group.allocate, resume=resume, make=self._make, on_cpu=on_cpu)
        if of_first and self._group.machines.number:
            self.job = build_like(make, spec, of_first, self._own_data)
        else:
            self.job = make(spec)
        self.learner: RankLearner = self.job.learner  # type: ignore[assignment]

    def build_in_turn(self, at_once: int, of_first: dict[str, Any] | None) -> None:
        """Of ranks 1 and up, so many at a time."""
        for first in range(1, self._group.size, at_once):
            if first <= self._group.rank < first + at_once:
                self.build(True, of_first)
            self._group.total(0.0)  # these are built

    def compared(self) -> dict[str, Any] | None:
        """What `build` of the other machines gets; None if there are none."""
        if not self._group.far:
            return None
        sample = self._spec.held_out.read_bytes() if self._spec.held_out else self.job.held_out
        pins = asdict(self.job.pins) if self.job.pins else None
        return {"sample": base64.b64encode(sample).decode(), "pins": pins}

    def begin(self, layout: list[list[tuple[str, list[int]]]], kept: list[str]) -> None:
        mine = Layout(tuple(tuple((name, tuple(shape)) for name, shape in each) for each in layout))
        if mine != self.learner.layout or kept != self.learner.kept.names:
            raise ValueError("the task differs between devices: it must not depend on the device, or on chance")
        self.learner.begin()
        if self.learner.loss_scale:
            known = self._group.shared(sum(mine.sizes())).loss_scale.clone()
            if self._group.far:
                dist.broadcast(known, 0)
            if self._group.rank:  # rank 0's is that of the peer
                self.learner.loss_scale.share(known)
        self.waits = self._group.total(is_streamed(self._spec.data))[0] > 0
        self._group.begin(self._spec.nice)

    def ready(self, position: int) -> bool:
        """Whether the data of the next step are here, on all machines."""
        self.learner.position = position
        return bool(self._group.least(self.job.ready()))

    def tell_of_statistics(self) -> None:
        """Such as BatchNorm's: the user should know whose batches they come from."""
        extra = [each.removeprefix(EXTRA) for each, _ in self.learner.layout.fragments[0] if each.startswith(EXTRA)]
        if extra:
            note(
                f"{listed(extra)}: each rank follows its own batches, and after each step all have the mean, which "
                f"follows the data about {self._group.size} times more slowly than on one device"
            )
        if kept := self.learner.kept.names:
            note(f"{listed(kept)}: each rank has its own during a round, and then all have the first rank's")

    def evaluate(self) -> float:
        with self._computing("evaluate failed: "):
            return self.learner.evaluate()

    def generate(self, prompt: str, tokens: int, temperature: float, seed: int) -> bytes:
        assert self.job.generate
        with self._computing(), self.learner.as_first():
            return self.job.generate(base64.b64decode(prompt), tokens, temperature, seed)

    def _computing(self, what: str = "") -> AbstractContextManager[None]:
        """All ranks do it, or rank 0 alone."""
        return self._group.together(what, computes=True) if self.learner.needs_all else nullcontext()

    def count_moments(self) -> float:
        """Of all ranks: one that trains no part of a small model has none."""
        return self._group.total(len(self.learner.placed_moments()))[0]

    def write_moments(self, path: str) -> None:
        parts = [each.part for each in self.learner.placed_moments()]
        with self._group.together("the inner state cannot be written: "):
            (self._group.far or tensors).write_parts(Path(path), parts)

    def read_moments(self, path: str, scale: bool) -> None:
        """`scale`: the file holds that of the loss, as one of training in float16 does."""
        parts = [each.part for each in self.learner.placed_moments(make=True) if scale or each.name != LOSS_SCALE]
        with self._group.together("the inner state cannot be read: "):
            (self._group.far or tensors).read_parts(Path(path), parts)


class GroupLearner:
    """A `Learner` whose steps all ranks take together. Its vector is the one that they share with the peer."""

    def __init__(self, group: RankGroup, own: Rank) -> None:
        self.group, self.own = group, own
        self.layout: Layout = own.learner.layout
        self.vector: Vector = group.allocate(sum(self.layout.sizes()))

    @property
    def position(self) -> int:
        return self.own.learner.position

    @position.setter
    def position(self, position: int) -> None:
        self.own.learner.position = position

    @property
    def is_shared(self) -> bool:
        return self.own.learner.is_shared

    def everywhere(self, do: str, **fields: Any) -> Any:
        """Have all ranks do this; returns rank 0's result."""
        return self.group.everywhere(self.own.command(do), do, **fields)

    def step(self, round_number: int, step: int) -> Step:
        found: Step = self.everywhere("step_at", position=self.position, round_number=round_number, step=step)
        return found

    def moments(self, make: bool = False) -> dict[str, torch.Tensor]:
        raise NotImplementedError("the ranks write their moments themselves")

    def ready(self) -> bool:
        return not self.own.waits or bool(self.everywhere("ready", position=self.position))

    def evaluate(self) -> float:
        loss: float = self.everywhere("evaluate") if self.own.learner.needs_all else self.own.evaluate()
        return loss

    def generate(self, prompt: bytes, tokens: int, temperature: float, seed: int) -> bytes:
        fields: dict[str, Any] = {"prompt": base64.b64encode(prompt).decode(), "tokens": tokens}
        fields |= {"temperature": temperature, "seed": seed}
        do = self.everywhere if self.own.learner.needs_all else lambda _, **fields: self.own.generate(**fields)
        text: bytes = do("generate", **fields)
        return text


class GroupTraining(LocalTraining):
    """The parameters may be on the ranks' devices, and the change that the norm is of."""

    learner: GroupLearner

    @contextmanager
    def outer(self) -> Iterator[None]:
        if self.learner.is_shared:
            with super().outer():
                yield
            return
        self.learner.everywhere("enter_outer")
        try:
            yield
        except Exception:  # not `WorkerBroken`, after which there is nothing to restore
            self.learner.everywhere("leave_outer")
            raise
        self.learner.everywhere("leave_outer")

    def _norm(self) -> float:
        if self.learner.is_shared:
            return super()._norm()
        start, stop, _ = self.part.indices(len(self.anchor))
        norm: float = self.learner.everywhere("distance", start=start, stop=stop)
        return norm


class RankedWorker(Worker):
    @classmethod
    def start(cls, spec: WorkerSpec, memory: int, tell: Callable[[str, Any], None]) -> Self:
        resume = os.fstat(memory).st_size > 0
        spec = with_windows(replace(spec, threads=max(1, spec.thread_count() // spec.ranks)))
        torch.set_num_threads(spec.threads)
        shares = len({*spec.devices}) < spec.ranks
        machines = gather(spec) if spec.nodes > 1 else Machines(spec.ranks, shares=shares)
        group = RankGroup.fork(machines, memory, partial(be_rank, spec))
        group.watch(tell)
        try:
            return cls._begun(spec, group, resume, tell)
        except (WorkerBroken, CommandRejected) as error:
            raise error.__cause__ or ValueError(str(error)) from None
        except RuntimeError:  # perhaps of a collective, which another rank has left
            group.hear_last_words()
            raise

    @classmethod
    def _begun(cls, spec: WorkerSpec, group: RankGroup, resume: bool, tell: Callable[[str, Any], None]) -> Self:
        own = Rank(spec, group)
        own.build(resume)
        shared = group.shared(sum(own.learner.layout.sizes()))
        learner = GroupLearner(group, own)
        # Each may hold the whole model on the CPU while it builds.
        at_once = available_bytes(CPU) // (2 * 4 * sum(own.learner.layout.sizes()))
        learner.everywhere("build_in_turn", at_once=max(1, at_once), of_first=own.compared())
        learner.everywhere("begin", layout=own.learner.layout.fragments, kept=own.learner.kept.names)
        if not resume:
            where = f"{spec.nodes} machines" if spec.nodes > 1 else _listed(spec.devices)
            if group.size > 1:
                note(f"{group.size} ranks train together ({own.shard}), on {where}")
                own.tell_of_statistics()
            else:
                note(f"{where} trains, and the host keeps the optimiser's state")
        if own.job.check_first_loss:
            own.job.check_first_loss(learner.evaluate())
        generate = learner.generate if own.job.generate else None
        job = replace(own.job, learner=learner, generate=generate, ready=learner.ready)
        return cls(job, shared, spec, tell)

    def __init__(self, job: Job, shared: Shared, spec: WorkerSpec, tell: Callable[[str, Any], None]) -> None:
        assert isinstance(job.learner, GroupLearner)
        self._learner, self._recipe = job.learner, spec.recipe
        super().__init__(job, shared, spec, tell)

    def _training_of(self, spec: WorkerSpec) -> LocalTraining:
        return GroupTraining(self._learner, spec.recipe.inner_steps, self._anchor, spec.recipe.fragment_count)

    def _take(self, carried: int) -> None:
        if not self._learner.is_shared:
            self._learner.everywhere("take")
        self._local_training.reset(carried)

    def _publish(self) -> None:
        if not self._learner.is_shared or self._learner.own.learner.kept.names:
            self._learner.everywhere("publish")

    def _write_state(self, path: Path) -> int:
        if not self._learner.everywhere("count_moments"):
            return tensors.write(path, {}, STATE_ABOUT)
        entries = moment_entries(self._learner.own.learner.trained_layout, self._recipe)
        if self._learner.own.learner.loss_scale:
            entries[LOSS_SCALE] = ("F32", (2,))
        size = tensors.create(path, entries, STATE_ABOUT)
        self._learner.everywhere("write_moments", path=str(path))
        return size

    def _read_state(self, path: Path, names: Collection[str]) -> None:
        if {*names} - {LOSS_SCALE} != moment_entries(self._learner.own.learner.trained_layout, self._recipe).keys():
            raise tensors.Unreadable("its tensors are not those of this model and its optimiser")
        self._learner.everywhere("read_moments", path=str(path), scale=LOSS_SCALE in names)


def _listed(devices: Sequence[str]) -> str:
    if devices[0] == "cpu":
        return "the CPU"
    shares = len({*devices}) < len(devices)
    return ", ".join(devices) + ("; those on one GPU share its memory and its time" if shares else "")


def with_windows(spec: WorkerSpec) -> WorkerSpec:
    """With a directory for what the ranks of this machine fetch from the hub. Call it before they are forked."""
    with suppress(OSError):  # the task says so itself
        return replace(spec, windows=new_home()) if is_streamed(spec.data) else spec
    return spec


def be_rank(spec: WorkerSpec, group: RankGroup, lines: BinaryIO, own_data: bool = False) -> None:
    """Any rank but rank 0."""
    rank = Rank(spec, group, own_data)
    carry_out(group, lines, rank.command)


def build_like(make: Callable[[WorkerSpec], Job], spec: WorkerSpec, of_first: dict[str, Any], own_data: bool) -> Job:
    """Build the job on another machine than the peer's; ValueError if its model or its data are other ones."""
    sample = base64.b64decode(of_first["sample"])
    with tempfile.NamedTemporaryFile() as file:
        file.write(sample)
        file.flush()
        own = own_data or spec.held_out is not None  # else the sample is of its data
        if own and not sample:
            raise ValueError("there is no held-out sample for a machine with data of its own: leave out its --data")
        job = make(replace(spec, held_out=Path(file.name) if own else None))
    if not own and job.held_out != sample:
        raise ValueError("its data are not those of machine 0: copy them, or give this machine its own by --data")
    pins = ModelPins.from_fields(of_first["pins"]) if of_first["pins"] else None
    if job.pins and pins and replace(job.pins, base=pins.base, base_loss=pins.base_loss) != pins:
        raise ValueError("its model is not that of machine 0: copy it, and name it by --model")
    return job


def main(arguments: list[str]) -> int:
    return worker.main(arguments, RankedWorker)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
