"""Several ranks that also measure themselves; see `benchmarks.gpu_worker`.

python -m benchmarks.gpu_ranks MEMORY SOCKET
"""

from __future__ import annotations

import sys

from benchmarks.gpu_worker import MeasuredWorker
from node.ranks.worker import RankedWorker
from node.training import worker
from tests.gpu.ranks import keep_vectors_of_ranks_apart


class MeasuredRanks(MeasuredWorker, RankedWorker):
    """Memory is that of rank 0."""


def main(arguments: list[str]) -> int:
    keep_vectors_of_ranks_apart()
    return worker.main(arguments, MeasuredRanks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
