"""Several ranks on the CPU whose vectors lie apart from the shared ones, like those of ranks on GPUs."""

from __future__ import annotations

import sys

from node.ranks import worker as ranked
from node.training import worker
from tests.gpu.worker import keep_vectors_apart


def main(arguments: list[str]) -> int:
    ranked.device_of = lambda name: "cpu:0" if name == "cpu" else name
    keep_vectors_apart()
    return worker.main(arguments, ranked.RankedWorker)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
