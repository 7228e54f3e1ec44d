"""Proofs of a head, of any length: verified once, continued by another peer, and cut off without progress."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from protocols.base import Buffer, Header, Member, PeerFault, RoundKey
from protocols.consensus.messages import Certificate
from protocols.history.chain import Chain, DecidedRound
from protocols.history.fork_choice import Branch, ForkChoice
from protocols.history.round_log import RoundLog
from protocols.streams.framing import FramedStream
from protocols.sync import head_verifier as proofs
from protocols.sync.head_verifier import ROUND_SECONDS, TRAIL_SECONDS
from protocols.sync.requests import Certificates, HeadAnnouncement
from tests.support.disguises import instead, late
from tests.support.fake_rounds import RUN, line
from tests.support.simulated import simulated
from tests.support.sync_cluster import SyncCluster, SyncPeer
from tests.support.waiting import now

ANNA = Member("anna")
ROUNDS = 900


@cache
def trail(rounds: int = ROUNDS) -> list[DecidedRound]:
    return line(Chain(RUN, "run", (ANNA,)).head, rounds)


class LongChains(SyncCluster):
    """Peers that are `rounds` ahead, in a run that anna decided alone, and a newcomer, zoe.

    Args:
        rounds: of each peer, anna among them.
    """

    def __init__(self, rounds: dict[str, int]) -> None:
        super().__init__(("anna",))
        self._rounds = rounds

    @property
    def zoe(self) -> SyncPeer:
        return self.peers["zoe"]

    async def set_up(self) -> None:
        await super().set_up()
        for name in self._rounds.keys() - {"anna"}:
            await self.add(name)
        self.hints[:] = self._rounds
        for name, count in self._rounds.items():
            chain = self.peers[name].chain
            chain.switch(chain.head.key.lineage, trail()[:count])
        await self.add("zoe")

    async def better(self) -> Branch | None:
        """The better branch that zoe finds in half a minute."""
        return await self.zoe.sync.better(now() + 30.0)

    def blamed(self) -> list[PeerFault]:
        return list(self.zoe.sync.accounting.take()[0])


def counted_certificates(peer: SyncPeer) -> list[Certificate]:
    """The certificates that a peer sends, from now on."""
    sent: list[Certificate] = []

    async def count(stream: FramedStream, header: Header, payload: Buffer) -> None:
        if isinstance(header, Certificate):
            sent.append(header)
        await stream.send(header, payload)

    peer.disguise(count)
    return sent


def verified_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many certificates the peer verifies at a time."""
    counts: list[int] = []
    verify = ForkChoice.verify

    def counting(self: ForkChoice, head: Any, some: Any) -> Any:
        counts.append(len(some))
        return verify(self, head, some)

    monkeypatch.setattr(ForkChoice, "verify", counting)
    return counts


def leads_to(branch: Branch | None, round_number: int) -> bool:
    return branch is not None and branch.head == trail()[round_number - 1].head and len(branch.links) == round_number


