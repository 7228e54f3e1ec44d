"""Who believes whom alive: what each simulated peer can know of the others, computed instead of sent.

A death travels the link as a reset does, and is held up where the link is. A pair whose heartbeats do not come through
in both directions lose each other after `LIVENESS_SECONDS`, and meet again by a handshake, one round trip after both
directions are open. Timers run only for these transitions, none while all is well.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocols.base import Member, PeerId
from protocols.tasks import Bell

if TYPE_CHECKING:
    from tests.sim.network import Node, SimNetwork

HEARTBEAT_SECONDS = 1.0
LIVENESS_SECONDS = 5.0

Pair = tuple[PeerId, PeerId]


class View:
    """The members that one peer, in one life, believes alive; itself always."""

    def __init__(self, me: Member) -> None:
        self.version = 0
        self.changed = Bell()
        self._known = {me.peer: me}
        self._live: tuple[Member, ...] = (me,)

    def live(self) -> tuple[Member, ...]:
        return self._live

    def knows(self, peer: PeerId) -> bool:
        return peer in self._known

    def meet(self, member: Member) -> None:
        if self._known.get(member.peer) != member:
            self._known[member.peer] = member
            self._moved()

    def lose(self, peer: PeerId) -> None:
        if self._known.pop(peer, None):
            self._moved()

    def bury(self, member: Member) -> None:
        """This life of a peer has ended; a later one may be known already."""
        if self._known.get(member.peer) == member:
            self.lose(member.peer)

    def _moved(self) -> None:
        self._live = tuple(self._known[peer] for peer in sorted(self._known))
        self.version += 1
        self.changed.ring()


@dataclass
class Outages:
    """When peers were down and pairs cut off, as [since, until) in virtual seconds; inf while it lasts."""

    spans: dict[tuple[PeerId, ...], list[list[float]]] = field(default_factory=dict)

    def begin(self, *who: PeerId) -> None:
        spans = self.spans.setdefault(tuple(sorted(who)), [])
        if not spans or spans[-1][1] != float("inf"):
            spans.append([_now(), float("inf")])

    def end(self, *who: PeerId) -> None:
        spans = self.spans.get(tuple(sorted(who)))
        if spans and spans[-1][1] == float("inf"):
            spans[-1][1] = _now()

    def free(self, who: tuple[PeerId, ...], since: float, until: float) -> bool:
        return all(end <= since or until < begin for begin, end in self.spans.get(tuple(sorted(who)), ()))

    def connected(self, peers: Sequence[PeerId], count: int, since: float, until: float) -> bool:
        """Whether `count` of the peers were up, and each in touch with each, from `since` to `until`."""
        up = [peer for peer in peers if self.free((peer,), since, until)]

        def grows(clique: tuple[PeerId, ...], left: Sequence[PeerId]) -> bool:
            if len(clique) >= count:
                return True
            if len(clique) + len(left) < count:
                return False
            peer, rest = left[0], left[1:]
            near = [other for other in rest if self.free((peer, other), since, until)]
            return grows((*clique, peer), near) or (len(near) < len(rest) and grows(clique, rest))

        return grows((), up)


class Contacts:
    """The views of all peers of a network, kept up to date by what happens to it."""

    def __init__(self, network: SimNetwork) -> None:
        self.views: dict[PeerId, View] = {}
        self.outages = Outages()
        self._network = network
        self._expiries: dict[Pair, asyncio.TimerHandle] = {}
        self._meetings: dict[Pair, asyncio.TimerHandle] = {}

    def open(self, one: PeerId, other: PeerId) -> bool:
        """Whether heartbeats pass between two living peers, both ways."""
        network = self._network
        return (
            network.nodes[one].process.alive
            and network.nodes[other].process.alive
            and not network.link(one, other).blocked
            and not network.link(other, one).blocked
        )

    def joined(self, node: Node, acquainted: bool) -> None:
        """A new life begins. Acquainted: as in a swarm that stands already; else it meets the others first."""
        self.views[node.peer] = View(node.member)
        for peer, other in self._network.nodes.items():
            if peer == node.peer or not other.process.alive:
                continue
            if acquainted:
                self.views[node.peer].meet(other.member)
                self.views[peer].meet(node.member)
            else:
                self._meet(node.peer, peer)

    def revived(self, node: Node) -> None:
        self.outages.end(node.peer)
        self.joined(node, acquainted=False)

    def died(self, node: Node) -> None:
        """The end of its streams tells the others, as far as the links let it."""
        self.outages.begin(node.peer)
        for peer in self._network.nodes:
            if peer != node.peer:
                _cancel(self._expiries, (node.peer, peer))
                _cancel(self._meetings, _pair(node.peer, peer))
                self._network.travel(node.peer, peer, lambda peer=peer: self.views[peer].bury(node.member))  # type: ignore[misc]

    def cut(self, source: PeerId, target: PeerId) -> None:
        """One direction is blocked: no heartbeat is answered any more."""
        self.outages.begin(source, target)
        _cancel(self._meetings, _pair(source, target))
        for observer, subject in ((source, target), (target, source)):
            view = self.views.get(observer)
            if not view or not self._network.nodes[observer].process.alive:
                continue
            if view.knows(subject) and (observer, subject) not in self._expiries:
                last = _last_beat(observer, _now())
                timer = asyncio.get_running_loop().call_at(last + LIVENESS_SECONDS, self._expire, observer, subject)
                self._expiries[observer, subject] = timer

    def mended(self, source: PeerId, target: PeerId) -> None:
        """One direction is open again."""
        network = self._network
        if not network.link(source, target).blocked and not network.link(target, source).blocked:
            self.outages.end(source, target)
        if source in network.nodes and target in network.nodes:
            self._meet(source, target)

    def _meet(self, one: PeerId, other: PeerId) -> None:
        if self.open(one, other):
            network, pair = self._network, _pair(one, other)
            round_trip_seconds = network.link(one, other).latency_seconds + network.link(other, one).latency_seconds
            _cancel(self._meetings, pair)
            loop = asyncio.get_running_loop()
            self._meetings[pair] = loop.call_later(round_trip_seconds, self._met, one, other)

    def _met(self, one: PeerId, other: PeerId) -> None:
        del self._meetings[_pair(one, other)]
        for observer, subject in ((one, other), (other, one)):
            _cancel(self._expiries, (observer, subject))
            self.views[observer].meet(self._network.nodes[subject].member)

    def _expire(self, observer: PeerId, subject: PeerId) -> None:
        del self._expiries[observer, subject]
        self.views[observer].lose(subject)


def _pair(one: PeerId, other: PeerId) -> Pair:
    return (one, other) if one < other else (other, one)


def _cancel(timers: dict[Pair, asyncio.TimerHandle], key: Pair) -> None:
    timer = timers.pop(key, None)
    if timer:
        timer.cancel()


def _last_beat(peer: PeerId, now: float) -> float:
    """When this peer's last heartbeat was due: each peer beats at its own moment of the second."""
    phase = zlib.crc32(peer.encode()) % 1000 / 1000 * HEARTBEAT_SECONDS
    return max(0.0, now - (now - phase) % HEARTBEAT_SECONDS)


def _now() -> float:
    return asyncio.get_running_loop().time()
