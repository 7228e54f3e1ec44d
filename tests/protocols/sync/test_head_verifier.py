"""Trails of any length: judged once, led on by others where one ends, and cut off where they lead nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from protocols.base import Buffer, Header, Member
from protocols.consensus.messages import Certificate
from protocols.framing import FramedStream
from protocols.history.chain import Chain, DecidedRound
from protocols.history.fork_choice import Branch, ForkChoice
from protocols.history.round_log import RoundLog
from protocols.sync import head_verifier as proofs
from protocols.sync.head_verifier import ROUND_SECONDS, TRAIL_SECONDS
from protocols.sync.requests import Certificates, HeadAnnouncement
from tests.support.fake_rounds import RUN, line
from tests.support.sync_cluster import SpoofedPeer, SyncCluster, SyncPeer

ANNA = Member("anna")
ROUNDS = 900


@cache
def trail(rounds: int = ROUNDS) -> list[DecidedRound]:
    return line(Chain(RUN, "run", (ANNA,)).head, rounds)


class Told:
    """What a peer is told in the place of what another says; counts certificates."""

    def __init__(self, peer: SyncPeer, lie: Callable[[FramedStream, Header], Coroutine[Any, Any, Header]]) -> None:
        self.certificates, self._lie = 0, lie
        peer.transport.disguise = lambda method, stream, pipe: SpoofedPeer(stream, self.tell)  # type: ignore[assignment,return-value]

    async def tell(self, stream: FramedStream, header: Header, payload: Buffer) -> None:
        self.certificates += isinstance(header, Certificate)
        await stream.send(await self._lie(stream, header), payload)


async def true(stream: FramedStream, header: Header) -> Header:
    return header


def play(rounds: dict[str, int], main: Callable[[SyncCluster, SyncPeer], Coroutine[Any, Any, None]]) -> None:
    """Peers that are so many rounds ahead, in a run that anna has decided alone, and a newcomer."""
    world = SyncCluster(("anna",))

    async def whole() -> None:
        for name in rounds.keys() - {"anna"}:
            await world.add(name)
        world.hints[:] = rounds
        for name, count in rounds.items():
            chain = world.peers[name].chain
            chain.switch(chain.head.key.lineage, trail()[:count])
        await main(world, await world.add("zoe"))

    world.play(whole)


def now() -> float:
    return asyncio.get_running_loop().time()


async def better(peer: SyncPeer, seconds: float = 30.0) -> Branch | None:
    return await peer.sync.better(now() + seconds)


def judged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many certificates are judged at a time."""
    counts: list[int] = []
    verify = ForkChoice.verify

    def counting(self: ForkChoice, head: Any, some: Any) -> Any:
        counts.append(len(some))
        return verify(self, head, some)

    monkeypatch.setattr(ForkChoice, "verify", counting)
    return counts


def leads_to(branch: Branch | None, round_number: int) -> bool:
    return branch is not None and branch.head == trail()[round_number - 1].head and len(branch.links) == round_number


def test_long_chain_is_verified_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = judged(monkeypatch)

    async def main(world: SyncCluster, zoe: SyncPeer) -> None:
        branch = await better(zoe)
        assert leads_to(branch, ROUNDS) and branch is not None and isinstance(branch.links, RoundLog)
        assert sum(counts) == ROUNDS and max(counts) == proofs.VERIFY_AT_ONCE
        copy = zoe.chain.copy()
        copy.switch(branch.ancestor.key.lineage, branch.links)
        zoe.chain.switch(branch.ancestor.key.lineage, branch.links)
        assert zoe.chain.head == copy.head == world.peers["anna"].chain.head
        assert await better(zoe) is None and sum(counts) == ROUNDS

    play({"anna": ROUNDS}, main)


def test_verified_certificates_are_not_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = judged(monkeypatch)

    async def main(world: SyncCluster, zoe: SyncPeer) -> None:
        told = Told(world.peers["anna"], true)
        assert leads_to(await better(zoe), ROUNDS - 5)
        chain = world.peers["anna"].chain
        chain.switch(chain.head.key.lineage, trail()[ROUNDS - 5 :])
        assert leads_to(await better(zoe), ROUNDS)
        assert sum(counts) == told.certificates == ROUNDS

    play({"anna": ROUNDS - 5}, main)


