"""Where peers that share no anchor stand, and fetching the state of one of them.

There is no chain to hold a state against, and no two states are the same. So a peer vouches for those of its own that
it hands out, by its signature under run, round and root: a newcomer fetches what one donor has vouched for, and nobody
else's bytes can make that root. Which donor is decided by who fetches; it is nobody who claims to be far ahead of most.
"""

# ruff: noqa: RUF009 - a field's bound is its default

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch

from protocols import wire
from protocols.aio import task_group
from protocols.base import (
    BadPayload,
    Deadline,
    Head,
    Header,
    Host,
    Member,
    PeerError,
    PeerId,
    RoundKey,
    Settings,
    Stream,
)
from protocols.codecs.coding import finite_range
from protocols.control_channel import RoundAccounting
from protocols.gate import Gate
from protocols.sync.progress import SyncProgress
from protocols.sync.requests import MAX_KEPT, SYNC
from protocols.sync.snapshot import Snapshot, Snapshots
from protocols.sync.snapshot_download import SnapshotDownload, StateUnavailable
from protocols.sync.snapshot_server import SnapshotServer
from protocols.sync.sync_peers import SyncPeers
from protocols.sync.sync_server import SyncServer
from protocols.wire import blob, digest, flag, many, one, register, uint

ASK_SECONDS = 5.0
TIDY_SECONDS = 10.0
COMPLAIN_AFTER = 5
"""Attempts in vain, one after the other, of which the first few belong to a start."""
DONORS = 8
"""So many are tried, one after the other, before all are asked anew."""
Order: TypeAlias = Callable[[Sequence[PeerId]], Sequence[PeerId]]
_TAG = b"starling state 1\n"


@dataclass(frozen=True, slots=True)
class SignedStateRef:
    """A state that its peer hands out: its root, the round that it comes before, and the peer's word for that."""

    root: bytes = digest()
    round: int = uint(1 << 40)
    signature: bytes = blob(128)


@dataclass(frozen=True, slots=True)
class StateAdvert(Header):
    """Where its sender stands; answered with the same.

    Attributes:
        key: of the sender's next round.
        sender: in this life.
        states: that it hands out, the newest first.
        whole: whether it has a state; else it looks for one itself.
    """

    key: RoundKey = one(RoundKey)
    sender: Member = one(Member)
    states: tuple[SignedStateRef, ...] = many(one(SignedStateRef), MAX_KEPT)
    whole: bool = flag()


register(160, (StateAdvert,))


def sign_state_ref(key: RoundKey, round_number: int, root: bytes) -> bytes:
    """What is signed for a state before that round."""
    return _TAG + wire.body(replace(key, round=round_number, lineage=root))


