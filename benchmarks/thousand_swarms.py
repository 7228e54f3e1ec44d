"""Simulated swarms of up to a thousand peers that average, and what each peer sends: see `benchmarks.thousand`."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from benchmarks.growth import LongSigner
from protocols.allreduce.clustered_plan import member_masks
from protocols.base import AveragingResult, Buffer, Header, Host, Member, PeerId, Settings, Vector
from protocols.butterfly.attaching import Attachment
from protocols.butterfly.attachment import Attach
from protocols.butterfly.round import Round
from protocols.consensus.record import Kind, Record
from protocols.history.chain import Chain
from protocols.registry import load_averager
from protocols.streams.framing import FramedStream
from tests.sim.averaging import AveragingSwarm, RoundResult
from tests.sim.neighbours import Neighbours
from tests.sim.pipe import SimPipe
from tests.sim.transport import SimTransport
from tests.support.calling_clusters import CallingClusters
from tests.support.disguises import Disguise, SpoofedStream
from tests.support.fake_rounds import decided
from tests.support.waiting import until

VOTERS = 32
ELEMENTS = 1 << 16
LINE_BYTES = 1e6
TRAIN_SECONDS = 1.0  # as `CallingClusters`
LOOK_SECONDS = 0.25
ID = "12D3KooW" + 40 * "x" + "{:04}"  # as long as real ones
MOST_SECONDS = 600.0
WITHIN = 1e-2
PROBE = 64  # elements of a vector in which the spread over the peers is measured
DYING, STALLING = 0.005, 0.02  # shares of the peers


def counting(frames: Counter[PeerId], me: PeerId) -> Disguise:
    """Counts the frames that a peer sends."""

    async def send(stream: FramedStream, header: Header, payload: Buffer) -> None:
        frames[me] += 1
        await stream.send(header, payload)

    def disguise(method: str, stream: FramedStream, pipe: SimPipe) -> Any:
        frames[me] += stream.bytes_sent > 0  # the one that opened it
        return SpoofedStream(stream, send)

    return disguise


class Thousand(CallingClusters):
    """Beyond 96 peers, each sees those that it would watch (`node.membership.watching`).

    They begin in round 1, as if all had found their leads in round 0.
    """

    keep_rounds = 1  # of memory for parts; there is no other way to learn of an earlier round

    def __init__(self, peers: int, elements: int = ELEMENTS, chunks: int = 1, seed: int = 1) -> None:
        voters = min(VOTERS, peers)
        chunk = math.ceil(elements / voters / chunks)
        super().__init__(voters, peers - voters, peers > voters, elements, chunk)
        names = [ID.format(number) for number in range(peers)]
        random.Random(seed).shuffle(names)
        self.voters, self.associates, self.seed = sorted(names[:voters]), sorted(names[voters:]), seed
        self.roster = tuple(map(Member, self.voters))
        self.places = {name: place for place, name in enumerate(self.names)}
        self.settings = replace(self.settings, bandwidth=LINE_BYTES, keep_rounds=self.keep_rounds)
        self.neighbours = Neighbours(self.names, self.voters)
        self.neighbours.limit(self.network.contacts)
        self.decided, self.versions = dict[int, Record](), defaultdict[int, set[int]](set)  # of each round
        self.offered = defaultdict[int, dict[PeerId, int]](dict)  # round -> peer -> tokens, as the plan has them
        # round -> peer -> time, frames and bytes sent when it begins
        self.frames = Counter[PeerId]()
        self.began = defaultdict[int, dict[PeerId, tuple[float, int, int]]](dict)
        self.roots = dict[bytes, bytes]()  # of the state after a record, by its hash, as the first peer has it
        self.found = defaultdict[int, set[bytes]](set)  # the roots of all peers after each round
        self.means = dict[int, Vector]()  # of each round, as the first peer has it
        self.contributors = dict[int, int]()

    def first_chain(self) -> Chain:
        chain = super().first_chain()
        link = decided(chain.head, Kind.SKIP, root=chain.head.state_root)
        chain.extend(link.certificate, link.record)
        return chain

    async def set_up(self) -> None:
        await super().set_up()
        for attachment in map(self._attachment, self.names if self.associates else ()):
            attachment.search.known_since = attachment.search._entered = 0
            attachment.begin(self.chains[self.voters[0]].head)
        for name in self.associates:
            self._find_lead(name)
        self.meeting = asyncio.get_running_loop().create_task(self._meet())

    def _attachment(self, name: PeerId) -> Attachment:
        found = self.averagers[name]._attachment
        assert found
        return found

    def _find_lead(self, name: PeerId) -> None:
        """What an associate and the voters would say to each other, without a message."""
        head, lineage_of = self.chains[name].head, self.chains[name].lineage_of
        search, views = self._attachment(name).search, self.network.contacts.views
        while asks := search.due(self.now):
            for ask in asks:
                attach = Attach(head.key, Member(name), ask.lead, search.known_since, False)
                reply = self._attachment(ask.voter).book.take(attach, lineage_of)
                if ask.lead:
                    search.answered(ask, Member(ask.voter), reply)
        for held in (search.lead, search.standby):
            assert held
            self.neighbours.tie(name, [held.peer])
            views[name].meet(held)
            views[held.peer].meet(Member(name))

    async def _meet(self) -> None:
        """Let peers meet those that clusters tie them to, as memberships do."""
        while True:
            for name, averager in self.averagers.items():
                if new := self.neighbours.tie(name, averager.ties()):
                    self.network.contacts.acquaint(name, new)
            await asyncio.sleep(LOOK_SECONDS)

    def host_on(self, transport: SimTransport) -> Host:
        transport.disguise = counting(self.frames, transport.me)
        return replace(super().host_on(transport), signer=LongSigner(transport.me, self.seed))

    # -- rounds -------------------------------------------------------------------------------------------------------

    def vector(self, name: PeerId, round: int) -> Vector:
        """From 1 to 2: a mean of thousand others has no element near 0, so relative errors say something."""
        draw = torch.Generator().manual_seed(10_000 * round + self.places[name])
        return torch.rand(self.settings.elements, generator=draw) + 1

    def declared_norm(self, vector: Vector) -> float:
        """The same for all: else those above the median are scaled down to it."""
        return 2 * math.sqrt(len(vector))

    def root(self, chain: Chain) -> bytes:
        return self.roots.get(chain.head.key.lineage, super().root(chain))

    async def _round(self, name: PeerId, chain: Chain, into: Vector) -> AveragingResult:
        node = self.network.nodes[name]
        self.began[chain.head.key.round].setdefault(name, (self.now, self.frames[name], node.sent_bytes))
        result = await super()._round(name, chain, into)
        if own := self.rounds[name].call.own:
            self.offered[chain.head.key.round].update((each.member.peer, each.tokens) for each in own.plan.offers)
        if resolved := self.rounds[name].call.resolved:
            self.versions[chain.head.key.round] |= {resolved.plan.version}
        return result

    def extended(self, name: PeerId, chain: Chain, record: Record, mean: Vector) -> None:
        lineage, round = chain.head.key.lineage, record.round
        before = self.roots.get(record.parent, super().root(chain))
        root = hashlib.sha256(before + (mean.numpy().tobytes() if record.averaged else b"")).digest()
        self.found[round].add(root)
        self.roots.setdefault(lineage, root)
        self.means.setdefault(round, mean)
        self.decided.setdefault(round, record)
        result = self.results[name].pop(round)
        self.contributors[round] = result.contributors or len(result.peers)

    async def until_all_count(self) -> int:
        """Run until a mean holds all work. Returns its round."""
        ends = self.now + MOST_SECONDS
        while self.now < ends:
            if full := [round for round, count in self.contributors.items() if count == len(self.names)]:
                return full[0]
            await asyncio.sleep(LOOK_SECONDS)
        raise TimeoutError(f"no mean of {len(self.names)} peers: {self.contributors}")

    async def until_begun(self, round: int, names: Sequence[PeerId] = ()) -> None:
        """Run until all of these, or all, have begun a round."""
        here = self.began[round]
        await until(lambda: all(name in here for name in names or self.names), MOST_SECONDS)

    async def until_past(self, round: int, name: PeerId) -> float:
        """Run until a peer has begun a later round; returns when. One that is late may begin none but the last."""

        def begun() -> list[float]:
            return [here[name][0] for later, here in self.began.items() if later > round and name in here]

        await until(lambda: bool(begun()), MOST_SECONDS)
        return min(begun())

    # -- what came out ------------------------------------------------------------------------------------------------

    def error(self, round: int) -> float:
        """Of the mean of a round, weighted by tokens: the largest relative one of an element."""
        exact, offered = torch.zeros(self.settings.elements, dtype=torch.float64), self.offered[round]
        for name in self.names:
            exact += self.vector(name, round).double() * offered.get(name, 0)
        exact /= sum(offered.values())
        return float(((self.means[round] - exact) / exact).abs().max())

    def share(self, round: int) -> float:
        """The share of all work that is in the mean of a round, chunk by chunk."""
        caches = [self.averagers[name].part_cache for name in self.voters if self.alive(name)]
        found = [[cache.get(part.digest) for cache in caches] for part in self.decided[round].parts]
        counts = list[int]()
        for part in (next(part for part in held if part) for held in found):
            clusters = [sum(mask.bit_count() for mask in member_masks(masks)) for masks in part.members]
            counts += clusters or [mask.bit_count() for mask in part.masks]
        return fmean(counts) / len(self.names)

    def spans(self, first: int, last: int) -> Iterator[tuple[float, float, float]]:
        """(seconds, frames sent, bytes sent) of each peer that began all these rounds, from one to the other."""
        for name, (begin, frames, sent) in self.began[first].items():
            if name in self.began[last]:
                end, *after = self.began[last][name]
                yield end - begin, after[0] - frames, after[1] - sent

    def seconds(self, round: int, names: Collection[PeerId] = ()) -> float:
        """From the first peer's start until these, or all, have the mean."""
        began, ended = self.began[round], self.began[round + 1]
        last = max(end for name, (end, *_) in ended.items() if not names or name in names)
        return last - min(begin for begin, *_ in began.values())


