"""One peer of another system in `benchmarks.time_to_loss`: DDP over gloo, hivemind's Optimizer, or torchft's DiLoCo.

Rank 0 first prints the address at which the others meet it. Then each prints `ready`, waits for a line, and trains
until it is ended. After every round of H steps it prints the seconds since that line, the steps, and the held-out loss.

All train the language model of the other arms, with the same AdamW (PyTorch's fused one), batches and clipping:

ddp, ddp-fp16   `DistributedDataParallel`, which sends gradients while the backward pass goes on; with fp16, through
                PyTorch's own hook `fp16_compress_hook`, which halves the bytes
hivemind        local updates. States are averaged in float16 in the background (its default), by a group that forms at
                once when all are there (`target_group_size`); matchmaking may take a second, the tracker looks often
torchft         plain DiLoCo in one fragment, with Starling's outer step; its quantised all-reduce needs a GPU

DDP's evaluations are not counted. The others evaluate once a round, as Starling does, and the clock runs on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import nn
from torch.optim import SGD, AdamW

from node.tasks.gpt import GptTask
from node.tasks.gpt_presets import preset
from node.tasks.recipe import Recipe
from node.tasks.text import load

STORE_PORT, LIGHTHOUSE_PORT = 29500, 29510
TIMEOUT_SECONDS = 120.0
MATCHMAKING_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What a peer is told. `address` is its own, `store` rank 0's."""

    system: str
    rank: int
    peers: int
    address: str
    store: str
    preset: str
    recipe: Recipe

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=TIMEOUT_SECONDS)


class Peer:
    """Trains as the setup says; a system adds how its peers meet, and what a step sends."""

    counts_evaluation = True

    def __init__(self, setup: Setup) -> None:
        self.setup, self.recipe = setup, setup.recipe
        torch.set_num_threads(1)
        self.task = GptTask(preset(setup.preset), load(), seed=0)
        self.module: nn.Module = self.task.module
        self.inner = AdamW(
            self.module.parameters(),
            lr=self.recipe.learning_rate,
            betas=self.recipe.betas,
            weight_decay=self.recipe.weight_decay,
            fused=True,
        )
        self.optimizer: torch.optim.Optimizer = self.inner

    def meet(self, address: str) -> None:
        """Meet the others, of rank above 0 at this address."""
        raise NotImplementedError

    def announce(self, address: str) -> None:
        """Rank 0 says where the others meet it."""
        if self.setup.rank == 0:
            print(address, flush=True)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.module(inputs).flatten(0, 1), targets.flatten())

    def step(self, number: int) -> None:
        for group in self.inner.param_groups:
            group["lr"] = self.recipe.rate(number)
        self.loss(*self.task.batch(1 + self.setup.rank, number)).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.task.module.parameters(), self.recipe.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, every: int) -> None:
        """Until this process is ended."""
        began, steps, left_out = time.monotonic(), 0, 0.0
        while True:
            self.step(steps)
            steps += 1
            if steps % every == 0:
                stopped = time.monotonic()
                loss = self.task.evaluate()
                print(json.dumps({"seconds": stopped - began - left_out, "steps": steps, "loss": loss}), flush=True)
                left_out += 0.0 if self.counts_evaluation else time.monotonic() - stopped


class DdpPeer(Peer):
    counts_evaluation = False  # all peers evaluate after the same step, and nothing travels meanwhile

    def meet(self, address: str) -> None:
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
        from torch.nn.parallel import DistributedDataParallel

        self.announce(url := f"tcp://{self.setup.store}:{STORE_PORT}")  # which waits for all
        dist.init_process_group(
            "gloo",
            init_method=url,
            rank=self.setup.rank,
            world_size=self.setup.peers,
            timeout=self.setup.timeout,
        )
        ddp = DistributedDataParallel(self.task.module, gradient_as_bucket_view=True)
        if self.setup.system == "ddp-fp16":
            ddp.register_comm_hook(None, fp16_compress_hook)
        self.module = ddp


class HivemindPeer(Peer):
    def meet(self, address: str) -> None:
        import hivemind
        from hivemind.compression import Float16Compression

        rows = self.task.independent_rows
        dht = hivemind.DHT(
            initial_peers=[address] if address else [], start=True, host_maddrs=[f"/ip4/{self.setup.address}/tcp/0"]
        )
        self.optimizer = hivemind.Optimizer(
            dht=dht,
            run_id="benchmark",
            batch_size_per_step=rows,
            target_batch_size=rows * self.recipe.inner_steps * self.setup.peers,
            optimizer=self.inner,
            use_local_updates=True,
            matchmaking_time=MATCHMAKING_SECONDS,
            averaging_timeout=TIMEOUT_SECONDS,
            state_averaging_compression=Float16Compression(),
            averager_opts={
                "target_group_size": self.setup.peers,
                "min_group_size": self.setup.peers,
                "request_timeout": MATCHMAKING_SECONDS,
            },
            tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.2, "max_refresh_period": 1.0},
            verbose=True,
        )
        self.announce(str(dht.get_visible_maddrs()[0]))


class TorchftPeer(Peer):
    def meet(self, address: str) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        setup = self.setup
        if setup.rank == 0:
            self._lighthouse = LighthouseServer(bind=f"{setup.address}:{LIGHTHOUSE_PORT}", min_replicas=setup.peers)
            address = f"http://{setup.address}:{LIGHTHOUSE_PORT}"
            self.announce(address)
        self._store = TCPStore(setup.address, STORE_PORT, is_master=True, wait_for_workers=False)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=setup.timeout),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=setup.peers,
            use_async_quorum=False,
            timeout=setup.timeout,
            rank=0,
            world_size=1,
            store_addr=setup.address,
            store_port=STORE_PORT,
            lighthouse_addr=address,
            replica_id=f"peer{setup.rank}",
            hostname=setup.address,
            init_sync=False,  # all start from the same weights
        )
        outer = SGD(
            self.module.parameters(),
            lr=self.recipe.outer_learning_rate,
            momentum=self.recipe.outer_momentum,
            nesterov=True,
        )
        DiLoCo(manager, [self.module], self.inner, outer, sync_every=self.recipe.inner_steps).__enter__()


SYSTEMS: dict[str, Callable[[Setup], Peer]] = {
    "ddp": DdpPeer,
    "ddp-fp16": DdpPeer,
    "hivemind": HivemindPeer,
    "torchft": TorchftPeer,
}


def main(given: str, every: str, address: str = "") -> None:
    values = json.loads(given)
    setup = Setup(**{**values, "recipe": Recipe(**values["recipe"])})
    os.environ["GLOO_SOCKET_IFNAME"] = "line"
    peer = SYSTEMS[setup.system](setup)
    peer.meet(address)
    print("ready", flush=True)
    sys.stdin.readline()
    peer.train(int(every))


if __name__ == "__main__":
    with suppress(BrokenPipeError, KeyboardInterrupt):  # the parent process is gone, or ends it
        main(*sys.argv[1:])
    os._exit(0)  # hivemind would take its time; the parent process kills what it has started
