"""`python -m tests.sim.private`: private runs on virtual time, one for each seed.

A founder starts a private run; the others join by tickets while rounds go on, and a ticket's maker may be killed
meanwhile. Then members are removed in the middle of a round: one, or most of the roster at once. Some of them ignore
that they were removed. Another peer joins afterwards, by a ticket of a peer that is left. A stranger tries every method
of every peer all the time, with a pass that it has seen. Beside this a seed draws crashes, a partition during which the
removal happens on one side only, and clocks that are up to 600 s off. Passes, tickets, greetings and heartbeats are
those of a node; disks outlive the peers.

The invariants of every simulated swarm hold, and:

    stranger    no handler but that of passes answers a peer without a pass, and that one refuses a pass of another peer
                and a ticket that was used
    uninvited   a roster holds only peers that were admitted
    removed     a mean whose exchange began after those that decide it knew of a removal counts nothing of the
                removed peer, and the record leaves it out of the roster; with crashes or a partition, a mean whose
                round began then, because an earlier vote may bind the record
    lost        the peers that are left are all in the roster within `SETTLED_SECONDS`, and then commit two rounds

The last line of output is one JSON object.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.membership.handshake import LocalPeer
from node.membership.hello import PASS_METHOD
from node.membership.invitations import Ticket, read_ticket
from node.membership.membership import Membership
from node.membership.pass_exchange import PassRefused, Present, Redeem
from node.runtime.identity import Identity, peer_id_of, public_key_of
from node.session.fatal import FatalPeerError
from node.session.private_run import PrivateMembership
from protocols.base import Deadline, Header, Host, Member, PeerError, PeerId
from protocols.streams.framing import opened
from tests.sim.account import Head as DecidedHead
from tests.sim.arguments import Parser, seeds
from tests.sim.host import SimClock
from tests.sim.process import prepare
from tests.sim.scenario_runner import ScenarioRunner, ScenarioSetup
from tests.sim.transport import SimTransport
from tests.sim.world import RUN
from tests.support.checkers import DECIDED, Report, Violation

JOINERS = 3
LATE = JOINERS + 1  # the number of the peer that joins after the removals
DISK_SECONDS = 0.02
PACE_SECONDS = 1.5  # of an inner step; a round has two
KNOCK_SECONDS = 1.0
SETTLED_SECONDS = 150.0
SLACK_SECONDS = 1.0
"""Between a removal, which ends the streams of a peer, and the roster without it: heartbeats have to miss it."""
MAX_SKEW_SECONDS = 600.0


@dataclass(slots=True)
class Plan:
    """What a seed draws."""

    crashes: bool
    partition: bool
    skew: dict[PeerId, float]  # seconds by which their clocks are off
    removed: int  # how many members are removed at once
    stubborn: set[PeerId]  # those that ignore their removal

    @staticmethod
    def draw(rng: random.Random, peers: tuple[PeerId, ...]) -> Plan:
        skews = {peer: rng.uniform(-MAX_SKEW_SECONDS, MAX_SKEW_SECONDS) for peer in peers}
        return Plan(
            crashes=rng.random() < 0.5,
            partition=rng.random() < 0.4,
            skew=skews if rng.random() < 0.4 else {},
            removed=rng.choice((1, 1, 2, 3)),
            stubborn={peer for peer in peers if rng.random() < 0.4},
        )


@dataclass(slots=True)
class Disk:
    """A peer's state directory, and the ticket that its user types again at each start until it is admitted."""

    identity: Identity
    path: Path
    ticket: Ticket | None = None
    manifest: Any = None

    async def run(self, work: Any, cost_bytes: int) -> Any:
        await asyncio.sleep(DISK_SECONDS)
        result = work()
        await asyncio.sleep(DISK_SECONDS)
        return result


def identity(seed: int, number: int) -> Identity:
    key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"private {seed} {number}".encode()).digest())
    return Identity(Path("identity.key"), peer_id_of(key.public_key().public_bytes_raw()), key)


