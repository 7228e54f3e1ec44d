"""A worker that trains one stage of a pipeline. Its jobs are commands; activations travel in `ActivationSlots`.

    python -m node.training.stage_worker MEMORY SOCKET      # as node.training.worker, whose commands it has, too

    do: forward                      first: x                       -> done: null; result: y
    do: backward                     first: x, second: gradient     -> done: null; result: gradient of x
    do: loss                         first: x, second: targets      -> done: loss; result: gradient of x
    do: draw                                                        -> done: batch; result: y, then targets
    do: finish, batch, loss          first: gradient                -> done: null
    do: begin, round                                                -> done: LocalProgress
    do: step, round, seconds                                        -> done: [complete, tokens, LocalProgress or null]
    do: work                                                        -> done: LocalProgress

    With the outer parameters, without counting anything:

    do: outer_forward                first: x                       -> done: null; result: y
    do: outer_loss                   first: x, second: targets      -> done: loss
    do: outer_logits, position       first: x                       -> done: null; result: logits
    do: outer_sample, index                                         -> done: whether there is one; result: y, targets
    do: outer_first                  first: tokens                  -> done: null; result: y

Each job of a microbatch counts as a step in the shared counters. A job whose input does not decode is refused and
changes nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from node.tasks.paced_stage import WrongWeights
from node.tasks.spec import WorkerSpec
from node.training import worker
from node.training.activation_slots import ActivationSlots
from node.training.build import Job
from node.training.shared import Shared
from node.training.stage_job import FORWARD_SHARE, StageJob, StageSizes, build_stage, stage_sizes
from node.training.worker import CommandRejected, Worker, WorkerKind, as_json, copy_vectors
from protocols.base import BadPayload


class StageWorker(Worker):
    """Carries out the commands of one stage."""

    def __init__(self, job: StageJob, shared: Shared, spec: WorkerSpec, tell: Callable[[str, Any], None]) -> None:
        assert spec.stage is not None
        self._learner, self._rest_seconds = job.learner, job.rest_seconds
        super().__init__(Job(job.learner, job.rest_seconds, job.held_out), shared, spec, tell)
        self._sizes: StageSizes = stage_sizes(spec)
        self._slots = ActivationSlots(spec.stage.slots, self._sizes)
        self._round = -1

    def carry_out(self, command: dict[str, Any]) -> Any:
        """Carry out a command and return its answer.

        Raises:
            CommandRejected: it cannot be carried out.
        """
        jobs = {
            "forward": self._forward,
            "backward": self._backward,
            "loss": self._loss,
            "draw": self._draw,
            "finish": self._finish,
        }
        others = {
            "begin": self._begin,
            "step": self._step,
            "work": self._work,
            "outer_forward": self._outer_forward,
            "outer_loss": self._outer_loss,
            "outer_logits": self._outer_logits,
            "outer_sample": self._outer_sample,
            "outer_first": self._outer_first,
        }
        name = command["do"]
        if (carry_out := jobs.get(name) or others.get(name)) is None:
            return super().carry_out(command)
        if "carried" in command:
            self._take(command["carried"])
        try:
            return carry_out(command)
        except (BadPayload, WrongWeights) as error:
            raise CommandRejected(str(error)) from error
        finally:
            if name in jobs:
                self._shared.stepped()

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def _forward(self, command: dict[str, Any]) -> None:
        time.sleep(FORWARD_SHARE * self._rest_seconds)
        self._slots.answer(self._learner.forward(self._activation(0)))

    def _backward(self, command: dict[str, Any]) -> None:
        time.sleep((1 - FORWARD_SHARE) * self._rest_seconds)
        self._slots.answer(self._learner.backward(self._activation(0), self._activation(1)))

    def _loss(self, command: dict[str, Any]) -> float:
        time.sleep(self._rest_seconds)
        loss, gradient = self._learner.loss(self._activation(0), self._slots.take(1, self._sizes.target_bytes))
        self._slots.answer(gradient)
        return loss

    def _draw(self, command: dict[str, Any]) -> int:
        time.sleep(FORWARD_SHARE * self._rest_seconds)
        self._shared.claim(self._learner.position + 1)
        batch, y, targets = self._learner.draw()
        self._slots.answer(y, targets)
        return batch

    def _finish(self, command: dict[str, Any]) -> None:
        time.sleep((1 - FORWARD_SHARE) * self._rest_seconds)
        self._learner.finish(command["batch"], self._activation(0), command["loss"])

    def _activation(self, number: int) -> Any:
        return self._slots.take(number, self._sizes.activation_bytes)

    # -- with the outer parameters ------------------------------------------------------------------------------------

    def _outer_forward(self, command: dict[str, Any]) -> None:
        with self._learner.using(self._anchors):
            self._slots.answer(self._learner.outer_forward(self._activation(0)))

    def _outer_loss(self, command: dict[str, Any]) -> float:
        with self._learner.using(self._anchors):
            return self._learner.outer_loss(self._activation(0), self._slots.take(1, self._sizes.target_bytes))

    def _outer_logits(self, command: dict[str, Any]) -> None:
        with self._learner.using(self._anchors):
            self._slots.answer(self._learner.outer_logits(self._activation(0), command["position"]))

    def _outer_sample(self, command: dict[str, Any]) -> bool:
        with self._learner.using(self._anchors):
            found = self._learner.outer_sample(command["index"])
        self._slots.answer(*(found or ()))
        return found is not None

    def _outer_first(self, command: dict[str, Any]) -> None:
        with self._learner.using(self._anchors):
            self._slots.answer(self._learner.outer_first(self._slots.take(0, self._sizes.tokens)))

    # -- the weights --------------------------------------------------------------------------------------------------

    def _begin(self, command: dict[str, Any]) -> dict[str, Any]:
        self._round = command["round"]
        self._local_training.begin(self._round)
        return as_json(self._local_training.work())

    def _step(self, command: dict[str, Any]) -> tuple[bool, int, dict[str, Any] | None]:
        local_training = self._local_training
        if command["round"] != self._round:  # this worker has replaced the one that began the round
            self._begin(command)
        local_training.step()
        local_training.spend(command["seconds"])
        due = local_training.due()
        return local_training.complete, local_training.tokens, as_json(local_training.work()) if due else None

    def _work(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._apart:
            copy_vectors(self._local_training.learner.vectors, self._shared.local)
        return as_json(self._local_training.work())

    def _take(self, carried: int) -> None:
        """The peer has written the vectors: what was accumulated belongs to the old ones."""
        super()._take(carried)
        self._learner.discard()


def main(arguments: list[str]) -> int:
    """Run a worker process; see the top of this file for its arguments."""
    return worker.main(arguments, WorkerKind(build_stage, StageWorker))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