class FaultyThousand(Thousand):
    keep_rounds = 4  # the associates of a stalled lead lose it after two rounds, and ask then

    async def strike(self, round: int, data_seconds: float) -> set[PeerId]:
        """Let peers die and stall while data moves in a round, at times drawn by lot. Returns them.

        From a stalled one nothing arrives any more, no heartbeat either: others lose it after some seconds.
        """
        draw = random.Random(f"faults/{self.seed}")
        victims = draw.sample(self.names, math.ceil(len(self.names) * (DYING + STALLING)))
        dying = victims[: math.ceil(len(self.names) * DYING)]
        await until(lambda: any(self._is_called(self.rounds[name], round) for name in self.voters), MOST_SECONDS)
        for when, name in sorted((self.now + draw.uniform(0.0, data_seconds), name) for name in victims):
            await asyncio.sleep(max(0.0, when - self.now))
            if name in dying:
                self.network.kill(name)
            else:
                for other in self.names:
                    if other != name:
                        self.network.block(name, other)
        return set(victims)

    def _is_called(self, session: Round, round: int) -> bool:
        return session.head.key.round == round and session.call.resolved is not None


class JoiningThousand(Thousand):
    """Half of the peers join a run of the others, all at once, with its state. They have no leads then.

    Training takes longer than averaging: else one that was late fetches the mean, and is late for the next round.
    """

    keep_rounds = 4
    train_seconds_each = 4.0

    def __init__(self, peers: int, seed: int = 1) -> None:
        super().__init__(peers, seed=seed)
        half = len(self.names) // 2
        self.train_seconds = dict.fromkeys(self.names, self.train_seconds_each)
        self.associates, self.joiners = self.associates[:-half], self.associates[-half:]

    def add_joiners(self) -> None:
        self.associates += self.joiners
        for name in self.joiners:
            self.start(name)