class PrivateWorld(ScenarioRunner):
    """Peer 0 has founded the run; the last peer is a stranger."""

    def __init__(self, seed: int, directory: Path) -> None:
        super().__init__(ScenarioSetup(LATE + 2, founders=1, every_rounds=1, pace_seconds=PACE_SECONDS))
        identities = [identity(seed, number) for number in range(LATE + 2)]
        self.seed, self.chance = seed, random.Random(f"private/{seed}")
        self.peers = tuple(each.peer_id for each in identities)
        self.founder, self.stranger = self.peers[0], self.peers[-1]
        self.founders, self.roster = (self.founder,), (Member(self.founder),)
        self.histories = {peer: [] for peer in self.peers}
        self.plan = Plan.draw(self.chance, self.peers)
        config = SimpleNamespace(name="attic", admission="invited", inviters=None)
        self.manifest: Any = SimpleNamespace(
            run_id=RUN.hex(), founder=SimpleNamespace(peer=self.founder), config=config
        )
        self.state: dict[PeerId, Disk] = {}
        for each in identities:
            path = directory / each.peer_id[-8:]
            path.mkdir()
            self.state[each.peer_id] = Disk(each, path)
        self.private: dict[PeerId, PrivateMembership] = {}
        self.admitted: set[PeerId] = set()
        self.removed: dict[PeerId, PeerId] = {}  # a removed peer -> the peer that removed it
        self.inviter: dict[PeerId, PeerId] = {}
        self.tickets: dict[PeerId, Ticket] = {}
        self.found: list[Violation] = []
        self.knocks = 0
        self._knew: dict[tuple[Member, PeerId], float] = {}  # (incarnation, removed peer) -> since when it knew
        self._judged: set[str] = set()
        self._entered: set[Member] = set()

    # -- a peer -------------------------------------------------------------------------------------------------------

    async def _peer(self, index: int, transport: SimTransport) -> None:
        me, disk = transport.me, self.state[transport.me]
        private = self._private_membership(transport)
        try:
            private.prepare(None if disk.manifest else disk.ticket, disk.manifest, me == self.founder)
            if disk.ticket and not disk.manifest:
                await private.redeem(disk.ticket, transport, self._connect)
            private.enter(self.manifest)
        except FatalPeerError as error:
            if me not in self.out():
                self._violated("lost", me, str(error))
            return
        disk.manifest = self.manifest
        self.admitted.add(me)
        self._entered.add(transport.node.member)
        self._note(transport.node.member)
        await super()._peer(index, transport)

    def _private_membership(self, transport: SimTransport) -> PrivateMembership:
        me, disk = transport.me, self.state[transport.me]
        clock = SimClock(self.plan.skew.get(me, 0.0))
        disk_of_peer: Any = disk
        state: Any = SimpleNamespace(identity=disk.identity, path=disk.path)
        made = self.private[me] = PrivateMembership(state, disk_of_peer, clock, f"nick-{me[-4:]}", lambda line: None)
        exchange = made.exchange
        exchange.expel, exchange.served = transport.expel, transport.served
        exchange.on_barred = lambda revocation: self._on_barred(me)
        keep, member = exchange.keep, transport.node.member

        async def noted(encoded: bytes) -> None:
            self._note(member)
            await keep(encoded)

        exchange.keep = noted
        exchange.serve(transport)
        transport.restrict(exchange)
        return made

    def _on_barred(self, me: PeerId) -> None:
        """It leaves, unless it is one that ignores its removal."""
        if me not in self.plan.stubborn:
            asyncio.get_running_loop().call_soon(self._leave, me)

    def _leave(self, me: PeerId) -> None:
        if self.network.nodes[me].process.alive:
            self.kill(me)

    async def _connect(self, address: str, deadline: Deadline) -> PeerId:
        return address.rpartition("/p2p/")[2]

    def _host(self, transport: SimTransport) -> Host:
        me, private = transport.node.member, self.private[transport.me]
        host = replace(super()._host(transport), clock=SimClock(self.plan.skew.get(me.peer, 0.0)))
        members = self._membership(host, transport)
        private.contacts, private.offset_seconds = members.contacts, members.offset_seconds
        live = lambda: [each.peer for each in members.contacts() if each.live]  # noqa: E731
        self.spawn(me.peer, members.run())
        self.spawn(me.peer, private.exchange.spread(live))
        return replace(host, members=members, removed=private.exchange.has_removed)

    def _membership(self, host: Host, transport: SimTransport) -> Membership:
        me = transport.node.member

        def roster() -> tuple[Member, ...]:
            return self.head(me.peer).roster if me.peer in self.replicas else ()

        local = LocalPeer(
            me=me,
            run=RUN,
            nonce=self.chance.getrandbits(63),
            nickname=f"nick-{me.peer[-4:]}",
            addresses=lambda: (_address(self.peers.index(me.peer)),),
            round=lambda: self.head(me.peer).key.round if me.peer in self.replicas else 0,
        )
        wanted = lambda: [each.peer for each in roster() if each != me]  # noqa: E731
        made = Membership(transport, local, clock=host.clock, signer=host.signer, wanted=wanted, say=lambda line: None)
        for peer in self.peers:  # hints, as of the directory: also removed peers, and the stranger
            if peer != me.peer:
                made.add_candidate(peer)
        return made

    # -- what happens -------------------------------------------------------------------------------------------------

    async def script(self) -> None:
        rest = self.peers[1 : LATE + 1]
        self.spawn_stranger()
        await self._until_admitted(self.founder)
        for peer in rest[:JOINERS]:
            await self._invite(peer)
            await asyncio.sleep(self.chance.uniform(0.0, 3.0))
        for peer in rest[:JOINERS]:
            await self._until_admitted(peer)
        await self.until(self.whole, SETTLED_SECONDS, "the first roster of all")
        await asyncio.sleep(self.chance.uniform(0.0, 3.0))  # into a round
        await self._remove()
        await self._invite(rest[-1])
        await self._until_admitted(rest[-1])
        await self.until(self.whole, SETTLED_SECONDS, "a roster of all that are left")
        await self.rounds(2)

    def good(self) -> list[PeerId]:
        """The live peers that were admitted, and not removed, in the order of their numbers."""
        return [peer for peer in self.peers if peer in self.admitted - self.out() and self._lives(peer)]

    def out(self) -> set[PeerId]:
        """The removed peers, and those that came through them."""
        out = set(self.removed)
        while more := {peer for peer, by in self.inviter.items() if by in out} - out:
            out |= more
        return out

    def alive(self) -> list[PeerId]:
        return self.good()

    def _lives(self, peer: PeerId) -> bool:
        return peer in self.network.nodes and self.network.nodes[peer].process.alive

    async def _one_in(self) -> PeerId:
        """A peer that can carry out commands."""
        ready = lambda: [peer for peer in self.good() if self.network.nodes[peer].member in self._entered]  # noqa: E731
        await self.until(lambda: bool(ready()), SETTLED_SECONDS, "a peer that is back")
        return self.chance.choice(ready())

    async def _invite(self, peer: PeerId) -> None:
        """Let a peer make a ticket, and another one start with it. The maker may be killed before it has answered."""
        by = await self._one_in()
        answer = await self.spawn(by, self.private[by].invite(1, 3600.0, "", [_address(self.peers.index(by), by)]))
        self.tickets[peer] = self.state[peer].ticket = read_ticket(str(answer["ticket"]))
        self.inviter[peer] = by
        self.begin(peer)
        if self.plan.crashes and self.chance.random() < 0.5:
            await self._crash(self.chance.choice([by, by, peer]), self.chance.uniform(0.0, 0.5))

    async def _crash(self, peer: PeerId, after: float) -> None:
        await asyncio.sleep(after)
        if self._lives(peer):
            self.kill(peer)
            await asyncio.sleep(self.chance.uniform(0.2, 8.0))
            self.revive(peer)

    async def _until_admitted(self, peer: PeerId) -> None:
        await self.until(
            lambda: peer in self.admitted and peer in self.replicas, SETTLED_SECONDS, f"admission of {peer}"
        )

    async def _remove(self) -> None:
        """Remove members, perhaps while the run is divided, and perhaps with a kill of one that should learn of it."""
        subjects = self.chance.sample(self.peers[1 : JOINERS + 1], self.plan.removed)
        sides = self._divide() if self.plan.partition else ()
        if sides:
            await asyncio.sleep(self.chance.uniform(0.0, 10.0))
        removers = [self.founder] * len(subjects)
        if len(subjects) == 1 and self.chance.random() < 0.5:
            removers = [self.inviter[subjects[0]]]
        self.removed.update(zip(subjects, removers, strict=True))
        for subject, by in self.removed.items():
            await self.spawn(by, self.private[by].revoke(subject))
        if self.plan.crashes and (left := self.good()):
            await self._crash(self.chance.choice(left), self.chance.uniform(0.0, 3.0))
        if sides:
            await asyncio.sleep(self.chance.uniform(0.0, 30.0))
            self.heal(*sides)

    def _divide(self) -> tuple[list[PeerId], list[PeerId]]:
        mixed = self.chance.sample(self.peers, len(self.peers))
        at = self.chance.randint(1, len(mixed) - 1)
        self.cut(mixed[:at], mixed[at:])
        return mixed[:at], mixed[at:]

    def totals(self) -> Counter[str]:
        """What was played, for the summary."""
        plan = self.plan
        stubborn = len(self.out() & plan.stubborn)
        return Counter(
            crashes=plan.crashes, partitions=plan.partition, skewed=bool(plan.skew), stubborn=stubborn,
            removed=len(self.out()), without_quorum=2 * len(self.out()) > JOINERS, knocks=self.knocks,
            rounds=len(self._judged),
        )  # fmt: skip

    # -- the stranger -------------------------------------------------------------------------------------------------

    def spawn_stranger(self) -> None:
        transport = self.network.join(self.stranger)
        self.spawn(self.stranger, self._knock(transport))

    async def _knock(self, transport: SimTransport) -> None:
        """Try a method of a peer, and show it a pass that was seen, again and again."""
        while True:
            await asyncio.sleep(self.chance.uniform(0.1, KNOCK_SECONDS))
            peer = self.chance.choice(self.peers[:-1])
            if not self._lives(peer) or not (served := sorted(self.network.nodes[peer].handlers)):
                continue
            method, until = self.chance.choice(served), self.now + 5.0
            self.knocks += 1
            with contextlib.suppress(PeerError):
                end = await self.network.connect(transport.node, peer, method, until)
                if method != PASS_METHOD:
                    self._violated("stranger", peer, f"{method} answers a stranger")
                stream, request = await opened(peer, end, until), self._request(peer)
                await stream.send(request)
                if not isinstance(await stream.receive(1 << 16), PassRefused):
                    self._violated("stranger", peer, f"{type(request).__name__} of a stranger is accepted")
                end.close()

    def _request(self, peer: PeerId) -> Header:
        """Shows a pass that is another peer's, or asks for one with a ticket that another peer has used."""
        used = [each for other, each in self.tickets.items() if other in self.admitted and self.inviter[other] == peer]
        if used and self.chance.random() < 0.5:
            ticket = self.chance.choice(used)
            return Redeem(RUN, ticket.key, ticket.redeem(public_key_of(self.stranger)), "eve")
        shown = self.private[self.chance.choice([*self.private])].exchange.shown()
        return Present(RUN, shown.links, bytes(32))

    def _violated(self, invariant: str, peer: PeerId, detail: str) -> None:
        self.found.append(Violation(invariant, peer, 0, detail))

    # -- judging ------------------------------------------------------------------------------------------------------

    def entering(self, peer: PeerId, head: DecidedHead) -> None:
        super().entering(peer, head)
        for member in head.roster:
            if member.peer not in self.admitted:
                self._violated("uninvited", member.peer, f"in the roster of round {head.key.round}")

    def reported(self, report: Report) -> None:
        before = len(self.histories[report["peer"]])
        super().reported(report)
        if len(self.histories[report["peer"]]) > before and report["outcome"] in DECIDED:
            self._judge(report)

    def _judge(self, report: Report) -> None:
        """Whether a decided record that this peer reports first is free of peers whose removal was known before."""
        peer, lineage, out = report["peer"], report["lineage"], self.out()
        if lineage in self._judged or peer in out:
            return
        self._judged.add(lineage)
        since, head = self.now - report["seconds_average"], self.head(peer)
        if self.plan.crashes or self.plan.partition:
            since = self.account.attempts[report["parent"]].began
        counted = {other for other, (_, chunks, _) in report["contributions"].items() if chunks}
        roster = {each.peer for each in head.roster} if head.key.lineage.hex() == lineage else set()
        for gone in out:
            what = f"{len(counted)} counted, since {since:.3f} s"
            if gone in counted and all(self._knows(other, gone, since) for other in {peer, *counted} - out):
                self._violated("removed", gone, f"in the mean of round {report['round']}: {what}")
            if gone in roster and all(
                self._knows(other, gone, since - SLACK_SECONDS) for other in {peer, *roster} - out
            ):
                self._violated("removed", gone, f"in the roster after round {report['round']}: {what}")

    def _note(self, member: Member) -> None:
        """Note the removals that an incarnation knows."""
        revoked = self.private[member.peer].exchange.revoked
        for gone in self.out():
            subject = gone
            while subject not in self.removed:  # it came through one that was
                subject = self.inviter[subject]
            if revoked.has(public_key_of(subject), public_key_of(self.removed[subject])):
                self._knew.setdefault((member, gone), self.now)

    def _knows(self, peer: PeerId, gone: PeerId, since: float) -> bool:
        """Whether a peer's present incarnation knew of a removal at a time."""
        return self._knew.get((self.network.nodes[peer].member, gone), since + 1.0) <= since


