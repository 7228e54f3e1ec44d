"""The worker process, which owns model, optimiser and device. `node.training.remote` starts it.

    python -m node.training.worker MEMORY SOCKET      # two inherited file descriptors

The socket carries lines of JSON: one command at a time, each answered by `done` or `refused`:

    a WorkerSpec                                        -> done: the layout's fragments, the task's own timeout or null
    do: train, round, begin, surplus                    -> progress: LocalProgress, ...; done: LocalProgress
    do: evaluate                                        -> done: loss
    do: held_out                                        -> done: base64
    do: pins                                            -> done: ModelPins, with the loss of the outer parameters
    do: generate, prompt, tokens, temperature, seed     -> done: base64
    do: save, path                                      -> done: size in bytes of the optimiser's state file
    do: load, path or null, position, threads           -> done: null; threads: to start with, 0: not known

The worker answers an exception in a command that only reads by `refused`, and continues. Any other ends it, and so
does one that leaves its processes out of step (`WorkerBroken`): it writes the traceback to stderr, sends `failed` with
one line, and exits. On SIGUSR1 it writes where it stands to stderr.

`carried` in a command means that the peer has written the shared vectors, and that they hold work worth this many
tokens. The worker reads no line between two steps: `Shared.attention` ends a `train` command. The process ends when the
socket closes.
"""

from __future__ import annotations

import base64
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Self

import torch

from node.runtime import tensors
from node.runtime.cgroup import stand_back, usable_cores
from node.runtime.metrics import workers_here
from node.tasks.spec import PacedValues, WorkerSpec
from node.training.build import Job, build, devices_of
from node.training.failure import first_line, report, write_where_it_stands
from node.training.inner_optimizer import LOSS_SCALE
from node.training.shared import Shared
from node.training.trainer import REPORT_SHARE, LocalTraining, as_json
from node.training.tuning import ThreadTuner
from protocols.base import Vector

MAX_LINE_BYTES = 1 << 20

READ_ONLY = frozenset({"evaluate", "held_out", "pins", "generate"})
"""Commands that change nothing, whatever ends them."""
STATE_ABOUT = {"format": "starling inner state 1"}
WAIT_SECONDS = 0.2
"""Between two looks whether data have come."""
_CONFINE_SECONDS = 20.0
"""Pause between two counts of the other workers. Each count reads the command lines of all processes."""


class CommandRejected(Exception):
    """The command cannot be carried out and has changed nothing. The message is one line."""


class WorkerBroken(BaseException):
    """The processes of this worker are no longer in step, so that it cannot continue after any command.

    Its cause is the error.
    """


