"""Several ranks on the CPU whose vectors lie apart from the shared ones, like those of ranks on GPUs."""

from __future__ import annotations

import sys

from node.ranks import worker as ranked
from node.training import worker
from tests.gpu.worker import keep_vectors_apart


def keep_vectors_of_ranks_apart() -> None:
    keep_vectors_apart()
    usual = ranked.device_of
    ranked.device_of = lambda name: "cpu:0" if name == "cpu" else usual(name)


def main(arguments: list[str]) -> int:
    keep_vectors_of_ranks_apart()
    return worker.main(arguments, ranked.RankedWorker)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
