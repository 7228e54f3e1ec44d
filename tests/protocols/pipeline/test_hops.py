"""What a replica takes from the stage before, and who is blamed for what it does not take."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from node.tasks.paced_stage import SIZES
from protocols.base import BadPayload, Buffer, Member, PeerSilent, Settings, Stream, stage_scope
from protocols.pipeline.admission import StepAdmission
from protocols.pipeline.hops import HandedInput, HopReceiver, HopTicket
from protocols.pipeline.job import Payload
from protocols.pipeline.messages import HEADER_LIMIT, HOP_METHOD, TICKET_BYTES, HopInput, JobOutput, LeaseVoid
from protocols.pipeline.settings import PipelineSettings
from protocols.streams.endpoint import ProtocolEndpoint
from tests.sim.swarm import SimSwarm
from tests.support.simulated import simulated

RUN, DRIVER, SENDER, ME = bytes(32), Member("p0"), Member("p1"), Member("p2")
SETTINGS = PipelineSettings(RUN, 3, 4, SIZES)
X, BAD = bytes(SIZES.activation_bytes), b"\xff" * SIZES.activation_bytes


def check(data: Buffer, payload: Payload) -> None:
    if bytes(data) == BAD:
        raise BadPayload("an activation that is not finite")


class Neighbours(SimSwarm):
    """p1 hands inputs on to p2, whose lease for microbatch 7 of p0 has a ticket."""

    async def set_up(self) -> None:
        settings = Settings("fp32", (1,))
        p0, p1, p2 = (ProtocolEndpoint(self.join(peer), settings) for peer in ("p0", "p1", "p2"))
        self.sender, self.endpoint, self.driver = p1, p2, p0
        self.receiver = HopReceiver(p2, SETTINGS, 2, check, random.Random(1))
        self.lease = StepAdmission(4, lambda kind, lease: None).grant(DRIVER, 7, 0.0)
        self.taken: list[HandedInput | BadPayload] = []

    def hop(self, ticket: HopTicket) -> HopInput:
        return HopInput(RUN, stage_scope(2), SENDER, ME, DRIVER, 7, ticket.name)

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[Stream]:
        async with self.sender.open("p2", HOP_METHOD, self.now + 600.0) as stream:
            yield stream

    async def refused(self, hop: HopInput, x: bytes = X) -> str:
        """Why p1 is named for this hop; empty if it is refused without that."""
        with pytest.raises(PeerSilent):
            async with self.stream() as stream:
                await stream.send(hop, x)
                await stream.receive(HEADER_LIMIT)
        blamed, _, _ = self.endpoint.accounting.take()
        assert {each.peer for each in blamed} <= {"p1"}
        return "".join(each.why for each in blamed)


@simulated(Neighbours)
async def test_hop_is_taken_once_and_answered_with_its_gradient(swarm: Neighbours) -> None:
    with swarm.receiver.ticket(swarm.lease, swarm.taken.append) as ticket:
        async with swarm.stream() as stream:
            await stream.send(swarm.hop(ticket), X)
            await asyncio.sleep(1.0)
            (hop,) = swarm.taken
            assert isinstance(hop, HandedInput) and hop.x == X and hop.sender == SENDER
            assert "was used" in await swarm.refused(swarm.hop(ticket))
            hop.gradient.set_result(X)
            assert isinstance(await stream.receive(HEADER_LIMIT), JobOutput)


@simulated(Neighbours)
async def test_bad_hops_name_their_sender(swarm: Neighbours) -> None:
    """Each leaves the ticket valid: an honest sender may still use it."""
    with swarm.receiver.ticket(swarm.lease, swarm.taken.append) as ticket:
        good = swarm.hop(ticket)
        for bad, why in (
            (replace(good, ticket=b"x" * TICKET_BYTES), "without a ticket"),
            (replace(good, number=8), "without a ticket"),
            (replace(good, driver=ME), "without a ticket"),
            (replace(good, run=b"x" * 32), "another run"),
            (replace(good, scope=stage_scope(1)), "another run or stage"),
            (replace(good, sender=DRIVER), "in the name of p0"),
        ):
            assert why in await swarm.refused(bad)
        assert not swarm.taken
        assert "not finite" in await swarm.refused(good, BAD)
        assert isinstance(swarm.taken.pop(), BadPayload), "the driver is told"
        async with swarm.stream() as stream:
            await stream.send(good, X)
            await asyncio.sleep(1.0)
        assert isinstance(swarm.taken.pop(), HandedInput)


@simulated(Neighbours)
async def test_hop_after_its_lease_has_ended_blames_no_peer(swarm: Neighbours) -> None:
    with swarm.receiver.ticket(swarm.lease, swarm.taken.append) as ticket:
        pass
    assert not await swarm.refused(swarm.hop(ticket)) and not swarm.taken
    with swarm.receiver.ticket(swarm.lease, swarm.taken.append) as ticket:
        async with swarm.stream() as stream:
            await stream.send(swarm.hop(ticket), X)
            await asyncio.sleep(1.0)
            swarm.receiver.end(ticket)
            (hop,) = swarm.taken
            assert isinstance(hop, HandedInput)
            hop.gradient.set_result(None)
            assert isinstance(await stream.receive(HEADER_LIMIT), LeaseVoid), "the stream may be used again"
