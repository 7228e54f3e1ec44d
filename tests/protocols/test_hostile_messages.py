"""Messages that no honest code sends, to the real handlers in small swarms: refused, blamed on their sender alone, and
without effect on what the honest peers end with.

A change of one value in an encoded message is drawn. What a protocol refuses by a rule of its own is in a table.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from node.membership.hello import Heartbeat, Hello, Welcome
from protocols import wire
from protocols.allreduce.plan import PlanInputs, make_plan, offer_message
from protocols.base import Header, Member, PeerError, PeerId
from protocols.blobs.serving import BlobIndex, Busy
from protocols.consensus import record as records
from protocols.consensus.messages import Accept, Certificate, Propose
from protocols.consensus.record import ClusterDigest, Kind
from protocols.moshpit.peer_tracker import PositionAnnouncement
from protocols.pairwise.push_sum import PushShare, ShareStatus
from protocols.pairwise.state_swap import ExchangeReply, ExchangeRequest, StateReceived
from protocols.sync.requests import Certificates, HeadAnnouncement
from protocols.wire import Availability, Chunk, Contribute, PartDone, Plan, Ready, Reduced
from tests.sim.averaging import flat
from tests.sim.host import SimSigner
from tests.sim.network import SimNetwork
from tests.support.disguises import Disguise, lying
from tests.support.pairwise import PairwiseSwarm
from tests.support.swarms_with_liar import FOREIGN, SWARMS, Change, PlayResult, SwarmWithLiar, forging, more
from tests.support.wire_examples import any_header, spoiled

DATA = (Contribute, Chunk, Reduced, PartDone)
SENT: dict[str, tuple[type[Header], ...]] = {
    "butterfly": (Ready, Plan, *DATA, Propose, Accept),
    "moshpit": (PositionAnnouncement, Plan, *DATA),
    "gossip": (ExchangeRequest, ExchangeReply, Chunk, StateReceived),
    "push_sum": (PushShare, Chunk, ShareStatus),
    "sync": (HeadAnnouncement, Certificates, Certificate, BlobIndex, Chunk),
    "membership": (Hello, Welcome, Heartbeat),
}
"""What a peer of each world sends until its round is decided."""
LIMIT_SECONDS = 30.0


def play_forging(world: SwarmWithLiar, kind: type[Header], change: Change) -> PlayResult:
    """Play with a liar that changes each of its messages of a kind; what no liar may bring about has not happened."""

    return judged(world.play(lambda network: wear(network, world, forging(kind, change))), world.liar)


def wear(network: SimNetwork, world: SwarmWithLiar, disguise: Disguise) -> None:
    network.transports[world.liar].disguise = disguise


def judged(result: PlayResult, liar: PeerId) -> PlayResult:
    assert set(result.blames) <= {liar}, "an honest peer was blamed"
    assert result.seconds < LIMIT_SECONDS
    assert all(bool(torch.isfinite(state).all()) for state in result.states)
    assert result.outcomes <= {"committed", "skipped", "superseded", "met", "removed"}
    return result


@pytest.mark.parametrize("name, kind", [(name, kind) for name, kinds in SENT.items() for kind in kinds])
@given(place=st.integers(0, 99), wrong=st.integers(0, 99))
@settings(max_examples=2)
def test_malformed_message_is_refused_and_blamed(name: str, kind: type[Header], place: int, wrong: int) -> None:
    """One value of it has another type, or is out of bounds; where rounds are decided together, they still are."""
    result = play_forging(SWARMS[name], kind, lambda header: spoiled(header, place, wrong))
    assert result.blames[SWARMS[name].liar]
    if name == "butterfly":
        assert result.outcomes == {"committed"} and torch.equal(*result.states)


UNDISTURBED = functools.cache(lambda name: SWARMS[name].play(lambda network: None))


def bound(header: Any, world: SwarmWithLiar, sender: PeerId) -> Header:
    """The header, as one of this run and round from its sender to the victim."""
    values = {"key": world.key, "run": world.key.run, "scope": world.key.scope, "to": Member(world.victim)}
    values |= dict.fromkeys(("sender", "member"), Member(sender))
    made: Header = replace(header, **{name: values[name] for name in wire.described(type(header)).keys() & set(values)})
    return made


@pytest.mark.parametrize("name", SWARMS)
@given(
    said=st.lists(any_header, min_size=1, max_size=3),
    method=st.integers(0, 9),
    at=st.sampled_from((0.0, 0.05, 0.3, 1.2)),
    is_outside=st.booleans(),
    is_bound=st.booleans(),
)
@settings(max_examples=6, phases=[Phase.generate])
def test_any_header_on_any_stream_harms_no_round(
    name: str, said: list[Header], method: int, at: float, is_outside: bool, is_bound: bool
) -> None:
    """A member, or a peer outside the round, opens a stream in its middle, and sends headers of any kinds."""
    world = SWARMS[name]
    sender = "zoe" if is_outside else world.liar

    async def say(network: SimNetwork) -> None:
        transport = network.transports.get(sender) or network.join(sender)
        await asyncio.sleep(at)
        served = sorted(network.nodes[world.victim].handlers)
        until = asyncio.get_running_loop().time() + LIMIT_SECONDS
        with suppress(PeerError):
            async with transport.open(world.victim, served[method % len(served)], until) as stream:
                for each in said:
                    await stream.send(bound(each, world, sender) if is_bound else each)
                while True:
                    await stream.receive(wire.MAX_HEADER_BYTES)

    def before(network: SimNetwork) -> None:
        network.said = asyncio.get_running_loop().create_task(say(network))  # type: ignore[attr-defined]

    result = judged(world.play(before), sender)
    if is_outside or name not in ("gossip", "push_sum"):  # pairs avoid a partner that lies
        assert all(map(torch.equal, result.states, UNDISTURBED(name).states))
        assert result.outcomes == UNDISTURBED(name).outcomes


# -- what a protocol refuses by a rule of its own ---------------------------------------------------------------------


def anything(header: Header) -> Header:
    """A kind that opens no exchange and is no control message."""
    return Availability(True)


def unsigned(offers: list[list[Any]]) -> list[list[Any]]:
    """Encoded offers with wrong signatures."""
    return [[*offer[:-1], b"forged"] for offer in offers]


def forged_first(plan: Plan) -> Plan:
    """The offer of the first other member has a wrong signature."""
    return replace(plan, offers=(replace(plan.offers[0], signature=b"forged"), *plan.offers[1:]))


def many_times(plan: Plan) -> Plan:
    """The caller is in it under many incarnations, all signed by it, and so sets the median."""
    (mine,) = [offer for offer in plan.offers if offer.member.peer == "p02"]
    again = [replace(mine, member=Member("p02", incarnation), tokens=1) for incarnation in range(1, 6)]
    signer = SimSigner("p02", 1)
    offers = [replace(offer, signature=signer.sign(offer_message(plan.key, offer))) for offer in again]
    return make_plan(PlanInputs(plan.key, plan.bounds[-1], 4.0), [*plan.offers, *offers], 0.0)


def without_receivers(plan: Plan) -> Plan:
    return replace(plan, offers=plan.offers[-1:], bounds=plan.bounds[:1] + plan.bounds[-1:], reducers=(0,))


def garbage(header: Header) -> bytes:
    return b"\xc1" * 16


def recorded(**changes: Any) -> Callable[[Propose], Propose]:
    """The proposal of a record with other values, or functions of the honest ones."""

    def change(proposal: Propose) -> Propose:
        record = records.decode(proposal.record)
        values = {name: new(getattr(record, name)) if callable(new) else new for name, new in changes.items()}
        return replace(proposal, record=records.encode(replace(record, **values)))

    return change


SAME_REDUCER = {"reducers": [2, 2, 2]}
REFUSED: tuple[tuple[str, type[Header], Change, str], ...] = (
    ("butterfly", Ready, anything, "Availability on a control stream"),
    ("butterfly", Ready, {"key.run": FOREIGN}, "another run or scope"),
    ("butterfly", Plan, {"offers.0.leaving": True}, "forged offer"),
    ("butterfly", Propose, recorded(roster=lambda each: each[:1]), "that do not leave"),
    ("butterfly", Propose, recorded(state_root=FOREIGN), "of another state"),
    ("butterfly", Propose, recorded(parts=(), bounds=(), peers=()), "not of the whole vector"),
    ("butterfly", Propose, recorded(peers=()), "not of the whole vector"),
    ("butterfly", Propose, recorded(clusters=(ClusterDigest(bytes(32), 32),) * 3), "a mean of clusters"),
    ("butterfly", Propose, recorded(kind=Kind.SKIP, bounds=()), "not of the whole vector"),
    ("butterfly", Propose, recorded(bounds=lambda each: (*each[:-1], each[-1] + 1)), "not of the whole vector"),
    ("butterfly", Propose, recorded(bounds=lambda each: (each[0], *each)), "not of the whole vector"),
    ("butterfly", Propose, recorded(bounds=lambda each: (each[0], each[1] + 1, *each[2:])), "at another place"),
    ("butterfly", Propose, {"sender.incarnation": more}, "or of another incarnation"),
    ("butterfly", Accept, {"sender.incarnation": more}, "or of another incarnation"),
    ("butterfly", Accept, {"sender.peer": "p01"}, "a vote in the name of"),
    ("butterfly", Accept, {"signature": bytes(32)}, "a forged vote"),
    ("butterfly", Contribute, {"codec": "fp64"}, "codec"),
    ("butterfly", Contribute, {"key.lineage": FOREIGN}, ""),
    ("moshpit", PositionAnnouncement, {"run": FOREIGN}, "another run or scope"),
    ("moshpit", PositionAnnouncement, {"scope": "other"}, "another run or scope"),
    ("moshpit", PositionAnnouncement, {"sender.peer": "p01"}, "says where p01 is"),
    ("moshpit", PositionAnnouncement, {"index": [31]}, "stands at"),
    ("moshpit", PositionAnnouncement, {"offer": unsigned}, "forged signature"),
    ("moshpit", PositionAnnouncement, anything, "on a control stream"),
    ("moshpit", Plan, {"offers": unsigned}, "our own offer"),
    ("moshpit", Plan, forged_first, "a forged offer of p00"),
    ("moshpit", Plan, without_receivers, "our own offer"),
    ("moshpit", Plan, many_times, "p02 is in it twice"),
    ("moshpit", Plan, SAME_REDUCER, "parts are not those"),
    ("moshpit", Plan, SAME_REDUCER | {"ballot": 1}, "a second plan"),
    ("moshpit", Plan, SAME_REDUCER | {"version": 1}, "a second plan"),
    ("moshpit", Contribute, {"key.run": FOREIGN}, "another run"),
    ("moshpit", Contribute, {"key.lineage": FOREIGN}, ""),
    ("moshpit", Contribute, {"codec": "bf16"}, "codec"),
    ("gossip", ExchangeRequest, {"sender.peer": "p7"}, "in the name of p7"),
    ("gossip", ExchangeRequest, {"key.run": FOREIGN}, "another run"),
    ("gossip", ExchangeRequest, {"elements": more}, "elements; the run's have"),
    ("gossip", ExchangeRequest, {"codec": "fp16"}, "codec"),
    ("gossip", ExchangeReply, {"sequence": more}, "refused"),
    ("gossip", ExchangeReply, {"sender.peer": "p7"}, "refused"),
    ("gossip", StateReceived, {"key.round": 9}, "refused"),
    ("gossip", StateReceived, anything, "refused"),
    ("push_sum", PushShare, {"weight": 1e6}, "a share of weight 1e"),
    ("push_sum", PushShare, {"sender.peer": "p7"}, "in the name of p7"),
    ("push_sum", PushShare, {"elements": more}, "elements"),
    ("push_sum", PushShare, {"codec": "fp16"}, "codec"),
    ("push_sum", PushShare, {"key.run": FOREIGN}, "another run"),
    ("sync", Certificate, {"votes.0.signature": b"x" * 32}, "a forged vote"),
    ("sync", Certificate, {"votes": lambda votes: votes[:1]}, "too few"),
    ("sync", Certificate, {"votes": lambda votes: [*votes, [["zeno", 0], b""]]}, "has no vote"),
    ("sync", Certificate, {"record": lambda record: record + b"\0"}, "may not extend"),
    ("sync", Certificate, garbage, "not"),
    ("sync", Certificates, {"ancestor": FOREIGN}, "follow none of the lineages"),
    ("sync", Certificates, lambda each: Busy(1.0), "expected Certificates"),
    ("sync", HeadAnnouncement, {"key.lineage": FOREIGN, "key.round": 1 << 39}, "does not prove the head"),
    ("sync", HeadAnnouncement, {"key.run": FOREIGN}, "another run"),
    ("sync", HeadAnnouncement, {"sender.peer": "bert"}, "in the name of"),
    ("sync", BlobIndex, {"chunks": 1 << 31}, "chunks where 2 are due"),
    ("sync", BlobIndex, lambda each: Certificates(bytes(32), 0, False), "expected BlobIndex"),
    ("membership", Hello, {"version": 1}, ""),
    ("membership", Hello, {"run": FOREIGN}, "another run"),
    ("membership", Hello, {"member.peer": "p7"}, "in the name of p7"),
    ("membership", Hello, {"signature": FOREIGN}, "without a signature of its own"),
    ("membership", Heartbeat, {"number": more}, "not sent"),
    ("membership", Heartbeat, {"placement": [[False, 1, 0, 0, False, []]]}, "in a run without them"),
)  # fmt: skip


@pytest.mark.parametrize("name, kind, change, why", REFUSED)
def test_forged_message_is_refused_for_its_reason(name: str, kind: type[Header], change: Change, why: str) -> None:
    """Where others average, they do so without the liar; where two do, what was asked for wrongly is not given."""
    result = play_forging(SWARMS[name], kind, change)
    blames = result.blames.get(SWARMS[name].liar, [])
    assert sum(why in each for each in blames) >= (2 if name == "butterfly" else 1), blames
    if name in ("butterfly", "moshpit"):
        assert result.outcomes == {"committed"} and result.seconds <= UNDISTURBED(name).seconds + 6.0
    if kind in (ExchangeRequest, PushShare):
        asked = result.states[: 1 if kind is ExchangeRequest else 2]
        assert all(torch.equal(state, flat(PairwiseSwarm(2).states[0])) for state in asked)


@pytest.mark.parametrize("lie", ("nan", "norm", "size", "endless-header", "garbage", "twice"))
@pytest.mark.parametrize("name", ("moshpit", "gossip", "push_sum"))
def test_sender_of_false_chunks_is_blamed(name: str, lie: str) -> None:
    """Neither of two averages, and in a group the others do without it."""
    world = SWARMS[name]
    result = judged(world.play(lambda network: wear(network, world, lying(lie))), world.liar)
    assert result.blames[world.liar][0].startswith("refused")
    assert result.outcomes == ({"committed"} if name == "moshpit" else {"skipped"})