def _address(number: int, peer: PeerId = "") -> str:
    return f"/ip4/10.0.0.{number + 1}/tcp/4001" + (f"/p2p/{peer}" if peer else "")


def play(seed: int) -> tuple[list[Violation], PrivateWorld]:
    with tempfile.TemporaryDirectory(prefix="starling-private-") as directory:
        world = PrivateWorld(seed, Path(directory))
        try:
            world.play(world.script)
        except Exception as error:  # noqa: BLE001 - any error must be reported with its seed
            print(f"replay: python -m tests.sim.private --seeds {seed}", file=sys.stderr)
            traceback.print_exc()
            return [*world.found, Violation("lost", "", 0, f"{type(error).__name__}: {error}")], world
        return world.found, world


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m tests.sim.private", description="Private runs under faults, from seeds.")
    parser.add_argument("--seeds", type=seeds, default=range(20), help="one seed, or a range like 0:300")
    options = parser.parse_args(arguments)
    began, found = time.monotonic(), list[tuple[int, Violation]]()
    totals: Counter[str] = Counter()
    for seed in options.seeds:
        violations, world = play(seed)
        found += [(seed, each) for each in violations]
        totals += world.totals()
    for seed, each in found[:20]:
        print(f"seed {seed}: {each}")
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"plays": len(options.seeds), "violations": len(found), **totals, "real_seconds": seconds}))
    return 1 if found else 0


if __name__ == "__main__":
    prepare()
    sys.exit(main())
