"""Which streams and messages a protocol's endpoint admits, and how a stream waits for its session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from protocols import wire
from protocols.base import (
    BadPayload,
    Header,
    Member,
    PeerError,
    PeerId,
    PeerSilent,
    RoundKey,
    Settings,
    StaticMembers,
    Stream,
)
from protocols.pairwise.push_sum import RecallShare
from protocols.streams.endpoint import FIRST_FRAME_SECONDS, ProtocolEndpoint, SessionTable
from tests.sim.swarm import SimSwarm
from tests.support.simulated import on_virtual_time, simulated

DATA, CONTROL = "endpoint/data", "endpoint/control"
KEY = RoundKey(bytes(range(32)), "run", bytes(32), 5)
RECALL = RecallShare(KEY, Member("p1"), 1, Member("p0"))
LIVE = (Member("p0"), Member("p1"))


class Pair(SimSwarm):
    """Two peers: p0 has an endpoint, and p1 writes streams by hand.

    Attributes:
        heard: what reached a handler of p0.
    """

    def __init__(self, sender: PeerId = "p1", bound: bool = True) -> None:
        super().__init__(latency_seconds=0.001)
        host = replace(self.join("p0"), members=StaticMembers(LIVE))
        self.transport = self.network.join(sender)
        self.endpoint = ProtocolEndpoint(host, Settings("fp32", (8,)), is_acquainted=self._is_acquainted)
        self.heard: list[Header] = []
        self.endpoint.serve(DATA, RecallShare, self._serve)
        self.endpoint.listen(CONTROL, [wire.AdmissionRequest], self._take)
        if bound:
            self.endpoint.bind(KEY)

    async def _is_acquainted(self, stream: Stream, header: Header) -> bool:
        return stream.peer == "friend"

    async def _serve(self, stream: Stream, header: RecallShare) -> None:
        self.heard.append(header)

    def _take(self, peer: PeerId, message: wire.AdmissionRequest) -> None:
        if message.member.peer != peer:
            raise BadPayload("for another peer")
        self.heard.append(message)

    def send(self, method: str, *messages: Header, seconds: float = 60.0) -> str:
        """Send these on one stream; returns for what the endpoint blamed the sender, if it did."""

        async def main() -> None:
            with suppress(PeerError):
                async with self.transport.open("p0", method, self.now + seconds) as stream:
                    for message in messages:
                        await stream.send(message)
                    await asyncio.sleep(0.1)
                    if not messages:
                        await stream.receive(64)
            await asyncio.sleep(0.1)

        self.play(main)
        faults, _, received = self.endpoint.accounting.take()
        assert received or not messages
        return " ".join(f"{fault.peer} {fault.why}" for fault in faults)


@pytest.mark.parametrize(
    "frame, why",
    (
        (wire.Availability(True), "Availability opens no exchange"),
        (replace(RECALL, key=replace(KEY, run=bytes(32))), "another run or scope"),
        (replace(RECALL, key=replace(KEY, scope="stage/1")), "another run or scope"),
        (replace(RECALL, sender=Member("p0")), "in the name of p0"),
        (replace(RECALL, to=Member("p1")), "for p1"),
        (replace(RECALL, sender=Member("p1", 1)), ""),  # another incarnation is refused without blame
        (replace(RECALL, to=Member("p0", 1)), ""),
    ),
    ids=("kind", "run", "scope", "sender", "receiver", "sender's incarnation", "receiver's incarnation"),
)
def test_only_honest_first_frame_reaches_its_handler(frame: Header, why: str) -> None:
    pair = Pair()
    blame = pair.send(DATA, frame)
    assert why in blame and bool(why) == bool(blame) and pair.heard == []
    pair = Pair()
    assert pair.send(DATA, RECALL) == "" and pair.heard == [RECALL]


@pytest.mark.parametrize("sender, admitted", (("p1", True), ("friend", True), ("zoe", False)))
def test_only_members_and_acquaintances_are_heard(sender: PeerId, admitted: bool) -> None:
    pair, message = Pair(sender), wire.AdmissionRequest(KEY, Member(sender), bytes(32))
    assert pair.send(CONTROL, message) == "" and (pair.heard == [message]) == admitted


def test_any_run_is_admitted_before_first_round() -> None:
    pair, frame = Pair(bound=False), replace(RECALL, key=replace(KEY, run=bytes(32)))
    assert pair.send(DATA, frame) == "" and pair.heard == [frame]


@simulated(Pair)
async def test_silent_stream_is_reset(pair: Pair) -> None:
    with pytest.raises(PeerSilent):
        async with pair.transport.open("p0", DATA, 1000.0) as stream:
            await stream.receive(64)
    assert FIRST_FRAME_SECONDS <= pair.now < FIRST_FRAME_SECONDS + 1


@pytest.mark.parametrize(
    "false",
    (
        wire.AdmissionRequest(KEY, Member("p7"), bytes(32)),
        wire.AdmissionRequest(replace(KEY, run=bytes(32)), Member("p1"), bytes(32)),
        wire.Availability(True),
    ),
)
def test_false_control_message_leaves_stream_open(false: Header) -> None:
    pair, message = Pair(), wire.AdmissionRequest(KEY, Member("p1"), bytes(32))
    assert pair.send(CONTROL, false, message).startswith("p1 refused") and pair.heard == [message]


@simulated(Pair)
async def test_opened_stream_is_counted(pair: Pair) -> None:
    async with pair.endpoint.open("p0", DATA, 10.0) as stream:
        await stream.send(RECALL)
    assert pair.endpoint.accounting.take()[1] > 0


# -- sessions ---------------------------------------------------------------------------------------------------------


class Waiting:
    """What a session table needs of a stream that waits for a session."""

    peer, deadline = "p1", 10.0


WAITING: Any = Waiting()


async def _open(table: SessionTable[str, int]) -> None:
    table.open("other", 1)
    await asyncio.sleep(3.0)
    table.open("mine", 2)


async def _give_up(table: SessionTable[str, int]) -> None:
    await asyncio.sleep(3.0)
    table.open("over", 0)


@pytest.mark.parametrize("events, found, seconds", ((_open, 2, 3.0), (_give_up, None, 3.0)))
@on_virtual_time
async def test_stream_waits_until_session_begins_or_cannot(
    events: Callable[[SessionTable[str, int]], Awaitable[None]], found: int | None, seconds: float
) -> None:
    table, loop = SessionTable[str, int](), asyncio.get_running_loop()
    job = asyncio.ensure_future(events(table))
    over = lambda: table.get("over") is not None  # noqa: E731
    assert await table.wait_for("mine", WAITING, over) == found
    assert loop.time() == seconds
    await job


@pytest.mark.parametrize("until, seconds", ((None, 10.0), (4.0, 4.0), (20.0, 10.0)))
@on_virtual_time
async def test_session_not_begun_in_time_is_silence(until: float | None, seconds: float) -> None:
    table, loop = SessionTable[str, int](), asyncio.get_running_loop()
    with pytest.raises(PeerSilent, match="did not begin here"):
        await table.wait_for("mine", WAITING, lambda: False, until)
    assert loop.time() == seconds


def test_closed_session_serves_no_stream() -> None:
    table = SessionTable[str, int]()
    for number, key in enumerate("abc"):
        table.open(key, number)
    table.close(["b", "missing"])
    assert table.keys() == ("a", "c") and table.values() == (0, 2) and table.get("b") is None
