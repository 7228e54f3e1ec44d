"""hivemind's `DecentralizedAverager`, used as its own `hivemind.Optimizer` uses it: matchmaking ahead, then a trigger.

`form` is `step(wait=False, require_trigger=True)` until the averager waits for its trigger. Then the group is known. It
holds all peers, because `target_group_size` and `min_group_size` are N. `average` is `allow_allreduce()` until the step
has its result. Weights are ours. There is no compression, and everything else is the default: parts of 512 KiB, equal
bandwidths, matchmaking that waits for five seconds where the group is not full. As always with hivemind, a peer is
three processes and a p2pd.
"""

from __future__ import annotations

import time

import hivemind
import torch
from hivemind.averaging.control import AveragingStage, StepControl

from benchmarks.averaging_setup import Setup
from benchmarks.peers import vectors
from benchmarks.peers.blocking_peer import Answer, BlockingPeer, run

LISTEN = ["/ip4/127.0.0.1/tcp/0"]
LOOK_SECONDS = 0.002


class WrongGroupError(Exception):
    """The group does not hold all peers."""


class HivemindPeer(BlockingPeer):
    """This process. Rank 0 founds the DHT that the others join."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        torch.set_num_threads(1)
        self._dht: hivemind.DHT | None = None
        self._averager: hivemind.DecentralizedAverager | None = None
        self._step: StepControl | None = None
        if setup.rank == 0:
            self._dht = hivemind.DHT(start=True, host_maddrs=LISTEN)
            self.address = str(self._dht.get_visible_maddrs()[0])

    def connect(self, peers: list[tuple[str, str]]) -> Answer:
        if self._dht is None:
            self._dht = hivemind.DHT(start=True, initial_peers=[peers[0][1]], host_maddrs=LISTEN)
        self._averager = hivemind.DecentralizedAverager(
            [torch.zeros(self.setup.elements)],
            self._dht,
            start=True,
            prefix="benchmark",
            target_group_size=self.setup.peers,
            min_group_size=self.setup.peers,
        )
        return {}

    @property
    def averager(self) -> hivemind.DecentralizedAverager:
        assert self._averager is not None
        return self._averager

    def make(self, round: int) -> Answer:
        with self.averager.get_tensors() as (vector,):
            vectors.load(self.setup, vector)
        return {}

    def form(self, round: int) -> Answer:
        began = time.monotonic()
        step = self.averager.step(
            weight=self.setup.tokens(self.setup.rank),
            timeout=self.setup.deadline_seconds,
            allow_retries=False,
            require_trigger=True,
            wait=False,
        )
        while step.stage != AveragingStage.AWAITING_TRIGGER:
            if step.done():
                raise WrongGroupError(f"round {round}: matchmaking ended with {step.exception()!r}")
            time.sleep(LOOK_SECONDS)
        self._step = step
        return {"began": began, "ended": time.monotonic()}

    def average(self, round: int) -> Answer:
        step, self._step = self._step, None
        assert step is not None
        began = time.monotonic()
        step.allow_allreduce()
        group = step.result(timeout=self.setup.deadline_seconds)
        ended = time.monotonic()
        if len(group) != self.setup.peers:
            raise WrongGroupError(f"round {round}: {len(group)} of {self.setup.peers} peers")
        return {"began": began, "ended": ended}

    def check(self) -> Answer:
        with self.averager.get_tensors() as (vector,):
            return vectors.checked(self.setup, vector)

    def close(self) -> None:
        if self._averager:
            self._averager.shutdown()
        if self._dht:
            self._dht.shutdown()


if __name__ == "__main__":
    run(HivemindPeer)
