"""Verifies the head that a peer shows, by the certificates from where its chain parts from ours.

They may be any number, and are verified in pieces, off the event loop. A peer's time limit grows with the rounds that
it has sent. If it breaks off, the proof of the same branch by another peer continues from what was verified.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from protocols import wire
from protocols.aio import loop_time
from protocols.base import BadPayload, Deadline, Head, PeerError, PeerGone, PeerId, PeerSilent, RoundKey, Stream
from protocols.consensus import record as records
from protocols.consensus.messages import Certificate
from protocols.history.chain import Chain
from protocols.history.fork_choice import Branch, ForkChoice
from protocols.history.round_log import Archive, RoundLog, RoundPruned
from protocols.sync.context import SyncContext
from protocols.sync.requests import MAX_LOCATOR, SYNC, Certificates, CertificatesRequest

TRAIL_SECONDS = 20.0  # time for a peer to begin to prove its head, or to continue
ROUND_SECONDS = 0.1
"""Extra time for each round already proved: enough for the certificates of a roster of four at 10 kB/s."""
MAX_AHEAD = 1 << 20  # In rounds. A head that is further ahead of ours cannot be a head of the run.
MAX_GROWTH = 4096  # limit of rounds by which a chain may grow while it is being verified
MAX_PIECES = 32  # limit of requests for certificates on one stream
VERIFY_BYTES = 1 << 16  # cost of verifying one certificate, a few signatures, in the bytes of `Compute`
VERIFY_AT_ONCE = 16
_LIMIT = 256


@dataclass(slots=True, eq=False)
class _Proof:
    shown: RoundKey  # the head that the peer claims
    head: Head | None = None  # on our chain, after which the unknown rounds begin
    links: RoundLog | None = None  # the verified rounds after `head`
    rounds: int = 0  # number of rounds proved
    waited_seconds: float = 0.0  # for the peer
    is_short: bool = False  # the peer has no more rounds, and the claimed head is not among them

    @property
    def end(self) -> Head | None:
        return self.links[-1].head if self.links else self.head


class HeadVerifier:
    def __init__(
        self,
        context: SyncContext,
        chain: Chain,
        rules: ForkChoice,
        make_archive: Callable[[], Archive],
        still_shows: Callable[[PeerId, RoundKey], Awaitable[bool]],
    ) -> None:
        """`still_shows` asks a peer whether it shows a head again: it may have gone to another branch meanwhile."""
        self._context, self._chain, self._rules, self._make_archive = context, chain, rules, make_archive
        self._still_shows = still_shows
        self._proofs: list[_Proof] = []  # proofs in progress
        self._turn = asyncio.Lock()  # held while certificates are verified
        self._judged: RoundLog | None = None  # the longest rounds verified by proofs that have ended

    async def verify(
        self, claims: Sequence[tuple[PeerId, RoundKey]], stranded: bool, deadline: Deadline
    ) -> Branch | None:
        """Have one of the peers that show the same head, each with its key, prove it.

        The deadline is for peers that send nothing. None: the branch does not beat ours (`ForkChoice.beating`), or is
        not proved.
        """
        for peer, key in claims:
            proof = _Proof(key)
            self._proofs.append(proof)
            try:
                return await self._proved(peer, proof, stranded, deadline)
            except BadPayload as error:
                self._context.refuse(peer, str(error))
            except PeerError as error:
                self._context.accounting.name(peer, f"lost as a contact: {error.why}")
            except RoundPruned:
                self._judged = proof.links = None
            finally:
                self._proofs.remove(proof)
                self._keep(proof)
                deadline += ROUND_SECONDS * proof.rounds
        return None

    def _keep(self, proof: _Proof) -> None:
        """Keep the verified rounds as the starting point of later proofs, unless our chain has them."""
        if proof.links and len(proof.links) >= len(self._judged or ()):
            self._judged = proof.links
        if self._judged and (
            self._judged[-1].lineage in self._chain or self._judged.start.key.lineage not in self._chain
        ):
            self._judged = None

    async def _proved(self, peer: PeerId, proof: _Proof, stranded: bool, deadline: Deadline) -> Branch | None:
        continues = True
        while continues:
            before, until = proof.rounds, loop_time() + TRAIL_SECONDS
            try:
                async with self._context.open(peer, SYNC, until if before else min(until, deadline)) as stream:
                    continues = await self._verify_some(stream, proof, stranded)
            except PeerSilent:
                if proof.rounds == before:
                    raise
        if proof.is_short and await self._still_shows(peer, proof.shown):
            why = f"does not prove the head at round {proof.shown.round} that it shows"
            self._context.accounting.name(peer, f"refused: {why}")
            raise BadPayload(why)
        if proof.is_short:
            raise PeerGone(peer, "it does not show the same head any more")
        return self._beating(proof, stranded)

    def _beating(self, proof: _Proof, stranded: bool) -> Branch | None:
        if not proof.links:
            return None
        return self._rules.beating(self._chain, proof.links.start.key.lineage, proof.links, stranded)

    async def _verify_some(self, stream: Stream, proof: _Proof, stranded: bool) -> bool:
        """Verify certificates on one stream. Returns whether there are more."""
        if proof.shown.round > len(self._chain) + MAX_AHEAD:
            raise BadPayload(
                f"does not prove the head at round {proof.shown.round} that it shows: no run lasts so long"
            )
        for _ in range(MAX_PIECES):
            more = await self._piece(stream, proof)
            if (
                proof.links
                and not self._beating(proof, stranded)
                and not self._rules.depends_on_growth(self._chain, proof.links.start.key.lineage, proof.links)
            ):
                return False  # the branch does not beat ours, and no later round can change that
            if not more:
                proof.is_short = proof.end is None or proof.end.key.round < proof.shown.round
                return False
        return True

    async def _piece(self, stream: Stream, proof: _Proof) -> bool:
        known = max(self._others(proof.links), key=len, default=None)
        locator = self._locator(proof, known)
        await stream.send(CertificatesRequest(locator))
        began = loop_time()
        trail = wire.expect(await stream.receive(_LIMIT), Certificates)
        proof.waited_seconds += loop_time() - began
        if trail.ancestor not in locator:
            if trail.ancestor == bytes(32) and not trail.count:
                raise PeerGone(stream.peer, "has no certificates back to this peer's chain")
            raise BadPayload("certificates that follow none of the lineages they were asked from")
        self._go_to(proof, known, trail.ancestor)
        for place in range(0, trail.count, VERIFY_AT_ONCE):
            await self._judge(stream, proof, min(VERIFY_AT_ONCE, trail.count - place))
        return trail.more and trail.count > 0

    async def _judge(self, stream: Stream, proof: _Proof, count: int) -> None:
        began = loop_time()
        some = [wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), Certificate) for _ in range(count)]
        proof.waited_seconds += loop_time() - began
        assert proof.end
        while some and not proof.links and (head := self._ours(proof.end, some[0])):
            proof.head, some = head, some[1:]  # other votes may certify a round that we have
        if not some:
            return
        async with self._turn:  # other proofs may be at the same rounds
            proof.links = proof.links or RoundLog(proof.end, self._make_archive())
            proof.rounds += len(some)
            if some := some[self._take_over(proof.links, some) :]:
                cost_bytes = VERIFY_BYTES * len(some)
                proof.links.extend(
                    await self._context.host.compute.run(partial(self._rules.verify, proof.end, some), cost_bytes)
                )
        if proof.end.key.round > proof.shown.round + MAX_GROWTH:
            raise BadPayload(f"shows a head at round {proof.shown.round}, and leads far beyond it")
        if proof.waited_seconds > TRAIL_SECONDS + ROUND_SECONDS * proof.rounds:
            raise PeerGone(stream.peer, f"proved {proof.rounds} rounds in {proof.waited_seconds:.0f} s: too slow")

    def _ours(self, head: Head, certificate: Certificate) -> Head | None:
        return self._chain.at(records.lineage(certificate.record)) if certificate.key == head.key else None

    # -- what other proofs have verified ------------------------------------------------------------------------------

    def _take_over(self, links: RoundLog, some: Sequence[Certificate]) -> int:
        """Add those of these rounds that another proof has verified already. Returns their number."""
        end = links[-1].lineage if links else links.start.key.lineage
        count = 0
        for known in self._others(links):
            place = known.place(end)
            if place is not None and not count:
                lineages = (known.lineage(at) for at in range(place + 1, len(known) + 1))
                same = takewhile(
                    lambda pair: records.lineage(pair[0].record) == pair[1], zip(some, lineages, strict=False)
                )
                count = sum(1 for _ in same)
                links.adopt(known, place, place + count)
        return count

    def _others(self, links: RoundLog | None) -> list[RoundLog]:
        every = (self._judged, *(proof.links for proof in self._proofs))
        return [each for each in every if each and each is not links]

    def _locator(self, proof: _Proof, known: RoundLog | None) -> tuple[bytes, ...]:
        if proof.end:
            return (proof.end.key.lineage,)
        return (*(known.locator()[:-1] if known else ()), *self._chain.locator())[:MAX_LOCATOR]

    def _go_to(self, proof: _Proof, known: RoundLog | None, lineage: bytes) -> None:
        if proof.end:
            return  # it was the only one
        proof.head = self._chain.at(lineage)
        if proof.head:
            return
        place = known.place(lineage) if known else None
        if known is None or place is None:
            raise RoundPruned("this peer's chain has changed meanwhile")
        proof.head, proof.links = known.start, RoundLog(known.start, self._make_archive())
        proof.links.adopt(known, 0, place)
