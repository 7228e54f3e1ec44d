"""Several ranks on the CPU whose vectors lie apart from the shared ones, like those of ranks on GPUs."""

from __future__ import annotations

import sys
from typing import Any
from zlib import crc32

import torch
from torch import nn

from node.ranks import worker as ranked
from node.training import worker
from node.training.build import device_of
from tests.gpu.worker import keep_vectors_apart

usual_generate = ranked.Rank.generate


def keep_vectors_of_ranks_apart() -> None:
    keep_vectors_apart()
    vars(ranked)["device_of"] = lambda name: "cpu:0" if name == "cpu" else device_of(name)
    vars(ranked)["Rank"].generate = generate


def generate(rank: ranked.Rank, *given: Any, **named: Any) -> bytes:
    """All ranks get the same text, though the model of all but the first says something else, as one that rounds
    otherwise may.
    """

    def change(module: nn.Module, inputs: Any, found: Any) -> None:
        (found if isinstance(found, torch.Tensor) else found.logits).neg_()

    hook = rank.learner._task.module.register_forward_hook(change) if rank._group.rank else None
    text = usual_generate(rank, *given, **named)
    if hook:
        hook.remove()
    if rank.learner.needs_all:
        assert rank._group.total(crc32(text)) == [rank._group.size * crc32(text)]
    return text


def main(arguments: list[str]) -> int:
    keep_vectors_of_ranks_apart()
    return worker.main(arguments, ranked.RankedWorker)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
