"""A simulated network: `Transport` with latency, bandwidth, back-pressure, refusals, resets and silence.

Streams behave as those of TCP and libp2p do. What was sent before a process was killed still arrives, and then the
reset. A blocked link loses nothing, and delays everything until it heals. Opening a stream takes a round trip, so that
a refusal is definite. Messages of different streams may overtake each other; those of one stream never do.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from protocols.base import Deadline, Handler, Member, NotAccepted, PeerGone, PeerId, PeerSilent
from tests.sim.contact import Contacts
from tests.sim.loop import SimProcess
from tests.sim.pipe import EOF, RESET, SimPipe
from tests.sim.trace import Trace
from tests.sim.transport import SimTransport

Watch = Callable[[PeerId, int, str, PeerId], None]
"""Called before each message of a peer takes effect: (peer, message number, "sent" or "received", other peer)."""

Answer = SimPipe | type[PeerGone]
"""To the opening of a stream: the opener's end of it, or the error that says why there is none."""


@dataclass
class Link:
    latency_seconds: float
    blocked: bool = False
    healed_at: float = 0.0
    parked: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class Node:
    """One incarnation of a peer in the network.

    Attributes:
        messages: sent and received: openings of streams, data, ends. Counted over all incarnations.
        slowness: divides its bandwidth.
    """

    peer: PeerId
    process: SimProcess
    bytes_per_second: float
    incarnation: int = 0
    slowness: float = 1.0
    up_free_at: float = 0.0
    down_free_at: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0
    handlers: dict[str, Handler] = field(default_factory=dict)
    ends: dict[int, SimPipe] = field(default_factory=dict)

    @property
    def member(self) -> Member:
        return Member(self.peer, self.incarnation)

    def carry(self, size: int) -> float:
        return size * self.slowness / self.bytes_per_second


