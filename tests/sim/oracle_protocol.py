"""A simple voting protocol with a shared oracle, with which the simulator and its checks are tested.

A ledger that all peers share decides each round at the request of a peer that is in touch with a majority of its
roster, so only a bug that a test plants can cause a violation. Tests plant bugs by overriding methods of
`OracleProtocol`. The messages are real: in every round each peer asks each other member for a byte.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import Any

from protocols.base import Member, PeerError, PeerId, RoundKey, Stream
from protocols.consensus.vote_tally import majority
from tests.sim.scenario import Scenario
from tests.sim.transport import SimTransport
from tests.sim.world import RUN, World

ASK = "standin/ask/1"
ASK_SECONDS = 3.0
CHUNKS = 2


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a peer, with what the world reads of a real one."""

    key: RoundKey
    roster: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Child:
    parent: Head
    head: Head
    contributions: dict[PeerId, tuple[str, int, int]]


@dataclass
class Ledger:
    """The decided rounds: at most one child of each lineage."""

    children: dict[bytes, Child] = field(default_factory=dict)

    def decide(self, parent: Head, present: list[Member]) -> Child:
        """The child of this lineage; the first peer that asks decides it, with the members in its reach as roster."""
        if parent.key.lineage not in self.children:
            self.children[parent.key.lineage] = self.child(parent, present)
        return self.children[parent.key.lineage]

    def child(self, parent: Head, present: list[Member]) -> Child:
        anchor, key = parent.key.lineage.hex(), parent.key
        lineage = hashlib.sha256(key.lineage + repr(present).encode()).digest()
        whole = {each.peer: (anchor, CHUNKS, CHUNKS) for each in present if each in parent.roster}
        head = Head(RoundKey(RUN, "run", lineage, key.round + 1), tuple(present))
        return Child(parent, head, whole)


class OracleProtocol(World):
    """A world in which peers decide rounds by the shared ledger; `_peer` replaces the real outer loop."""

    FORKS = False

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.accounting = Ledger()
        self.heads: dict[PeerId, Head] = {}

    async def _peer(self, index: int, transport: SimTransport) -> None:
        assert self.scenario.step_seconds
        host, me = self._host(transport), transport.node.member
        transport.serve(ASK, self._answer)
        head = Head(RoundKey(RUN, "run", bytes(32), 0), self.roster)
        while self.goes_on(me.peer):
            self.heads[me.peer] = head
            self.entering(me.peer, head)
            await asyncio.sleep(self.scenario.inner_steps * self.scenario.step_seconds[index])
            present = await self.present(transport, host.members.live())
            ahead = max((self.heads[each.peer] for each in present), key=lambda other: other.key.round)
            if ahead.key.round > head.key.round + 1 or (ahead.key.round > head.key.round and me not in head.roster):
                following, report = ahead, self.report(me, head, ahead, "superseded")
            elif ahead.key.round > head.key.round or (me in head.roster and self.enough(head, present)):
                child = self.accounting.decide(head, present)
                following, report = child.head, self.committed(me, child)
            else:
                following, report = head, self.report(me, head, head, "undecided")
            head = following
            self.reported(report)

    def enough(self, head: Head, present: list[Member]) -> bool:
        return len([member for member in present if member in head.roster]) >= majority(len(head.roster))

    async def present(self, transport: SimTransport, live: tuple[Member, ...]) -> list[Member]:
        async with asyncio.TaskGroup() as group:
            asked = [(member, group.create_task(self.ask(transport, member.peer))) for member in live]
        return [member for member, task in asked if task.result()]

    async def ask(self, transport: SimTransport, peer: PeerId) -> bool:
        if peer == transport.me:
            return True
        try:
            deadline = asyncio.get_running_loop().time() + ASK_SECONDS
            async with transport.open(peer, ASK, deadline) as stream:
                await stream.receive_into(memoryview(bytearray(1)))
        except PeerError:
            return False
        return True

    async def _answer(self, peer: PeerId, stream: Stream) -> None:
        await stream._pipe.write(b"!")  # type: ignore[attr-defined]

    def committed(self, me: Member, child: Child) -> dict[str, Any]:
        weight = 1.0 if me.peer in child.contributions else 0.0
        changes = {"contributions": dict(child.contributions), "peers": tuple(child.contributions), "weight": weight}
        return {**self.report(me, child.parent, child.head, "committed"), **changes}

    def report(self, me: Member, before: Head, after: Head, outcome: str) -> dict[str, Any]:
        return {
            "peer": me.peer,
            "incarnation": me.incarnation,
            "round": before.key.round,
            "parent": before.key.lineage.hex(),
            "lineage": after.key.lineage.hex(),
            "outcome": outcome,
            "peers": (),
            "contributions": {},
            "blamed": {},
            "finite": True,
            "weight": 0.0,
            "params_hash": f"params of {after.key.lineage.hex()}",
        }