class Independent(AveragingSwarm):
    """Peers with a state of their own. They average until the spread over them is 1 % of the first."""

    grace_seconds = 0.0

    def __init__(self, protocol: str, peers: int) -> None:
        draw = torch.Generator().manual_seed(peers)
        states = [[torch.rand(ELEMENTS, generator=draw) + 1] for _ in range(peers)]
        settings = Settings("fp32", (), ELEMENTS)
        make = load_averager(protocol)
        self.frames = Counter[PeerId]()
        super().__init__(make, states, uplinks=[LINE_BYTES] * peers, settings=settings, digits=48)
        self.train_seconds, self.round_seconds = [0.0] * peers, 60.0
        for name in self.names:
            self.network.transports[name].disguise = counting(self.frames, name)

    def add(self, index: int, number: int, session: Any, mean: AveragingResult, *times: Any) -> RoundResult:
        """Without a copy of the state."""
        result = RoundResult(number, session.round, session.group, mean, {}, 0, 0.0, times[1], times[2], self.now, [])
        self.results[index].append(result)
        return result

    def spread(self) -> float:
        """The deviation over the peers of their vectors' first elements."""
        here = torch.stack([state[0][:PROBE] for state in self.states]).double()
        return math.sqrt(float(here.var(0, correction=0).sum()))

    async def until_mixed(self) -> None:
        first = self.spread()
        for index in range(self.count):
            self.spawn(self.names[index], self._rounds(index, 1 << 30))
        while self.spread() > WITHIN * first:
            if self.now > MOST_SECONDS:
                raise TimeoutError(f"a spread of {self.spread() / first:.3g} of the first after {self.now:.0f} s")
            await asyncio.sleep(LOOK_SECONDS)
        self.ended = self.now
