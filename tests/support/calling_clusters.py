"""Peers that go through rounds of clusters from the search for a lead to the decision: voters, and peers behind them.

Each peer has a chain of its own and follows the certificates. There is no outer step: the state root stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace

import torch

from protocols.base import AveragingResult, Host, LocalProgress, Member, PeerId, Settings, Vector
from protocols.butterfly.averager import Butterfly
from protocols.butterfly.round import Round
from protocols.consensus.messages import Certificate
from protocols.consensus.record import Record
from protocols.history.chain import Chain
from tests.sim.averaging import RUN
from tests.sim.host import sim_host
from tests.sim.swarm import SimSwarm
from tests.sim.transport import SimTransport

ROOT = b"r" * 32
ELEMENTS = 64
ROUND_SECONDS, PAUSE_SECONDS = 60.0, 0.5
FAR_BEHIND = 4  # rounds: as many are kept for those that come late


class CallingClusters(SimSwarm):
    """`voters` peers in the roster, "v0", "v1", …, and `associates` peers outside it, "a0", "a1", …"""

    def __init__(
        self, voters: int, associates: int, clusters: bool = True, elements: int = ELEMENTS, chunk: int = 16
    ) -> None:
        super().__init__(latency_seconds=0.02, bytes_per_second=1e6)
        self.settings = Settings("fp32", (elements,), chunk, clusters=clusters, voters=voters, max_weight=1e9)
        self.voters = [f"v{index}" for index in range(voters)]
        self.associates = [f"a{index}" for index in range(associates)]
        self.places = {name: place for place, name in enumerate(self.names)}
        self.roster = tuple(map(Member, self.voters))
        self.averagers, self.rounds = dict[PeerId, Butterfly](), dict[PeerId, Round]()
        self.chains = dict[PeerId, Chain]()
        self.results = dict[PeerId, dict[int, AveragingResult]]()  # peer -> round -> result
        self.train_seconds = dict[PeerId, float]()  # for how long a peer trains, if not for a second
        self.resting: Collection[PeerId] = ()
        self.tokens = dict[PeerId, int]()

    @property
    def names(self) -> list[PeerId]:
        return [*self.voters, *self.associates]

    async def set_up(self) -> None:
        for name in self.names:
            self.start(name)

    def start(self, name: PeerId) -> None:
        """Start a peer, or start it again after its death: then it has its chain still."""
        again = name in self.network.nodes
        transport = self.network.restart(name) if again else self.network.join(name)
        host = self.host_on(transport)
        settings = replace(self.settings, incarnation=self.network.nodes[name].incarnation)
        chain = self.chains[name] = self.chains.get(name) or self.first_chain()
        with self.network.nodes[name].process.entered():
            self.averagers[name] = Butterfly(host, settings, lineage_of=chain.lineage_of)
        self.spawn(name, self._rounds(name, chain))

    def first_chain(self) -> Chain:
        return Chain(RUN, "run", self.roster, ROOT)

    def host_on(self, transport: SimTransport) -> Host:
        return sim_host(self.network, transport, self.seed, self.entries)

    def vector(self, name: PeerId, round: int) -> Vector:
        """What a peer has trained in a round."""
        return torch.full(self.settings.elements, float(self.places[name] + 1))

    def declared_norm(self, vector: Vector) -> float:
        return 8.0

    def root(self, chain: Chain) -> bytes:
        """Of the state after a chain's head."""
        return ROOT

    def extended(self, name: PeerId, chain: Chain, record: Record, mean: Vector) -> None:
        """Called after a round that was decided."""

    async def _rounds(self, name: PeerId, chain: Chain) -> None:
        while True:
            chain.settle(self.root(chain))
            self._catch_up(name, chain)
            mean = torch.empty(self.settings.elements)
            result = await self._round(name, chain, mean)
            certificate, record = result.certificate, result.record
            if isinstance(certificate, Certificate) and isinstance(record, Record):
                chain.extend(certificate, record)
                self.extended(name, chain, record, mean)
                self._tell_those_behind(name)
            else:
                await asyncio.sleep(PAUSE_SECONDS)

    def _tell_those_behind(self, name: PeerId) -> None:
        """End the rounds of peers that the others have left behind, as announced heads do."""
        for other, averager in self.averagers.items():
            is_cut = self.network.link(name, other).blocked
            if not is_cut and self.alive(other) and len(self.chains[other]) + FAR_BEHIND < len(self.chains[name]):
                averager.supersede()

    def _catch_up(self, name: PeerId, chain: Chain) -> None:
        """What a peer fetches that was too late for a round."""
        best = max((each for other, each in self.chains.items() if self.alive(other)), key=len, default=chain)
        if len(best) > len(chain) + 1:
            for link in best.since(chain.head.key.lineage):
                chain.extend(link.certificate, link.record)
            chain.settle(self.root(chain))

    async def _round(self, name: PeerId, chain: Chain, into: Vector) -> AveragingResult:
        head = chain.head
        vector = self.vector(name, head.key.round)
        async with self.averagers[name].enter(head, self.now + ROUND_SECONDS) as session:
            self.rounds[name] = session
            rests = name in self.resting
            work = LocalProgress(
                0, 0.0, 1.0, self.declared_norm(vector), 0.1, state_root=head.state_root, resting=rests
            )
            session.offer(work)
            if not rests:
                seconds = self.train_seconds.get(name, 1.0)
                await self._until_cut(session, min(0.5, seconds / 2))
                session.offer(replace(work, tokens=20))
                await self._until_cut(session, max(seconds - 0.5, seconds / 2))
                work = replace(work, tokens=self.tokens.get(name, 100), complete=not session.cut.is_set())
                session.offer(work)
            await session.cut.wait()
            result = await session.average([vector], work, [into])
        self.results.setdefault(name, {})[head.key.round] = result
        return result

    async def _until_cut(self, session: Round, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await session.cut.wait()
        except TimeoutError:
            return

    def alive(self, name: PeerId) -> bool:
        return self.network.nodes[name].process.alive

    async def until(self, round: int, limit_seconds: float = 600.0) -> None:
        """Run until all that are alive have ended this round."""
        ends = self.now + limit_seconds
        while not all(len(self.chains[name]) > round for name in self.names if self.alive(name)):
            assert self.now < ends, {name: len(self.chains[name]) for name in self.names if self.alive(name)}
            await asyncio.sleep(0.05)

    # -- what must hold -----------------------------------------------------------------------------------------------

    def counted(self, round: int) -> set[PeerId]:
        """The peers whose work is in the mean of a round, as they report it themselves."""
        results = ((name, self.results[name].get(round)) for name in self.results)
        return {name for name, result in results if result and name in result.peers}

    def lead(self, name: PeerId) -> PeerId | None:
        attachment = self.averagers[name]._attachment
        return attachment.search.lead.peer if attachment and attachment.search.lead else None

    async def finish(self) -> None:
        """All have followed one branch."""
        longest = max(self.chains.values(), key=len)
        for name, chain in self.chains.items():
            assert chain.head.key.lineage in longest, f"{name} is on another branch"
