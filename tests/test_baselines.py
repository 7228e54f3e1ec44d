"""The baselines: the right mean, the same bits for all; where something fails, a clear end in time and no leak."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from protocols.base import Head, Host, Mean, Outcome, RoundKey, Settings, Vector, Work
from protocols.baselines import data_parallel, parameter_server, ring
from protocols.lockstep import Lockstep
from tests.sim import loop as simloop
from tests.sim.host import sim_host
from tests.sim.loop import PROCESS
from tests.sim.network import SimNetwork, Trace

RUN = bytes(32)
MAKERS: dict[str, Callable[[Host, Settings], Lockstep]] = {
    "data_parallel": data_parallel,
    "ring": ring,
    "parameter_server": parameter_server,
}
everyone = pytest.mark.parametrize("name", MAKERS)


@dataclass
class Swarm:
    """Peers that average their states once, each at a round of its own.

    Attributes:
        rounds: of each peer; 0 unless given.
        came: peer -> its mean and what it holds afterwards.
    """

    count: int
    elements: int = 1001
    codec: str = "fp32"
    chunk_elements: int = 256
    deadline_seconds: float = 60.0
    rounds: dict[int, int] = field(default_factory=dict)
    came: dict[int, tuple[Mean, list[Vector], int]] = field(default_factory=dict)
    network: SimNetwork = field(default_factory=lambda: SimNetwork(Trace()))
    ended: float = 0.0

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.count)
        self.states = [[torch.randn(self.elements, generator=draw) for _ in range(2)] for _ in range(self.count)]
        self.tokens = [1000 + 100 * index for index in range(self.count)]

    def play(self, name: str, strike: Callable[[SimNetwork], None] = lambda network: None) -> Swarm:
        simloop.run(self._run(name, strike))
        return self

    async def _run(self, name: str, strike: Callable[[SimNetwork], None]) -> None:
        tasks = []
        for index in range(self.count):
            transport = self.network.join(f"p{index:02}")
            host = sim_host(self.network, transport, 1, {})
            averager = MAKERS[name](host, Settings(self.codec, (self.elements,), self.chunk_elements))
            token = PROCESS.set(transport.node.process)
            tasks.append(asyncio.get_running_loop().create_task(self._peer(index, averager)))
            PROCESS.reset(token)
        strike(self.network)
        await asyncio.wait(tasks)
        self.ended = asyncio.get_running_loop().time()
        await asyncio.sleep(self.deadline_seconds + 15.0)
        for task in tasks:
            if not task.cancelled():
                task.result()
        assert not self.network.bugs, self.network.bugs[0]
        assert not any(node.process.tasks or node.ends for node in self.network.nodes.values())

    async def _peer(self, index: int, averager: Lockstep) -> None:
        loop, number, deadline = asyncio.get_running_loop(), self.rounds.get(index, 0), self.deadline_seconds
        key = RoundKey(RUN, "run", bytes([index]) * 32, number)
        into = [torch.full((self.elements,), torch.nan) for _ in range(2)]
        work = Work(self.tokens[index], 1.0, 1.0, 1.0, complete=True)
        async with averager.enter(Head(key, (averager.me,), bytes(32), bytes(32)), loop.time() + deadline) as session:
            session.lend(self.states[index])
            session.ready(work)
            await session.cut.wait()
            assert not await session.take_back()
            mean = await session.mean(self.states[index], work, into)
        self.came[index] = (mean, into, session.round)

    def expected(self) -> list[torch.Tensor]:
        shares = torch.tensor(self.tokens, dtype=torch.float64) / sum(self.tokens)
        return [(shares[:, None] * torch.stack(each).double()).sum(0) for each in zip(*self.states, strict=True)]


@everyone
@pytest.mark.parametrize("count, elements", [(2, 1), (3, 7), (5, 1001), (8, 5000)])
def test_all_hold_the_same_weighted_mean(name: str, count: int, elements: int) -> None:
    swarm = Swarm(count, elements).play(name)
    for mean, into, number in swarm.came.values():
        assert (mean.outcome, number) == (Outcome.COMMITTED, 0)
        assert mean.peers == tuple(f"p{index:02}" for index in range(count))
        assert not mean.blamed
        for got, wanted in zip(into, swarm.expected(), strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    for which in range(2):
        assert len({into[which].numpy().tobytes() for _, into, _ in swarm.came.values()}) == 1


@everyone
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_a_lossy_codec_leaves_all_with_the_same_bits(name: str, codec: str) -> None:
    swarm = Swarm(4, codec=codec).play(name)
    assert {mean.outcome for mean, _, _ in swarm.came.values()} == {Outcome.COMMITTED}
    assert len({into[0].numpy().tobytes() for _, into, _ in swarm.came.values()}) == 1
    error = swarm.came[0][1][0].double() - swarm.expected()[0]
    assert error.norm() / swarm.expected()[0].norm() < 0.03


@everyone
def test_one_that_is_alone_keeps_what_it_has(name: str) -> None:
    ((mean, _, _),) = Swarm(1).play(name).came.values()
    assert (mean.outcome, mean.blamed) == (Outcome.SKIPPED, ())


@everyone
def test_a_death_at_any_message_ends_the_round_at_once_and_is_named(name: str) -> None:
    """Who has all parts already may commit; they all hold the same bits."""
    at, lived = 0, False
    while not lived:
        at += 2
        swarm = Swarm(4, elements=300)

        def watch(peer: str, number: int, way: str, other: str, swarm: Swarm = swarm, at: int = at) -> None:
            if (peer, number) == ("p01", at):
                swarm.network.kill(peer)

        swarm.network.watch = watch
        swarm.play(name)
        lived = 1 in swarm.came
        assert swarm.ended < 10.0
        committed = [into for mean, into, _ in swarm.came.values() if mean.outcome is Outcome.COMMITTED]
        assert len({into[0].numpy().tobytes() for into in committed}) <= 1
        blamed = [mean.blamed for mean, _, _ in swarm.came.values() if mean.outcome is Outcome.SKIPPED]
        assert all(blamed)
        assert not blamed or any(blame.peer == "p01" for each in blamed for blame in each)
    assert at > 10


@everyone
def test_silence_ends_the_round_at_its_deadline_and_says_of_whom(name: str) -> None:
    def strike(network: SimNetwork) -> None:
        for other in ("p00", "p02"):
            network.block("p01", other)

    swarm = Swarm(3).play(name, strike)
    for index in (0, 2):
        mean = swarm.came[index][0]
        assert mean.outcome is Outcome.SKIPPED
        assert mean.blamed
    assert swarm.ended < 62.0


@everyone
def test_one_that_is_behind_comes_to_the_others_round(name: str) -> None:
    swarm = Swarm(3, rounds={0: 57, 1: 57, 2: 3}, deadline_seconds=30.0).play(name)
    mean, _, number = swarm.came[2]
    assert (mean.outcome, number) == (Outcome.SKIPPED, 56)
    assert any("left that round" in blame.why for blame in mean.blamed)
    for index in (0, 1):
        assert swarm.came[index][0].outcome is Outcome.SKIPPED


def test_the_bytes_are_those_of_the_literature() -> None:
    """All-reduce and ring: 2 (N - 1) / N of the state, everybody; a server: (N - 1) of it in, and as much out."""
    size, count = 4 * 2 * 20_000, 5
    sent = {}
    for name in MAKERS:
        swarm = Swarm(count, 20_000, chunk_elements=4096).play(name)
        sent[name] = [swarm.network.nodes[f"p{index:02}"].sent_bytes / size for index in range(count)]
    assert sent["data_parallel"] == pytest.approx([2 * (count - 1) / count] * count, rel=0.05)
    assert sent["ring"] == pytest.approx([2 * (count - 1) / count] * count, rel=0.05)
    assert sent["parameter_server"] == pytest.approx([count - 1.0] + [1.0] * (count - 1), rel=0.05)


@everyone
def test_peers_that_see_other_members_do_not_mix(name: str) -> None:
    swarm = Swarm(3, deadline_seconds=10.0)
    swarm.play(name, lambda network: network.contacts.views["p00"].lose("p02"))
    assert len(swarm.came) == 3
    assert {mean.outcome for mean, _, _ in swarm.came.values()} == {Outcome.SKIPPED}
    assert all(mean.blamed for mean, _, _ in swarm.came.values())
