"""Plain `torch.distributed.all_reduce` with gloo: no groups, no faults, no encryption.

gloo has sums and no weights, so a vector counts as ready once it is multiplied by its weight.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.averaging_setup import Setup
from benchmarks.peers import vectors
from benchmarks.peers.blocking_peer import Answer, BlockingPeer, run

HOST = "127.0.0.1"


class GlooPeer(BlockingPeer):
    """This process. Rank 0 serves the store that the others meet at."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        torch.set_num_threads(1)
        self._vector = torch.zeros(setup.elements)
        self._timeout = timedelta(seconds=setup.deadline_seconds)
        if setup.rank == 0:
            self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
            self.address = str(self._store.port)

    def connect(self, peers: list[tuple[str, str]]) -> Answer:
        if self.setup.rank:
            self._store = TCPStore(HOST, int(peers[0][1]), is_master=False, timeout=self._timeout)
        dist.init_process_group(
            "gloo", store=self._store, rank=self.setup.rank, world_size=self.setup.peers, timeout=self._timeout
        )
        return {}

    def make(self, round: int) -> Answer:
        vectors.load(self.setup, self._vector)
        self._vector.mul_(self.setup.share(self.setup.rank))
        return {}

    def average(self, round: int) -> Answer:
        began = time.monotonic()
        dist.all_reduce(self._vector)
        return {"began": began, "ended": time.monotonic()}

    def check(self) -> Answer:
        return vectors.checked(self.setup, self._vector)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    run(GlooPeer)
