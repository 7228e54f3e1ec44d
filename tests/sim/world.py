"""A whole simulated swarm: real protocol and round code, many peers in one thread, on virtual time, from one seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from node.outer import OuterSGD
from node.round import Replica
from node.tasks.paced import Paced
from node.trainer import InlineTrainer, Learner
from protocols import PROTOCOLS
from protocols.base import Member, PeerId, Settings
from protocols.chain import Chain
from protocols.codec import CODECS
from tests import checkers
from tests.sim import loop as simloop
from tests.sim.host import sim_host
from tests.sim.lies import LIES, LyingStream
from tests.sim.network import SimNetwork, SimTransport, Trace

RUN = bytes(range(32))
FAULTS = ("none", "lies", "slow")
GRACE_SECONDS = 120.0
"""After the last round: what is still on its way arrives, what waits for a deadline gives up."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One simulated run, decided by its fields alone.

    Attributes:
        elements: length of the vector; None draws it from the seed, as with the next two.
        uplinks: bytes/s of each peer.
        step_seconds: of each peer's inner step.
    """

    protocol: str = "butterfly"
    peers: int = 5
    rounds: int = 6
    seed: int = 0
    fault: str = "none"
    codec: str | None = None
    elements: int | None = None
    chunk_elements: int = 256
    inner_steps: int = 10
    uplinks: tuple[float, ...] | None = None
    step_seconds: tuple[float, ...] | None = None
    lie: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("protocol", PROTOCOLS), ("fault", FAULTS)):
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; known: {', '.join(known)}")
        if self.peers < 1 or self.rounds < 1:
            raise ValueError(f"peers and rounds must be at least 1, not {self.peers} and {self.rounds}")
        if self.inner_steps < 1:
            raise ValueError(f"inner steps must be at least 1, not {self.inner_steps}")


@dataclass(slots=True)
class Outcome:
    """What a run came to."""

    scenario: Scenario
    histories: dict[PeerId, list[checkers.Report]]
    violations: list[checkers.Violation]
    virtual_seconds: float
    trace: Trace
    sent_bytes: dict[PeerId, int]
    liars: tuple[PeerId, ...] = ()
    anchors: dict[PeerId, torch.Tensor] = field(default_factory=dict)

    def reports(self, outcome: str) -> list[checkers.Report]:
        """The honest peers' reports with this outcome."""
        return [
            r for peer, history in self.histories.items() if peer not in self.liars
            for r in history if r["outcome"] == outcome
        ]  # fmt: skip


