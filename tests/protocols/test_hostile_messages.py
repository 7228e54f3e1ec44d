"""Messages that no honest code sends, to the real handlers in small swarms: refused, blamed on their sender alone, and
without effect on what the honest peers end with.

A change of one value in an encoded message is drawn. What a protocol refuses by a rule of its own is in a table.
"""

from __future__ import annotations

import asyncio
import functools
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.membership.hello import Heartbeat, Hello, Welcome
from protocols import wire
from protocols.base import Header, Member, PeerError, PeerId
from protocols.consensus.messages import Accept, Certificate, Propose
from protocols.moshpit.peer_tracker import PositionAnnouncement
from protocols.pairwise.shares import PushShare, ShareStatus
from protocols.pairwise.state_swap import ExchangeReply, ExchangeRequest, StateReceived
from protocols.sync.requests import Certificates, HeadAnnouncement, SnapshotIndexHeader
from protocols.wire import Availability, Chunk, Contribute, PartDone, Plan, Ready, Reduced
from tests.sim.network import SimNetwork
from tests.support.forgeries import Change, forging
from tests.support.hostile_worlds import WORLDS, Verdict, World
from tests.support.wire_examples import any_header, spoiled

DATA = (Contribute, Chunk, Reduced, PartDone)
SENT: dict[str, tuple[type[Header], ...]] = {
    "butterfly": (Ready, Plan, *DATA, Propose, Accept),
    "moshpit": (PositionAnnouncement, Plan, *DATA),
    "gossip": (ExchangeRequest, ExchangeReply, Chunk, StateReceived),
    "push_sum": (PushShare, Chunk, ShareStatus),
    "sync": (HeadAnnouncement, Certificates, Certificate, SnapshotIndexHeader, Availability, Reduced, PartDone),
    "membership": (Hello, Welcome, Heartbeat),
}
"""What a peer of each world sends until its round is decided."""
LIMIT_SECONDS = 30.0


def play_forging(world: World, kind: type[Header], change: Change) -> Verdict:
    """Play with a liar that changes each of its messages of a kind; what no liar may bring about has not happened."""

    def before(network: SimNetwork) -> None:
        network.transports[world.liar].disguise = forging(kind, change)

    return judged(world.play(before), world.liar)


def judged(verdict: Verdict, liar: PeerId) -> Verdict:
    assert set(verdict.blames) <= {liar}, "an honest peer was blamed"
    assert verdict.seconds < LIMIT_SECONDS
    assert all(bool(torch.isfinite(state).all()) for state in verdict.states)
    assert verdict.outcomes <= {"committed", "skipped", "superseded", "met", "removed"}
    return verdict


@pytest.mark.parametrize("name, kind", [(name, kind) for name, kinds in SENT.items() for kind in kinds])
@given(place=st.integers(0, 99), wrong=st.integers(0, 99))
@settings(max_examples=4)
def test_malformed_message_is_refused_and_blamed(name: str, kind: type[Header], place: int, wrong: int) -> None:
    """One value of it has another type, or is out of bounds; where rounds are decided together, they still are."""
    verdict = play_forging(WORLDS[name], kind, lambda header: spoiled(header, place, wrong))
    assert verdict.blames[WORLDS[name].liar]
    if name == "butterfly":
        assert verdict.outcomes == {"committed"} and torch.equal(*verdict.states)


UNDISTURBED = functools.cache(lambda name: WORLDS[name].play(lambda network: None))


def bound(header: Header, world: World, sender: PeerId) -> Header:
    """The header, as one of this run and round from its sender to the victim."""
    values = {"key": world.key, "run": world.key.run, "scope": world.key.scope, "to": Member(world.victim)}
    values |= dict.fromkeys(("sender", "member"), Member(sender))
    return replace(header, **{name: values[name] for name in wire.field_names(type(header)) & set(values)})


@pytest.mark.parametrize("name", WORLDS)
@given(
    said=st.lists(any_header, min_size=1, max_size=3),
    method=st.integers(0, 9),
    at=st.sampled_from((0.0, 0.05, 0.3, 1.2)),
    is_stranger=st.booleans(),
    is_bound=st.booleans(),
)
@settings(max_examples=25)
def test_any_header_on_any_stream_harms_no_round(
    name: str, said: list[Header], method: int, at: float, is_stranger: bool, is_bound: bool
) -> None:
    """A member or a stranger opens a stream in the middle of a round, and sends headers of any kinds."""
    world = WORLDS[name]
    sender = "zoe" if is_stranger else world.liar

    async def say(network: SimNetwork) -> None:
        transport = network.transports.get(sender) or network.join(sender)
        await asyncio.sleep(at)
        served = sorted(network.nodes[world.victim].handlers)
        with suppress(PeerError):
            until = asyncio.get_running_loop().time() + LIMIT_SECONDS
            async with transport.open(world.victim, served[method % len(served)], until) as stream:
                for each in said:
                    await stream.send(bound(each, world, sender) if is_bound else each)
                await stream.receive(wire.MAX_HEADER_BYTES)

    def before(network: SimNetwork) -> None:
        network.said = asyncio.get_running_loop().create_task(say(network))  # type: ignore[attr-defined]

    verdict = judged(world.play(before), sender)
    if is_stranger or name not in ("gossip", "push_sum"):  # pairs avoid a partner that lies
        assert all(map(torch.equal, verdict.states, UNDISTURBED(name).states))
        assert verdict.outcomes == UNDISTURBED(name).outcomes


# -- what a protocol refuses by a rule of its own ---------------------------------------------------------------------