class Worker:
    """Carries out commands on one job, with vectors that are shared with the peer.

    On a device other than the CPU the learner has a vector of its own. It is copied from the shared one before a
    command with `carried`, and back after training.
    """

    build: ClassVar[Callable[..., Job]] = staticmethod(build)  # makes the job of such a worker

    @classmethod
    def start(cls, spec: WorkerSpec, memory: int, tell: Callable[[str, Any], None]) -> Self:
        """Raises ValueError, OSError, RuntimeError, MemoryError."""
        torch.set_num_threads(spec.thread_count())
        kept: list[Shared] = []

        def allocate(elements: int) -> Vector:
            kept.append(Shared(memory, elements))
            return kept[0].local

        job = cls.build(spec, allocate, os.fstat(memory).st_size > 0)
        if job.check_first_loss:
            job.check_first_loss(job.learner.evaluate())
        shared = kept[0] if kept else Shared(memory, sum(job.learner.layout.sizes()))
        return cls(job, shared, spec, tell)

    def __init__(self, job: Job, shared: Shared, spec: WorkerSpec, tell: Callable[[str, Any], None]) -> None:
        self._job, self._shared, self._tell = job, shared, tell
        self.answer = {
            "layout": job.learner.layout.fragments,
            "timeout_seconds": job.timeout_seconds,
            "device": devices_of(spec),
        }
        self._batches = spec.recipe.batches
        self._apart = job.learner.vector.data_ptr() != shared.local.data_ptr()
        if shared.fresh:
            shared.local.copy_(job.learner.vector)
            shared.anchor.copy_(job.learner.vector)
        self._anchor = torch.empty_like(job.learner.vector) if self._apart else shared.anchor
        self._local_training = self._training_of(spec)
        self._take(0)
        job.learner.position = shared.position
        if job.loss_scale:
            job.loss_scale.share(shared.loss_scale)
        self._parent, self._next_report = os.getppid(), 0.0
        plain = spec.stage is None and not isinstance(spec.values, PacedValues)
        measured = spec.threads == 0 and not self._apart and plain
        self._tuner = ThreadTuner(spec.thread_count(), spec.thread_count()) if measured else None
        self._confined = time.perf_counter()
        if self._tuner and shared.threads:  # the previous worker found this number
            self._tuner.begin(shared.threads)
        self._compute_with(self._tuner.threads if self._tuner else spec.thread_count())

    def _training_of(self, spec: WorkerSpec) -> LocalTraining:
        return LocalTraining(self._job.learner, spec.recipe.inner_steps, self._anchor, spec.recipe.fragment_count)

    def carry_out(self, do: str, *, carried: int | None = None, **fields: Any) -> Any:
        """Call the method of a command, which is named after it, with the command's fields."""
        command = getattr(self, f"do_{do}", None)
        if command is None:
            raise CommandRejected(f"no command {do!r}")
        if carried is not None:
            self._take(carried)
        return command(**fields)

    def do_train(self, round: int, begin: bool, surplus: bool, fragment: int = 0) -> dict[str, Any]:
        local_training, shared = self._local_training, self._shared
        if begin:
            local_training.begin(round, fragment)
            self._tell("progress", as_json(local_training.work()))
        mark = time.perf_counter()
        while not shared.attention and os.getppid() == self._parent and (surplus or not local_training.complete):
            if not self._job.ready():
                time.sleep(WAIT_SECONDS)
                shared.waited()
                mark = time.perf_counter()
                continue
            time.sleep(self._job.rest_seconds)
            shared.claim(self._job.learner.position + self._batches)
            local_training.step()
            now = time.perf_counter()
            local_training.spend(now - mark)
            shared.stepped()
            if self._tuner:
                self._tune(self._tuner, now - mark, now)
            mark = now
            if local_training.due(soon=now < self._next_report):
                self._tell("progress", as_json(local_training.work()))
                told = time.perf_counter()
                self._next_report = told + (told - now) / REPORT_SHARE
        self._publish()
        return as_json(local_training.work())

    def _tune(self, tuner: ThreadTuner, seconds: float, now: float) -> None:
        """Several peers on one machine share its cores: each would be faster with more threads, but would slow down
        the others.
        """
        tuner.record_step(seconds)
        if now - self._confined >= _CONFINE_SECONDS:
            self._confined = now
            tuner.confine(usable_cores() // max(1, workers_here()))
        self._compute_with(tuner.threads)

    def _compute_with(self, threads: int) -> None:
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        self._shared.threads = threads

    def _take(self, carried: int) -> None:
        if self._apart:
            self._local_training.learner.vector.copy_(self._shared.local)
            self._anchor.copy_(self._shared.anchor)
        self._local_training.reset(carried)

    def _publish(self) -> None:
        if self._apart:
            self._shared.local.copy_(self._local_training.learner.vector)

    def do_evaluate(self) -> float:
        return self._local_training.evaluate()

    def do_held_out(self) -> str:
        return base64.b64encode(self._job.held_out).decode()

    def do_save(self, path: str) -> int:
        try:
            return self._write_state(Path(path))
        except OSError as error:
            raise CommandRejected(f"the inner state cannot be written: {error.strerror or error}") from error

    def do_load(self, path: str | None, position: int, threads: int) -> None:
        try:
            if path is not None and (names := tensors.names(Path(path))):
                self._read_state(Path(path), names)
        except (OSError, tensors.Unreadable) as error:
            raise CommandRejected(
                f"the inner state cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from error
        self._job.learner.position = position
        self._shared.claim(position)
        if self._tuner and threads:
            self._tuner.begin(threads)
            self._compute_with(self._tuner.threads)

    def _write_state(self, path: Path) -> int:
        return tensors.write(path, self._job.learner.moments(), STATE_ABOUT)

    def _read_state(self, path: Path, names: Collection[str]) -> None:
        into = self._job.learner.moments(make=True)
        if LOSS_SCALE in names:
            into.setdefault(LOSS_SCALE, torch.empty(2))  # the file was written in float16, and this is not
        else:
            into.pop(LOSS_SCALE, None)  # or the other way round
        tensors.read(path, into)

    def do_pins(self) -> dict[str, Any]:
        if self._job.pins is None:
            raise CommandRejected("this task has no model of its own")
        loss = self._local_training.evaluate() if self._job.held_out else math.nan
        return asdict(self._job.pins) | {"base_loss": loss if math.isfinite(loss) else None}

    def do_generate(self, prompt: str, tokens: int, temperature: float, seed: int) -> str:
        if self._job.generate is None:
            raise CommandRejected("this task generates no text")
        with self._local_training.outer():
            try:
                text = self._job.generate(base64.b64decode(prompt), tokens, temperature, seed)
            except ValueError as error:
                raise CommandRejected(first_line(error)) from error
        return base64.b64encode(text).decode()


def serve(lines: BinaryIO, tell: Callable[[str, Any], None], memory: int, kind: type[Worker] = Worker) -> int:
    told = set[str]()
    try:
        spec = WorkerSpec.from_json(lines.readline(MAX_LINE_BYTES).decode())
        worker = kind.start(spec, memory, tell)
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        tell("refused", first_line(error))
        return 1
    except BaseException as error:  # noqa: BLE001 - a worker's boundary: whatever it is, the peer has to know
        tell("failed", report(error, told))
        return 1
    stand_back(spec.nice, time.sleep)  # not earlier: on a busy machine the start would take minutes
    tell("done", worker.answer)
    while line := lines.readline(MAX_LINE_BYTES):
        word, value = _attempt(worker, json.loads(line), told)
        tell(word, value)
        if word == "failed":
            return 1
    return 0


def _attempt(worker: Worker, command: dict[str, Any], told: set[str]) -> tuple[str, Any]:
    """The answer's word and value. `told` is as for `report`."""
    name = command["do"]
    try:
        return "done", worker.carry_out(**command)
    except CommandRejected as error:
        return "refused", str(error)
    except BaseException as error:  # noqa: BLE001 - a worker's boundary, as in `serve`
        if name in READ_ONLY and isinstance(error, Exception):
            return "refused", f"{name} failed: {report(error, told)}"
        return "failed", report(error.__cause__ or error if isinstance(error, WorkerBroken) else error, told)


def main(arguments: list[str], kind: type[Worker] = Worker) -> int:
    memory, descriptor = map(int, arguments)
    write_where_it_stands()
    with socket.socket(fileno=descriptor) as link, link.makefile("rb") as lines:

        def tell(kind: str, value: Any) -> None:
            link.sendall(json.dumps({kind: value}).encode() + b"\n")

        try:
            return serve(lines, tell, memory, kind)
        except (BrokenPipeError, ConnectionResetError):  # the peer is gone
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