@simulated(LongChains, {"anna": ROUNDS})
async def test_long_chain_is_verified_in_pieces(world: LongChains, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = verified_counts(monkeypatch)
    branch = await world.better()
    assert leads_to(branch, ROUNDS) and branch is not None and isinstance(branch.links, RoundLog)
    assert sum(counts) == ROUNDS and max(counts) == proofs.VERIFY_AT_ONCE
    copy = world.zoe.chain.copy()
    copy.switch(branch.ancestor.key.lineage, branch.links)
    world.zoe.chain.switch(branch.ancestor.key.lineage, branch.links)
    assert world.zoe.chain.head == copy.head == world.peers["anna"].chain.head
    assert await world.better() is None and sum(counts) == ROUNDS


@simulated(LongChains, {"anna": ROUNDS - 5})
async def test_verified_certificates_are_not_verified_again(world: LongChains, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = verified_counts(monkeypatch)
    sent = counted_certificates(world.peers["anna"])
    assert leads_to(await world.better(), ROUNDS - 5)
    chain = world.peers["anna"].chain
    chain.switch(chain.head.key.lineage, trail()[ROUNDS - 5 :])
    assert leads_to(await world.better(), ROUNDS)
    assert sum(counts) == len(sent) == ROUNDS


@simulated(LongChains, {"anna": ROUNDS, "bert": ROUNDS - 1, "cleo": ROUNDS - 2, "dora": ROUNDS - 2})
async def test_heads_on_one_branch_are_verified_together(world: LongChains, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = verified_counts(monkeypatch)
    assert leads_to(await world.better(), ROUNDS)
    assert sum(counts) == ROUNDS


@simulated(LongChains, {"anna": ROUNDS, "bert": ROUNDS})
async def test_broken_off_proof_continues_with_another_peer(world: LongChains, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = verified_counts(monkeypatch)
    sent = 0

    async def falls_silent(stream: FramedStream, header: Header, payload: Buffer) -> None:
        nonlocal sent
        sent += isinstance(header, Certificate)
        if sent > 500:
            await asyncio.sleep(1e5)
        await stream.send(header, payload)

    world.peers["anna"].disguise(falls_silent)
    began = now()
    assert leads_to(await world.better(), ROUNDS)
    assert sum(counts) == ROUNDS and now() - began < 3 * TRAIL_SECONDS
    assert [blame.peer for blame in world.blamed()] == ["anna"]


@pytest.mark.parametrize("pause, is_in_time", [(ROUND_SECONDS / 2, True), (3 * ROUND_SECONDS, False)])
@simulated(LongChains, {"anna": ROUNDS})
async def test_slow_proof_is_followed_up_to_a_limit(world: LongChains, pause: float, is_in_time: bool) -> None:
    world.peers["anna"].disguise(late(Certificate, pause))
    began, branch = now(), await world.better()
    assert leads_to(branch, ROUNDS) is is_in_time
    if is_in_time:
        assert now() - began > TRAIL_SECONDS
    else:
        assert now() - began < 2 * TRAIL_SECONDS
        assert "too slow" in world.blamed()[0].why


@simulated(LongChains, {"anna": ROUNDS})
async def test_endless_proof_is_cut_off_and_blamed(world: LongChains, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "MAX_GROWTH", 64)
    key = trail()[9].head.key
    world.peers["anna"].disguise(instead(HeadAnnouncement, lambda each: replace(each, key=key)))
    assert await world.better() is None
    [blame] = world.blamed()
    assert blame.peer == "anna" and "leads far beyond it" in blame.why


@pytest.mark.parametrize("lie", ["nothing more", "the same again"])
@simulated(LongChains, {"anna": ROUNDS})
async def test_proof_without_progress_ends(world: LongChains, lie: str) -> None:
    start = world.zoe.chain.head.key.lineage

    sent = again = 0

    async def lead_nowhere(stream: FramedStream, header: Header, payload: Buffer) -> None:
        nonlocal sent, again
        sent += isinstance(header, Certificate)
        if isinstance(header, Certificates) and lie == "nothing more":
            header = replace(header, count=0, more=True)
        elif isinstance(header, Certificates) and sent:
            again += 1
            header = replace(header, ancestor=start, count=1, more=True)
        elif isinstance(header, Certificate) and again:
            header = trail()[0].certificate
        await stream.send(header, payload)

    world.peers["anna"].disguise(lead_nowhere)
    began = now()
    assert await world.better() is None and now() - began < 2 * TRAIL_SECONDS
    assert [blame.peer for blame in world.blamed()] == ["anna"]


@simulated(LongChains, {"anna": ROUNDS, "bert": 600})
async def test_peer_on_another_branch_is_not_blamed(world: LongChains) -> None:
    bert = world.peers["bert"].chain
    bert.switch(trail()[599].lineage, line(trail()[599].head, 200, plan=b"e" * 32))
    branch = await world.better()
    ends = {chain.head.key for chain in (bert, world.peers["anna"].chain)}
    assert branch is not None and branch.head.key in ends
    assert world.blamed() == []


@simulated(LongChains, {"anna": ROUNDS})
async def test_peer_that_has_gone_to_a_shorter_branch_meanwhile_is_not_refused(world: LongChains) -> None:
    anna, shown = world.peers["anna"].chain, list[RoundKey]()

    async def go(stream: FramedStream, header: Header, payload: Buffer) -> None:
        await stream.send(header, payload)
        if isinstance(header, HeadAnnouncement) and not shown:
            shown.append(header.key)
            anna.switch(trail()[599].lineage, line(trail()[599].head, 200, plan=b"e" * 32))

    world.peers["anna"].disguise(go)
    await world.better()
    assert shown[0].round > anna.head.key.round
    assert not [blame for blame in world.blamed() if "refused" in blame.why]


@simulated(LongChains, {"anna": 5, "bert": 5, "cleo": 1})
async def test_slow_branch_does_not_delay_shorter_ones(world: LongChains) -> None:
    world.peers["cleo"].disguise(late(Certificate, ROUND_SECONDS * 0.9))
    chain = world.peers["cleo"].chain
    chain.switch(trail()[0].lineage, line(trail()[0].head, 2000, plan=b"e" * 32))
    began = now()
    assert leads_to(await world.better(), 5)
    assert now() - began < 2 * TRAIL_SECONDS
