"""What a microbatch costs beside its jobs: core time, and frames, of one pipeline of w64 in three stages.

    python -m benchmarks.microbatch [--steps 40] [--activations bf16]

The protocol of all three peers runs in this process, over direct connections (encrypted, of a socket pair each), with
a worker process for each stage. The core time of the peers, and that of the workers, is taken between the second step
and the last one; so is that of a process that only does the jobs. It changes little with what else the machine does.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import psutil
import torch
import uvloop

from node.direct.connection import DirectConnection, DirectPipe
from node.direct.records import AES, Handshake
from node.runtime.compute import ThreadCompute
from node.tasks.gpt_presets import Preset, preset
from node.tasks.gpt_stage import GptStageTask, block_names
from node.tasks.partition import BlockCost, Partition, cut
from node.tasks.recipe import Recipe
from node.tasks.spec import GptValues, StageValues, WorkerSpec
from node.tasks.text import load
from node.training.activations import CODECS, ActivationCodec
from node.training.remote_stage import RemoteStage
from node.training.stage_learner import StageLearner
from node.training.stage_replica import LeasedStage
from node.training.stage_trainer import DrivingTrainer, ServingTrainer, StageTraining
from protocols.base import (
    BadPayload,
    Deadline,
    Handler,
    Host,
    Member,
    PeerError,
    PeerId,
    RoundKey,
    Settings,
    StaticMembers,
    Stream,
)
from protocols.pipeline.driving import PipelineDriver
from protocols.pipeline.serving import StageServer
from protocols.pipeline.settings import PipelineSettings
from protocols.streams.endpoint import ProtocolEndpoint
from protocols.streams.framing import accepted, opened
from tests.sim.arguments import Parser, at_least_one
from tests.sim.inline_stage import accumulate

STAGES, BATCHES, RUN = 3, 8, bytes(range(32))
MEMBERS = tuple(Member(f"p{stage}") for stage in range(STAGES))
PRESET = Preset(preset("w64").shape, 1, Recipe(10**6, 1, 3e-3, 0.9, 0.5, batches=BATCHES))
PARTITION: Partition = cut([BlockCost(name, 1.0, 2.0, 0) for name in block_names(PRESET.shape)], STAGES)


class SocketTransport:
    """Streams between peers of this process, each over a direct connection of its own."""

    def __init__(self, me: PeerId, others: dict[PeerId, SocketTransport]) -> None:
        self.me, self._others, self._handlers = me, others, dict[str, Handler]()
        self._tasks: set[asyncio.Task[None]] = set()
        others[me] = self

    def serve(self, method: str, handler: Handler) -> None:
        self._handlers[method] = handler

    @asynccontextmanager
    async def open(self, peer: PeerId, method: str, deadline: Deadline) -> AsyncIterator[Stream]:
        ends = socket.socketpair()
        nonces = bytes(range(16)), bytes(range(16, 32))
        for end in ends:
            end.setblocking(False)
        codecs = [Handshake(AES, bytes(32), self.me, peer, *nonces).codecs(is_client=end is ends[0]) for end in ends]
        mine, other = (DirectPipe(DirectConnection(*each), lambda _: None) for each in zip(ends, codecs, strict=True))
        task = asyncio.create_task(self._others[peer]._answer(method, self.me, other))
        self._tasks.add(task)
        try:
            yield await opened(peer, mine, deadline)
        finally:
            mine.abort()
            await asyncio.wait([task])
            self._tasks.discard(task)

    async def _answer(self, method: str, peer: PeerId, pipe: DirectPipe) -> None:
        try:
            stream = await accepted(peer, pipe, 10.0, lambda *_: None)
            assert stream
            await self._handlers[method](peer, stream)
        except (PeerError, BadPayload) as error:
            if "stream ended" not in str(error):
                print(f"a handler ended: {error!r}", file=sys.stderr)
        finally:
            pipe.abort()


class FixedStages:
    """The directory of stages: peer pK is in stage K."""

    def stage_of(self, peer: PeerId) -> int:
        return int(peer[1:])

    def rounds_of(self, peer: PeerId) -> int:
        return 0

    def rests(self, peer: PeerId) -> bool:
        return False


def spec(stage: int, codec: str) -> WorkerSpec:
    values = StageValues(stage, PARTITION.bounds, codec, codec, 0, f"p{stage}/0")
    return WorkerSpec(GptValues(PRESET.shape, 1), PRESET.recipe, 1, device="cpu", threads=1, stage=values)


def job_seconds(steps: int, codec: str) -> float:
    """Core time of a microbatch's jobs, and of the optimiser's steps, in one process."""
    torch.set_num_threads(1)
    text, learners = load(), []
    for stage in range(STAGES):
        task = GptStageTask(PRESET, PARTITION, stage, 0, text if stage == 0 else None)
        learners.append(StageLearner(task, PRESET.recipe, ActivationCodec(task.shape, codec)))
    began = 0.0
    for number in range(-1, steps):
        began = began if number else time.process_time()
        for _ in range(BATCHES):
            accumulate(learners)
        for learner in learners:
            learner.step(0, number + 1)
    return (time.process_time() - began) / steps / BATCHES


class Pipeline:
    """Three peers in this process, and their workers."""

    def __init__(self, remotes: list[RemoteStage], compute: ThreadCompute) -> None:
        self.steps = self.frames = 0
        self.stepped = asyncio.Event()
        transports: dict[PeerId, SocketTransport] = {}
        settings = PipelineSettings(RUN, STAGES, BATCHES, remotes[0].sizes)
        self.trainers: list[DrivingTrainer | ServingTrainer] = []
        unused: Any = None
        for me, remote in zip(MEMBERS, remotes, strict=True):
            transport = SocketTransport(me.peer, transports)
            host = Host(transport, unused, StaticMembers(MEMBERS), compute, unused, unused, 0)
            endpoint, work = ProtocolEndpoint(host, Settings("fp32", remote.layout.sizes())), LeasedStage(remote)
            training = StageTraining(me, FixedStages().stage_of(me.peer), remote, lambda: True)
            if me == MEMBERS[0]:
                assert remote.codec
                driver = PipelineDriver(
                    endpoint, settings, work=work, directory=FixedStages(), check=remote.codec.check
                )
                training = replace(training, watch=self._watch)
                self.trainers.append(DrivingTrainer(training, driver, lambda rounds: None))
            else:
                stage = training.stage
                server = StageServer(endpoint, settings, stage=stage, work=work, drivers=lambda: 1)
                self.trainers.append(ServingTrainer(training, server.admission, lambda: 0))

    def _watch(self, event: Any) -> None:
        self.steps += event.kind == "stepped"
        self.stepped.set()

    async def train(self, steps: int, cut: asyncio.Event, marks: list[float], workers: list[int]) -> None:
        key, running = RoundKey(RUN, "run", bytes(32), 0), []
        for trainer in self.trainers:
            running.append(asyncio.create_task(trainer.train(key, cut, lambda work: None)))
        for due in (2, 2 + steps):
            while self.steps < due:
                self.stepped.clear()
                await self.stepped.wait()
            marks += [time.process_time(), sum(map(core_seconds, workers)), time.perf_counter()]
        cut.set()
        await asyncio.gather(*running)


def core_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def measured(steps: int, codec: str) -> dict[str, float]:
    marks: list[float] = []
    async with ThreadCompute() as compute, AsyncExitStack() as stack:
        specs = [spec(stage, codec) for stage in range(STAGES)]
        remotes = [await stack.enter_async_context(RemoteStage(each, compute)) for each in specs]
        pids = [remote.pid for remote in remotes]
        async with asyncio.timeout(600):
            await Pipeline(remotes, compute).train(steps, asyncio.Event(), marks, [pid for pid in pids if pid])
    peers, workers, seconds = (
        1000 * (end - begin) / steps / BATCHES for begin, end in zip(marks[:3], marks[3:], strict=True)
    )
    return {"peers": peers, "workers": workers, "wall": seconds}


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.microbatch", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=at_least_one, default=40)
    parser.add_argument("--activations", choices=CODECS, default="bf16")
    options = parser.parse_args(arguments)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measured(options.steps, options.activations))
    found["jobs"] = 1000 * job_seconds(options.steps, options.activations)
    beyond = found["peers"] + found["workers"] - found["jobs"]
    print("| ms of core time | peers | workers | jobs alone | beyond jobs | ms of time |\n|---|---|---|---|---|---|")
    cells = found["peers"], found["workers"], found["jobs"], beyond, found["wall"]
    print(f"| {options.activations} | {' | '.join(f'{each:.1f}' for each in cells)} |")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