def test_heads_on_one_branch_are_verified_together(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = judged(monkeypatch)

    async def main(world: SyncCluster, zoe: SyncPeer) -> None:
        assert leads_to(await better(zoe), ROUNDS)
        assert sum(counts) == ROUNDS

    play({"anna": ROUNDS, "bert": ROUNDS - 1, "cleo": ROUNDS - 2, "dora": ROUNDS - 2}, main)


def test_broken_off_proof_continues_with_another_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = judged(monkeypatch)

    async def main(world: SyncCluster, zoe: SyncPeer) -> None:
        async def falls_silent(stream: FramedStream, header: Header) -> Header:
            if told.certificates > 500:
                await asyncio.sleep(1e5)
            return header

        told = Told(world.peers["anna"], falls_silent)
        began = now()
        assert leads_to(await better(zoe), ROUNDS)
        assert sum(counts) == ROUNDS and now() - began < 3 * TRAIL_SECONDS
        assert [blame.peer for blame in zoe.sync.accounting.take()[0]] == ["anna"]

    play({"anna": ROUNDS, "bert": ROUNDS}, main)


@pytest.mark.parametrize("pause, is_in_time", [(ROUND_SECONDS / 2, True), (3 * ROUND_SECONDS, False)])
def test_slow_proof_is_followed_up_to_a_limit(pause: float, is_in_time: bool) -> None:
    async def main(world: SyncCluster, zoe: SyncPeer) -> None:
        async def dribble(stream: FramedStream, header: Header) -> Header:
            await asyncio.sleep(pause if isinstance(header, Certificate) else 0)
            return header

        Told(world.peers["anna"], dribble)
        began, branch = now(), await better(zoe)
        assert leads_to(branch, ROUNDS) is is_in_time
        if is_in_time:
            assert now() - began > TRAIL_SECONDS
        else:
            assert now() - began < 2 * TRAIL_SECONDS
            assert "too slow" in zoe.sync.accounting.take()[0][0].why

    play({"anna": ROUNDS}, main)


def test_endless_proof_is_cut_off_and_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "MAX_GROWTH", 64)

    async def main(world: SyncCluster, zoe: SyncPeer) -> None:
        async def modest(stream: FramedStream, header: Header) -> Header:
            key = trail()[9].head.key
            return replace(header, key=key) if isinstance(header, HeadAnnouncement) else header

        Told(world.peers["anna"], modest)
        assert await better(zoe) is None
        [blame] = zoe.sync.accounting.take()[0]
        assert blame.peer == "anna" and "leads on and on" in blame.why

    play({"anna": ROUNDS}, main)


@pytest.mark.parametrize("lie", ["nothing more", "the same again"])
def test_proof_without_progress_ends(lie: str) -> None:
    async def main(world: SyncCluster, zoe: SyncPeer) -> None:
        start = zoe.chain.head.key.lineage

        async def around(stream: FramedStream, header: Header) -> Header:
            if isinstance(header, Certificates) and lie == "nothing more":
                return replace(header, count=0, more=True)
            if isinstance(header, Certificates) and told.certificates:
                told.again += 1  # type: ignore[attr-defined]
                return replace(header, ancestor=start, count=1, more=True)
            return trail()[0].certificate if isinstance(header, Certificate) and told.again else header  # type: ignore[attr-defined]

        told = Told(world.peers["anna"], around)
        told.again = 0  # type: ignore[attr-defined]
        began = now()
        assert await better(zoe) is None and now() - began < 2 * TRAIL_SECONDS
        assert [blame.peer for blame in zoe.sync.accounting.take()[0]] == ["anna"]

    play({"anna": ROUNDS}, main)


def test_peer_on_another_branch_is_not_blamed() -> None:
    async def main(world: SyncCluster, zoe: SyncPeer) -> None:
        bert = world.peers["bert"].chain
        bert.switch(trail()[599].lineage, line(trail()[599].head, 200, plan=b"e" * 32))
        branch = await better(zoe)
        ends = {chain.head.key for chain in (bert, world.peers["anna"].chain)}
        assert branch is not None and branch.head.key in ends
        assert zoe.sync.accounting.take()[0] == ()

    play({"anna": ROUNDS, "bert": 600}, main)


def test_slow_branch_does_not_delay_shorter_ones() -> None:
    async def main(world: SyncCluster, zoe: SyncPeer) -> None:
        async def slow(stream: FramedStream, header: Header) -> Header:
            await asyncio.sleep(ROUND_SECONDS * 0.9 if isinstance(header, Certificate) else 0)
            return header

        Told(world.peers["cleo"], slow)
        chain = world.peers["cleo"].chain
        chain.switch(trail()[0].lineage, line(trail()[0].head, 2000, plan=b"e" * 32))
        began = now()
        assert leads_to(await better(zoe), 5)
        assert now() - began < 2 * TRAIL_SECONDS

    play({"anna": 5, "bert": 5, "cleo": 1}, main)