class SimNetwork:
    """All links and nodes. The only randomness is `jitter`, which adds up to the link's latency to each message.

    `past` holds the nodes of former incarnations. A fault that `watch` injects already applies to its message.
    """

    def __init__(
        self,
        trace: Trace,
        latency_seconds: float = 0.02,
        bytes_per_second: float = 12.5e6,
        jitter: random.Random | None = None,
    ) -> None:
        self.trace = trace
        self.latency_seconds = latency_seconds
        self.bytes_per_second = bytes_per_second
        self.nodes: dict[PeerId, Node] = {}
        self.past: list[Node] = []
        self.transports: dict[PeerId, SimTransport] = {}
        self.links: dict[tuple[PeerId, PeerId], Link] = {}
        self.contacts = Contacts(self)
        self.apart: set[tuple[PeerId, PeerId]] = set()
        """Pairs of an opener and a peer whose new streams are refused."""
        self.bugs: list[Exception] = []
        self.watch: Watch | None = None
        self._jitter = jitter
        self._streams = 0

    # -- peers and links ----------------------------------------------------------------------------------------------

    def join(self, peer: PeerId, bytes_per_second: float | None = None) -> SimTransport:
        """Add a peer that all others know at once."""
        node = Node(peer, SimProcess(peer), bytes_per_second or self.bytes_per_second)
        transport = self._place(node)
        self.contacts.joined(node, acquainted=True)
        return transport

    def restart(self, peer: PeerId) -> SimTransport:
        """The next incarnation of a killed peer: a new process without handlers or streams that knows no peer."""
        old = self.nodes[peer]
        if old.process.alive:
            raise ValueError(f"{peer} is alive")
        self.past.append(old)
        incarnation = old.incarnation + 1
        node = Node(peer, SimProcess(peer), old.bytes_per_second, incarnation, old.slowness, messages=old.messages)
        self.trace(_now(), f"{peer} restarted as {incarnation}")
        transport = self._place(node)
        self.contacts.joined(node, acquainted=False)
        return transport

    def _place(self, node: Node) -> SimTransport:
        self.nodes[node.peer] = node
        self.transports[node.peer] = SimTransport(self, node)
        return self.transports[node.peer]

    def link(self, source: PeerId, target: PeerId) -> Link:
        key = (source, target)
        if key not in self.links:
            self.links[key] = Link(self.latency_seconds)
        return self.links[key]

    def block(self, source: PeerId, target: PeerId) -> None:
        """Let nothing arrive from `source` at `target`, including what is on its way, until `heal`."""
        link = self.link(source, target)
        if not link.blocked:
            link.blocked = True
            self.contacts.cut(source, target)

    def heal(self, source: PeerId, target: PeerId) -> None:
        """Open a link; delayed messages set out again."""
        link = self.link(source, target)
        if link.blocked:
            link.blocked, link.healed_at = False, _now()
            parked, link.parked = link.parked, []
            for arrive in parked:
                self.travel(source, target, arrive)
            self.contacts.mended(source, target)

    def kill(self, peer: PeerId) -> None:
        """SIGKILL: the tasks stop at once; what was sent still arrives, and then a reset."""
        node = self.nodes[peer]
        self.trace(_now(), f"{peer} killed")
        node.process.kill()
        self.reset_streams(peer)
        self.contacts.died(node)

    def reset_streams(self, peer: PeerId) -> None:
        """Reset every stream of a peer, as the death of its daemon does."""
        for end in list(self.nodes[peer].ends.values()):
            end.sever()

    def totals(self, peer: PeerId) -> tuple[int, int]:
        nodes = [node for node in (*self.past, self.nodes[peer]) if node.peer == peer]
        return sum(node.sent_bytes for node in nodes), sum(node.received_bytes for node in nodes)

    # -- streams ------------------------------------------------------------------------------------------------------

    async def connect(self, node: Node, peer: PeerId, method: str, deadline: Deadline) -> SimPipe:
        """The opener's end of a new stream; the peer's handler starts when the opening arrives."""
        self._count(node, "sent", peer)
        if not node.process.alive:
            raise PeerGone(peer, "this process is dead")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.travel(node.peer, peer, lambda: self._knock(node, peer, method, answer))
        try:
            async with asyncio.timeout_at(deadline):
                end = await answer
        except TimeoutError:
            raise PeerSilent(peer, "no answer before the deadline") from None
        if isinstance(end, type):
            raise end(peer, f"cannot be reached, or does not serve {method}")
        return end

    def _knock(self, node: Node, peer: PeerId, method: str, answer: asyncio.Future[Answer]) -> None:
        target = self.nodes.get(peer)
        if target and self._held_up(node.peer, target, lambda: self._knock(node, peer, method, answer)):
            return
        refusal = self._refusal(node.peer, target, method)
        if target is None or refusal:
            self.travel(peer, node.peer, lambda: self._answered(node, peer, refusal or PeerGone, answer))
            return
        self._streams += 1
        mine, theirs = SimPipe(self, node, self._streams), SimPipe(self, target, self._streams)
        mine.other, theirs.other = theirs, mine
        self._accept(target, node.peer, method, theirs)
        self.travel(peer, node.peer, lambda: self._answered(node, peer, mine, answer))

    def _refusal(self, opener: PeerId, target: Node | None, method: str) -> type[PeerGone] | None:
        """The error for an opening that is not accepted; None if it is."""
        if target is None or not target.process.alive or (opener, target.peer) in self.apart:
            return PeerGone
        is_served = method in target.handlers and self.transports[target.peer].access.serves(opener, method)
        return None if is_served else NotAccepted

    def _answered(self, node: Node, peer: PeerId, end: Answer, answer: asyncio.Future[Answer]) -> None:
        if self._held_up(peer, node, lambda: self._answered(node, peer, end, answer)):
            return
        if answer.done() or not node.process.alive:  # the caller gave up, or died
            return end.sever() if isinstance(end, SimPipe) else None
        if isinstance(end, SimPipe):
            node.ends[end.number] = end
        answer.set_result(end)

    def _accept(self, node: Node, source: PeerId, method: str, end: SimPipe) -> None:
        node.ends[end.number] = end
        with node.process.entered():
            asyncio.get_running_loop().create_task(self.transports[node.peer].answer(source, method, end))

    # -- messages -----------------------------------------------------------------------------------------------------

    def departing(self, end: SimPipe, data: bytes, by_process: bool = True) -> None:
        """Queue data behind what the sender's uplink and the receiver's downlink already carry."""
        node, target = end.node, end.other.node
        if by_process:
            self._count(node, "sent", target.peer)
            if end.closed:  # a fault at this message closed it
                return
        size = 0 if data is EOF or data is RESET else len(data)
        node.sent_bytes += size
        now = _now()
        self.trace(now, f"{node.peer}>{target.peer} #{end.number} {size if size else data!r}")
        end.launch(data)
        node.up_free_at = max(now, node.up_free_at) + node.carry(size)
        self.travel(node.peer, target.peer, lambda: self._arrive(end, size), node.up_free_at - now)

    def travel(self, source: PeerId, target: PeerId, arrive: Callable[[], None], delay_seconds: float = 0.0) -> None:
        """Call `arrive` after the link's latency; if the link is blocked meanwhile, that long after it heals."""
        link, departs = self.link(source, target), _now() + delay_seconds
        seconds = link.latency_seconds
        if self._jitter:
            seconds += self._jitter.uniform(0.0, link.latency_seconds)
        asyncio.get_running_loop().call_at(departs + seconds, self._land, link, departs, seconds, arrive)

    def _land(self, link: Link, departed: float, seconds: float, arrive: Callable[[], None]) -> None:
        if link.blocked:
            link.parked.append(arrive)
        elif departed < link.healed_at:
            again = link.healed_at
            asyncio.get_running_loop().call_at(again + seconds, self._land, link, again, seconds, arrive)
        else:
            arrive()

    def _arrive(self, end: SimPipe, size: int) -> None:
        target = end.other.node
        finish = max(_now(), target.down_free_at + target.carry(size))
        target.down_free_at = finish
        asyncio.get_running_loop().call_at(finish, self._deliver, end)

    def _deliver(self, end: SimPipe) -> None:
        here = end.other
        if here.closed or not self._held_up(end.node.peer, here.node, lambda: self._deliver(end)):
            here.deliver()

    def _held_up(self, source: PeerId, node: Node, arrive: Callable[[], None]) -> bool:
        """Count an arrived message, or park it if its link is blocked, also by a fault at this message."""
        link = self.link(source, node.peer)
        if not link.blocked:
            self._count(node, "received", source)
        if link.blocked:  # before the message, or by a fault at it
            link.parked.append(arrive)
        return link.blocked

    def _count(self, node: Node, way: str, other: PeerId) -> None:
        if node.process.alive:
            node.messages += 1
            if self.watch:
                self.watch(node.peer, node.messages, way, other)


def _now() -> float:
    return asyncio.get_running_loop().time()