def resolve(scenario: Scenario) -> Scenario:
    """The scenario with everything that its seed decides written out."""
    rng = random.Random(f"world/{scenario.seed}")
    pace = rng.uniform(0.05, 0.5)
    steps = [pace * rng.uniform(0.9, 1.1) for _ in range(scenario.peers)]
    # A liar needs somebody to lie to: where one peer has all the bandwidth, it reduces everything.
    rates = (12.5e6,) if scenario.fault == "lies" else (1.25e6, 12.5e6)
    links = [rng.choice(rates) * rng.uniform(0.8, 1.2) for _ in range(scenario.peers)]
    elements = rng.choice((5000, 20_000) if scenario.fault == "lies" else (3, 64, 1000, 5000, 20_000))
    chosen = rng.choice(sorted(CODECS))
    lie = rng.choice(LIES)
    if scenario.fault == "slow":
        for index in rng.sample(range(scenario.peers), max(1, scenario.peers // 3)):
            steps[index] *= 10
            links[index] /= rng.choice((1, 10))
    return replace(
        scenario,
        codec=scenario.codec or chosen,
        elements=scenario.elements or elements,
        uplinks=scenario.uplinks or tuple(links),
        step_seconds=scenario.step_seconds or tuple(steps),
        lie=scenario.lie or (lie if scenario.fault == "lies" else None),
    )


class World:
    """One run in progress."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario = resolve(scenario)
        assert scenario.uplinks and scenario.step_seconds
        self.rng = random.Random(f"faults/{scenario.seed}")
        self.trace = Trace()
        self.network = SimNetwork(self.trace, latency_seconds=self.rng.uniform(0.005, 0.08))
        self.peers = tuple(f"p{index}" for index in range(scenario.peers))
        self.histories: dict[PeerId, list[checkers.Report]] = {peer: [] for peer in self.peers}
        self.replicas: dict[PeerId, Replica] = {}
        self.roster = tuple(Member(peer) for peer in self.peers)
        self.liars: tuple[PeerId, ...] = ()
        self._entries: dict[str, Any] = {}

    def learner(self, index: int) -> Learner:
        """What peer `index` trains."""
        assert self.scenario.elements
        return Paced(self.scenario.elements, seed=self.scenario.seed * 1000 + index, tokens_per_step=256)

    def trainer(self, index: int) -> InlineTrainer:
        """How peer `index` trains it."""
        assert self.scenario.step_seconds
        return InlineTrainer(self.learner(index), self.scenario.inner_steps, self.scenario.step_seconds[index])

    def outer(self) -> OuterSGD:
        return OuterSGD(0.9, 0.5)

    async def run(self) -> None:
        """Join everybody, run the rounds, let what is on its way end."""
        transports = [
            self.network.join(peer, rate) for peer, rate in zip(self.peers, self.scenario.uplinks or (), strict=True)
        ]
        if self.scenario.lie:
            self.liars = (self.peers[self.rng.randrange(len(self.peers))],)
        mains = []
        for index, transport in enumerate(transports):
            process = self.network.nodes[transport.me].process
            token = simloop.PROCESS.set(process)
            mains.append(asyncio.get_running_loop().create_task(self._peer(index, transport)))
            simloop.PROCESS.reset(token)
        honest = [main for peer, main in zip(self.peers, mains, strict=True) if peer not in self.liars]
        await asyncio.gather(*honest)
        for peer in self.liars:
            self.network.kill(peer)
        await asyncio.sleep(GRACE_SECONDS)

    async def _peer(self, index: int, transport: SimTransport) -> None:
        scenario = self.scenario
        assert scenario.codec and scenario.step_seconds and scenario.uplinks
        host = sim_host(self.network, transport, scenario.seed, self._entries)
        if transport.me in self.liars:
            lie, signer = str(scenario.lie), host.signer
            transport.disguise = lambda method, stream, pipe: LyingStream(stream, pipe, lie, signer)
        trainer = self.trainer(index)
        settings = Settings(
            codec=scenario.codec,
            elements=trainer.layout.sizes(),
            chunk_elements=scenario.chunk_elements,
            bandwidth=scenario.uplinks[index],
        )
        averager = PROTOCOLS[scenario.protocol](host, settings)
        anchor = torch.empty(trainer.layout.sizes()[0])
        await trainer.read(anchor)
        chain = Chain(RUN, "run", self.roster, bytes(32))
        replica = Replica(chain, trainer, averager, self.outer(), host.compute, anchor)
        self.replicas[transport.me] = replica
        await replica.settle()
        for _ in range(scenario.rounds):
            if averager.me not in chain.head.roster:
                break
            report = await replica.run_round(averager.me, host.clock.wall)
            await self.after_round(index, trainer)
            self.histories[transport.me].append(asdict(report))

    async def after_round(self, index: int, trainer: InlineTrainer) -> None:
        """For worlds that measure something between rounds."""

    def leaks(self) -> list[checkers.Violation]:
        """Tasks and streams that outlive the run."""
        found = []
        for peer, node in self.network.nodes.items():
            if node.process.tasks or node.ends:
                what = f"{len(node.process.tasks)} tasks and {len(node.ends)} streams are left over"
                found.append(checkers.Violation("no-leak", peer, self.scenario.rounds, what))
        return found


def play(scenario: Scenario, world_type: type[World] = World) -> Outcome:
    """Run a scenario to its end and judge it.

    Raises:
        Exception: a bug in protocol or round code, as itself.
    """
    world = world_type(scenario)

    async def main() -> float:
        await world.run()
        return asyncio.get_running_loop().time()

    seconds = simloop.run(main())
    if world.network.bugs:
        raise world.network.bugs[0]
    honest = {peer: history for peer, history in world.histories.items() if peer not in world.liars}
    violations = checkers.check(honest) + world.leaks() + _progress(world, honest)
    sent = {peer: node.sent_bytes for peer, node in world.network.nodes.items()}
    anchors = {peer: replica.anchor for peer, replica in world.replicas.items()}
    return Outcome(world.scenario, world.histories, violations, seconds, world.trace, sent, world.liars, anchors)


def _progress(world: World, honest: dict[PeerId, Sequence[checkers.Report]]) -> list[checkers.Violation]:  # type: ignore[type-arg]
    """Under the faults of today every honest peer commits every round, and a liar is named."""
    found = []
    for peer, history in honest.items():
        if len(history) < world.scenario.rounds:
            found.append(checkers.Violation("progress", peer, len(history), "left out of the roster"))
        for report in history:
            if report["outcome"] not in checkers.DECIDED:
                found.append(checkers.Violation("progress", peer, report["round"], f"outcome {report['outcome']}"))
    for liar in world.liars:
        if len(world.peers) > 1 and not any(liar in r["blamed"] for history in honest.values() for r in history):
            found.append(checkers.Violation("named", liar, 0, f"nobody named the lie {world.scenario.lie!r}"))
    return found