class IndependentStateSync:
    """What one peer without a shared anchor asks others outside of rounds, and answers them.

    Attributes:
        accounting: who was named, and the bytes that crossed, since it was last taken.
        sync_progress: how far this peer is with fetching a state.
    """

    def __init__(
        self,
        host: Host,
        settings: Settings,
        snapshots: Snapshots,
        key: Callable[[], RoundKey],
        hints: Callable[[], Iterable[PeerId]],
        whole: Callable[[], bool] = lambda: True,
    ) -> None:
        """
        Args:
            snapshots: what we hand out, and where there is room for what we fetch.
            key: of our next round.
            hints: peers that may be in the run; any of them may lie.
            whole: whether we have a state that others may start from; a newcomer has yet to fetch its first.
        """
        self.accounting, self.sync_progress, self._whole = RoundAccounting(), SyncProgress(_now), whole
        self._host, self._me, self._snapshots, self._key = host, Member(host.me, settings.incarnation), snapshots, key
        self._elements = sum(settings.elements)
        self._contacts = SyncPeers(host.me, host.members, None, hints, _now)
        self._donor = SnapshotServer(snapshots, host.compute, Gate())
        self._server = SyncServer(host, self.accounting, self._donor, self._answer)
        self._say: Callable[[str], None] = lambda line: None
        self._fruitless = 0
        self._signed: dict[tuple[int, bytes], bytes] = {}
        self._downloaded_bytes = 0

    def complain_to(self, say: Callable[[str], None]) -> None:
        """Tell a person, in one line, if nobody has a state to hand out."""
        self._say = say

    async def run(self) -> None:
        """Let go what nobody takes any more, for ever."""
        while True:
            self._donor.tidy()
            await asyncio.sleep(TIDY_SECONDS)

    # -- where we stand -----------------------------------------------------------------------------------------------

    def _standing(self) -> StateAdvert:
        kept = [(each.round, each.lineage) for each in self._donor.kept()]
        self._signed = {each: self._signed.get(each) or self._sign(*each) for each in kept}
        states = tuple(SignedStateRef(root, number, signature) for (number, root), signature in self._signed.items())
        return StateAdvert(self._key(), self._me, states, self._whole())

    def _sign(self, round_number: int, root: bytes) -> bytes:
        return self._host.signer.sign(sign_state_ref(self._key(), round_number, root))

    async def _answer(self, stream: Stream, request: Header) -> None:
        self._judge(stream.peer, wire.expect(request, StateAdvert))
        await stream.send(self._standing())

    def _judge(self, peer: PeerId, standing: StateAdvert) -> StateAdvert:
        """What a peer says of itself.

        Raises:
            BadPayload: it is in another run, speaks for another peer, or vouches for a state with a wrong signature.
        """
        ours, theirs = self._key(), standing.key
        if (theirs.run, theirs.scope, theirs.fragment) != (ours.run, ours.scope, ours.fragment):
            raise BadPayload("a standing in another run")
        if standing.sender.peer != peer:
            raise BadPayload(f"a standing in the name of {standing.sender.peer}")
        for each in standing.states:
            if not self._host.signer.verify(peer, sign_state_ref(theirs, each.round, each.root), each.signature):
                raise BadPayload(f"a state before round {each.round + 1} without its signature")
        return standing

    # -- fetching a state ---------------------------------------------------------------------------------------------

    async def fetch(self, order: Order, deadline: Deadline) -> Snapshot:
        """Fetch the newest state of one donor, the first that brings it.

        Args:
            order: these donors, that with the newest state first, as they are to be tried.
            deadline: past it, it goes on only while it moves.

        Raises:
            Unavailable: nobody has one, or brings it.
            OSError: one is here, and cannot be read.
        """
        self.sync_progress.begin(0, 0)
        try:
            snapshot = await self._from_one(eligible(await self.ask(deadline)), order, deadline)
        except StateUnavailable as error:
            self._fruitless += 1
            if self._fruitless == COMPLAIN_AFTER:
                self._say(f"{error}: waiting for a peer that has one")
            raise
        finally:
            self.sync_progress.end()
        self._fruitless = 0
        return snapshot

    async def _from_one(self, donors: Mapping[PeerId, SignedStateRef], order: Order, deadline: Deadline) -> Snapshot:
        tried = 0
        due = order(sorted(donors, key=lambda donor: (-donors[donor].round, donor)))[:DONORS]
        for donor in due:
            if _now() >= deadline:
                break
            share = (deadline - _now()) / (len(due) - tried)  # one that brings nothing leaves time for the next
            tried += 1
            if snapshot := await self._brought(donor, donors[donor], _now() + share):
                return snapshot
        raise StateUnavailable(f"none of {tried} donors brought its state" if due else "nobody here has a state")

    async def _brought(self, donor: PeerId, state: SignedStateRef, deadline: Deadline) -> Snapshot | None:
        """That state, whole and finite; None, and the donor is named: it did not bring it."""
        key = replace(self._key(), round=state.round, lineage=state.root)
        head = Head(key, (), state.root, state.root)
        download = SnapshotDownload(
            self._host, self.accounting, self._snapshots, self.sync_progress, head, self._elements
        )
        try:
            snapshot = await download.run(lambda: [donor], deadline)
            await self._host.compute.run(partial(_refuse_non_finite, snapshot), 8 * self._elements)
        except StateUnavailable:
            self.accounting.name(donor, "did not bring its state")
        except ValueError:  # nobody would mix with it, and no sketch would show that it is far away
            self._contacts.distrust(donor)
            self.accounting.name(donor, "hands out a state that is not finite")
        else:
            return snapshot
        finally:
            self._downloaded_bytes += download.bytes_received
        return None

    async def ask(self, deadline: Deadline) -> Mapping[PeerId, StateAdvert]:
        """Where all are that answer; who lies is named, and not asked for a while."""
        deadline = min(deadline, _now() + ASK_SECONDS)
        found: dict[PeerId, StateAdvert] = {}

        async def one_of_them(peer: PeerId) -> None:
            try:
                async with (
                    self._host.transport.open(peer, SYNC, deadline) as stream,
                    self.accounting.counting(stream),
                ):
                    await stream.send(self._standing())
                    answer = wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), StateAdvert)
                    found[peer] = self._judge(peer, answer)
            except BadPayload:
                self._contacts.distrust(peer)
            except PeerError:
                pass

        async with task_group() as group:
            for peer in self._contacts.everybody():
                group.create_task(one_of_them(peer))
        return found

    def take_bytes(self) -> int:
        """Bytes of states fetched since the last call."""
        taken, self._downloaded_bytes = self._downloaded_bytes, 0
        return taken


def eligible(standings: Mapping[PeerId, StateAdvert]) -> dict[PeerId, SignedStateRef]:
    """Whose newest state may be fetched. Pure.

    Nobody's who says to be further than half of those who have a state: one that claims a round in a distant future
    would take whoever believes it out of the run's schedule.
    """
    newest = {peer: each.states[0] for peer, each in standings.items() if each.whole and each.states}
    if not newest:
        return {}
    rounds = sorted(state.round for state in newest.values())
    median = rounds[len(rounds) // 2] if len(rounds) % 2 else rounds[len(rounds) // 2 - 1]
    return {peer: state for peer, state in newest.items() if state.round <= median}


def _refuse_non_finite(snapshot: Snapshot) -> None:
    """
    Raises:
        ValueError: a number of it is NaN or infinite.
        OSError: it cannot be read.
    """
    for chunk in range(len(snapshot.index.digests)):
        finite_range(torch.frombuffer(snapshot.chunk(chunk), dtype=torch.float32))


def _now() -> float:
    return asyncio.get_running_loop().time()
