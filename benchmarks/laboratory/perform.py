"""Performs one training run of the laboratory."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass

import torch

from benchmarks.journal import History
from benchmarks.laboratory.data_parallel import train_data_parallel
from benchmarks.laboratory.independent import train_independent
from benchmarks.laboratory.replicated import train_alone, train_replicated
from benchmarks.laboratory.runs import LabRun


@dataclass(frozen=True, slots=True)
class Finished:
    """What a run came to, and what it took.

    Attributes:
        seconds, processor_seconds: of the whole run, evaluations included.
    """

    history: History
    seconds: float
    processor_seconds: float
    versions: dict[str, str]


def perform(given: LabRun) -> Finished:
    """Train on one thread, in memory: `python -m benchmarks.laboratory --check` compares that with the protocol."""
    torch.set_num_threads(1)
    began, processor = time.perf_counter(), time.process_time()
    history = train(given)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return Finished(history, time.perf_counter() - began, time.process_time() - processor, versions)


def train(given: LabRun) -> History:
    """The losses of a run: of the one model, or the mean over all peers' models."""
    run = given.run
    if given.arm == "alone":
        return train_alone(run)
    if given.arm == "data-parallel":
        return train_data_parallel(given)
    if given.arm == "butterfly":  # the work of a peer that is down is lost, and it goes on with the others' anchor
        return train_replicated(run, [[float(here) for here in given.up(number)] for number in range(run.rounds)])
    if given.arm in ("diloco", "alone-outer"):
        return train_replicated(run)
    return train_independent(given)
