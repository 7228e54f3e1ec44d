"""Which peers each simulated peer believes alive, computed instead of sent as heartbeats.

A death travels over the link as a reset does, and waits while the link is blocked. If heartbeats do not pass between
two peers in both directions, each removes the other after `LIVENESS_SECONDS`; they meet again by a handshake, one round
trip after both directions are open. Timers run only for these transitions.

Peers know all others, or those that `Contacts.near` names, as in a run too large for each to watch all.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from protocols.aio import Notifier
from protocols.base import Member, PeerId

if TYPE_CHECKING:
    from tests.sim.network import Node, SimNetwork

HEARTBEAT_SECONDS = 1.0
LIVENESS_SECONDS = 5.0
GREETING_SECONDS = 64.0  # until a newcomer has greeted 32 voters that it does not watch, one every two seconds

Pair = tuple[PeerId, PeerId]


class View:
    """The members that one incarnation of a peer believes alive, including itself."""

    def __init__(self, me: Member, known: Mapping[PeerId, Member]) -> None:
        self.version = 0
        self.changed = Notifier()
        self._known = {**known, me.peer: me}
        self.met = dict[PeerId, None].fromkeys(self._known)
        self._live: tuple[Member, ...] | None = None
        self._away: set[PeerId] = set()  # those that are away, as they say; never this peer
        self.on_lost: Callable[[Member], None] = lambda member: None

    def live(self) -> tuple[Member, ...]:
        if self._live is None:  # in a large swarm most views change far more often than they are looked at
            self._live = tuple(self._known[peer] for peer in sorted(self._known) if peer not in self._away)
        return self._live

    def hear(self, peer: PeerId, away: bool) -> None:
        if away != (peer in self._away):
            self._away ^= {peer}
            self._moved()

    def knows(self, peer: PeerId) -> bool:
        return peer in self._known

    def meet(self, member: Member) -> None:
        if self._known.get(member.peer) != member:
            self._known[member.peer] = member
            self.met[member.peer] = None
            self._moved()

    def lose(self, peer: PeerId) -> None:
        if member := self._known.pop(peer, None):
            self.on_lost(member)
            self._moved()

    def bury(self, member: Member) -> None:
        if self._known.get(member.peer) == member:
            self.lose(member.peer)

    def _moved(self) -> None:
        self._live = None
        self.version += 1
        self.changed.notify()


@dataclass
class Outages:
    """Virtual times at which members died, and (begin, end) of the time in which pairs were cut off; end may be inf."""

    deaths: dict[Member, float] = field(default_factory=dict)
    cuts: dict[Pair, list[list[float]]] = field(default_factory=dict)

    def begin(self, one: PeerId, other: PeerId, at: float) -> None:
        spans = self.cuts.setdefault(_pair(one, other), [])
        if not spans or spans[-1][1] < math.inf:
            spans.append([at, math.inf])

    def end(self, one: PeerId, other: PeerId, at: float) -> None:
        spans = self.cuts.get(_pair(one, other))
        if spans and spans[-1][1] == math.inf:
            spans[-1][1] = at

    def in_touch(self, one: PeerId, other: PeerId, since: float, until: float) -> bool:
        return all(end <= since or until < begin for begin, end in self.cuts.get(_pair(one, other), ()))

    def connected(
        self, members: Sequence[Member], count: int, since: float, until: float, among: PeerId | None = None
    ) -> bool:
        """Whether `count` members, including `among`, were alive and mutually connected for the whole time."""
        alive = [member.peer for member in members if self.deaths.get(member, math.inf) > until]
        if among is not None:
            alive = [peer for peer in alive if peer == among or self.in_touch(peer, among, since, until)]
            if among not in alive:
                return False

        def grows(size: int, left: Sequence[PeerId]) -> bool:
            if size >= count:
                return True
            if size + len(left) < count:
                return False
            near = [other for other in left[1:] if self.in_touch(left[0], other, since, until)]
            return grows(size + 1, near) or (len(near) < len(left) - 1 and grows(size, left[1:]))

        return grows(0, alive)


class Contacts:
    """The views of all peers of a network, updated as peers join and die and links change."""

    def __init__(self, network: SimNetwork) -> None:
        self.views: dict[PeerId, View] = {}
        self._alive: dict[PeerId, Member] = {}
        self.outages = Outages()
        self._network = network
        self._expiries: dict[Pair, asyncio.TimerHandle] = {}
        self._meetings: dict[Pair, asyncio.TimerHandle] = {}
        self._away: set[PeerId] = set()
        self.near: Callable[[PeerId], Iterable[PeerId]] = lambda peer: network.nodes
        """The peers that see this one, and that it sees. Symmetric; it may name peers that are not there yet."""
        self.greets_others = False
        """Whether a peer greets those that it does not see, too. Those that begin at time 0 have done so before."""
        self._joined: dict[PeerId, float] = {}  # when each began, if it greets others

    def met(self, peer: PeerId) -> list[PeerId]:
        """The peers that have greeted this one."""
        seen, now = self.views[peer].met, _now()

        def have_greeted(other: PeerId) -> bool:
            since = max(self._joined[peer], self._joined[other])
            return since == 0.0 or since <= now - GREETING_SECONDS

        return [*seen, *(other for other in self._joined if other not in seen and have_greeted(other))]

    def open(self, one: PeerId, other: PeerId) -> bool:
        """Whether heartbeats pass between two living peers, both ways."""
        network = self._network
        return (
            network.nodes[one].process.alive
            and network.nodes[other].process.alive
            and not network.link(one, other).blocked
            and not network.link(other, one).blocked
        )

    def tell(self, peer: PeerId, away: bool) -> None:
        self._away = self._away | {peer} if away else self._away - {peer}
        for other in self._others(peer):
            self._network.travel(peer, other, partial(self._heard, other, peer))

    def _heard(self, observer: PeerId, subject: PeerId) -> None:
        self.views[observer].hear(subject, subject in self._away)

    def joined(self, node: Node, acquainted: bool) -> None:
        """A new incarnation begins. `acquainted`: it knows all live peers at once; else by handshakes."""
        others = self._others(node.peer)
        known = {peer: self._alive[peer] for peer in others if peer in self._alive}
        self.views[node.peer] = View(node.member, known if acquainted else {})
        for peer in others:
            if peer in self._away:
                self._heard(node.peer, peer)
        if node.peer in self._away:
            self.tell(node.peer, False)
        for peer in others:
            if peer not in self._alive:
                continue
            if acquainted:
                self.views[peer].meet(node.member)
            else:
                self._meet(node.peer, peer)
        self._alive[node.peer] = node.member
        if self.greets_others:
            self._joined[node.peer] = _now()

    def died(self, node: Node) -> None:
        """A peer has died; the others learn it over their links."""
        self.outages.deaths[node.member] = _now()
        self._alive.pop(node.peer, None)
        for peer in self._others(node.peer):
            _cancel(self._expiries, (node.peer, peer))
            _cancel(self._meetings, _pair(node.peer, peer))
            self._network.travel(node.peer, peer, lambda peer=peer: self.views[peer].bury(node.member))  # type: ignore[misc]

    def cut(self, source: PeerId, target: PeerId) -> None:
        self.outages.begin(source, target, _now())
        _cancel(self._meetings, _pair(source, target))
        for observer, subject in ((source, target), (target, source)):
            view = self.views.get(observer)
            if not view or not self._network.nodes[observer].process.alive:
                continue
            if view.knows(subject) and (observer, subject) not in self._expiries:
                last = _last_beat(observer, _now())
                timer = asyncio.get_running_loop().call_at(last + LIVENESS_SECONDS, self._expire, observer, subject)
                self._expiries[observer, subject] = timer

    async def answers(self, observer: PeerId, subject: PeerId, within_seconds: float) -> bool:
        """Whether a peer answers a heartbeat that this one sends now. It waits behind the data on both uplinks, and
        while a link is blocked.
        """
        network, answer = self._network, asyncio.Event()

        def travel(source: PeerId, target: PeerId, arrive: Callable[[], None]) -> None:
            network.travel(source, target, arrive, max(0.0, network.nodes[source].up_free_at - _now()))

        def arrive() -> None:
            if network.nodes[subject].process.alive:
                travel(subject, observer, answer.set)

        travel(observer, subject, arrive)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(_now() + within_seconds + 4 * network.latency_seconds):
                await answer.wait()
        return answer.is_set()

    def mended(self, source: PeerId, target: PeerId) -> None:
        network = self._network
        if not network.link(source, target).blocked and not network.link(target, source).blocked:
            self.outages.end(source, target, _now())
        if source in network.nodes and target in self._others(source):
            self._meet(source, target)

    def acquaint(self, peer: PeerId, others: Iterable[PeerId]) -> None:
        """Let a peer meet others that `near` names by now."""
        for other in others:
            if peer != other and not self.views[peer].knows(other):
                self._meet(peer, other)

    def _others(self, peer: PeerId) -> list[PeerId]:
        return [other for other in self.near(peer) if other != peer and other in self._network.nodes]

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
    """When this peer's last heartbeat was due: each peer has its own phase within a second."""
    phase = zlib.crc32(peer.encode()) % 1000 / 1000 * HEARTBEAT_SECONDS
    return max(0.0, now - (now - phase) % HEARTBEAT_SECONDS)


def _now() -> float:
    return asyncio.get_running_loop().time()
