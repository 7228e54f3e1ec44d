"""Memberships of many peers on the simulated network: whom each watches, what that costs, and who is noticed when.

The first peers are the roster, as in a run whose rounds others follow. Each peer is told of one other at first.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean

from node.membership.handshake import LocalPeer
from node.membership.membership import Membership
from node.membership.watching import Known, Role, roster_role
from protocols.base import PeerId
from tests.sim.host import SimClock, SimSigner
from tests.sim.swarm import SimSwarm

RUN = bytes(range(32))
JOIN_SECONDS = 0.02
LOOK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Load:
    """Of the peers of one kind: what each sends in a second, and how many peers it watches, is watched by, and sees."""

    messages: float
    bytes: float
    most_messages: float
    watched: float
    live: float


class WatchingWorld(SimSwarm):
    def __init__(self, peers: int, voters: int = 32) -> None:
        super().__init__()
        self.names = [f"p{index:03}" for index in range(peers)]
        self.roster = self.names[:voters]
        self.members: dict[PeerId, Membership] = {}
        self.said: Counter[str] = Counter()

    # -- peers --------------------------------------------------------------------------------------------------------

    def start(self, peer: PeerId, told_of: PeerId | None = None) -> None:
        known = peer in self.network.nodes
        transport = self.network.restart(peer) if known else self.network.join(peer)
        me = transport.node.member
        local = LocalPeer(me, RUN, 1 + me.incarnation, peer, lambda: ("/ip4/10.0.0.1/tcp/1",), lambda: 1)
        with transport.node.process.entered():
            members = self.members[peer] = Membership(
                transport,
                local,
                clock=SimClock(),
                signer=SimSigner(peer, 0),
                wanted=lambda: [each for each in self.roster if each != peer],
                role=partial(self.role, peer),
                say=lambda line: self.said.update((line,)),
            )
        if told_of:
            members.add_candidate(told_of)
        self.spawn(peer, members.run())

    def role(self, peer: PeerId, known: Sequence[Known]) -> Role:
        return roster_role(peer, self.roster)

    async def start_all(self) -> None:
        for index, peer in enumerate(self.names):
            self.start(peer, self.names[index * 7919 % index] if index else None)
            await asyncio.sleep(JOIN_SECONDS)

    # -- what they see ------------------------------------------------------------------------------------------------

    def sees(self, peer: PeerId) -> set[PeerId]:
        return {member.peer for member in self.members[peer].live()} - {peer}

    def seen_by(self, peer: PeerId) -> list[PeerId]:
        return [other for other in self.alive() if other != peer and peer in self.sees(other)]

    def alive(self) -> list[PeerId]:
        return [peer for peer, node in self.network.nodes.items() if node.process.alive]

    def is_whole(self, among: Iterable[PeerId]) -> bool:
        """Whether each of these peers reaches each other one over peers that see each other."""
        among = set(among)
        reached, new = set[PeerId](), {min(among)}
        while new:
            reached |= new
            new = {other for peer in new for other in self.sees(peer) if peer in self.sees(other)} & among - reached
        return reached == among

    def voters_meet(self, among: Iterable[PeerId]) -> bool:
        voters = [peer for peer in self.roster if peer in set(among)]
        return all(set(voters) - {peer} <= self.sees(peer) for peer in voters)

    async def until(self, condition: Callable[[], bool], seconds: float) -> float:
        began = self.now
        while not condition():
            assert self.now < began + seconds, f"not within {seconds:g} s"
            await asyncio.sleep(LOOK_SECONDS)
        return self.now - began

    # -- what it costs ------------------------------------------------------------------------------------------------

    async def load(self, seconds: float) -> dict[str, Load]:
        before = {peer: self._sent(peer) for peer in self.alive()}
        await asyncio.sleep(seconds)
        after = {peer: self._sent(peer) for peer in before}
        kinds = {"voter": self.roster, "other": [peer for peer in before if peer not in self.roster]}
        found = {}
        for kind, peers in kinds.items():
            if here := [peer for peer in peers if peer in before]:
                sent = [(after[peer][0] - before[peer][0]) / seconds for peer in here]
                size = mean((after[peer][1] - before[peer][1]) / seconds for peer in here)
                watched = mean(
                    sum(each.watching is not None for each in self.members[peer].contacts()) for peer in here
                )
                found[kind] = Load(mean(sent), size, max(sent), watched, mean(len(self.sees(peer)) for peer in here))
        return found

    def _sent(self, peer: PeerId) -> tuple[float, int]:
        """Messages (half of those sent and received) and bytes."""
        node = self.network.nodes[peer]
        return node.messages / 2, node.sent_bytes
