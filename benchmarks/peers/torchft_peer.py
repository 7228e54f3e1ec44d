"""torchft's `Manager` with its `ProcessGroupGloo`: a quorum for each round, an allreduce, and `should_commit`.

Each peer is a replica group of one rank. Rank 0's process runs the lighthouse. `form` is `start_quorum`, which also
reconfigures the process group where members changed. `average` is `allreduce` and `should_commit`: a peer holds the
mean once it knows that the step counts. Nothing is copied at step 0 (`init_sync`), and the quorum is waited for
(`use_async_quorum`), so that it can be timed by itself; intervals and all else are the defaults. torchft's mean has no
weights, so a vector counts as ready once it is multiplied by N times its weight.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft.coordination import LighthouseServer
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from benchmarks.averaging_setup import Setup
from benchmarks.peers import vectors
from benchmarks.peers.blocking_peer import Answer, BlockingPeer, run

HOST = "127.0.0.1"


class StepLostError(Exception):
    """torchft gave the step up."""


class TorchftPeer(BlockingPeer):
    """This process. Rank 0 runs the lighthouse."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        torch.set_num_threads(1)
        self._vector = torch.zeros(setup.elements)
        self._manager: Manager | None = None
        if setup.rank == 0:
            self._lighthouse = LighthouseServer(bind=f"{HOST}:0", min_replicas=setup.peers)
            self.address = self._lighthouse.address()

    def connect(self, peers: list[tuple[str, str]]) -> Answer:
        timeout = timedelta(seconds=self.setup.deadline_seconds)
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=timeout),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=self.setup.peers,
            use_async_quorum=False,
            timeout=timeout,
            rank=0,
            world_size=1,
            store_addr=HOST,
            store_port=self._store.port,
            lighthouse_addr=peers[0][1],
            replica_id=f"peer{self.setup.rank}",
            hostname=HOST,
            init_sync=False,
        )
        return {}

    @property
    def manager(self) -> Manager:
        assert self._manager is not None
        return self._manager

    def make(self, round: int) -> Answer:
        vectors.load(self.setup, self._vector)
        self._vector.mul_(self.setup.peers * self.setup.share(self.setup.rank))
        return {}

    def form(self, round: int) -> Answer:
        began = time.monotonic()
        self.manager.start_quorum()
        return {"began": began, "ended": time.monotonic()}

    def average(self, round: int) -> Answer:
        began = time.monotonic()
        self.manager.allreduce(self._vector).wait()
        committed = self.manager.should_commit()
        ended = time.monotonic()
        if not committed or self.manager.num_participants() != self.setup.peers:
            raise StepLostError(f"round {round}: {self.manager.num_participants()} participants; {committed=}")
        return {"began": began, "ended": ended}

    def check(self) -> Answer:
        return vectors.checked(self.setup, self._vector)

    def close(self) -> None:
        if self._manager:
            self._manager.shutdown(wait=False)


if __name__ == "__main__":
    run(TorchftPeer)
