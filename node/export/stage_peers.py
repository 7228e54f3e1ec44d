"""Find peers of each stage of a running run, and the first members of the stages, without taking part in it.

A peer that was given by its address tells its own stage, and which peers it knows in the others. They are dialled by
their ids: libp2p's DHT has their addresses. Each of them is asked for its stage again, because hearsay may be wrong.
The founder has signed the first member of each stage, so any peer may tell it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress

from node.config.manifest import Manifest
from node.export.trained_model import TrainedError
from node.joining.bootstrap import ask_status
from node.joining.stages import Seats, ask_seats
from node.membership.hello import StageSeat
from node.reporting.status import PeerStatus, parse, short
from protocols.aio import loop_time, task_group
from protocols.base import BadPayload, Host, Member, PeerError, PeerId

SEARCH_SECONDS = 60.0
ANSWER_SECONDS = 10.0
"""For one peer: to be found by its id, and to answer."""
RETRY_SECONDS = 1.0
"""Pause before another round of asking. p2pd's DHT may not know the peers yet."""
ATTEMPTS = 3
MOST_TRIED = 8
"""Peers of each stage that are tried at most."""
AT_ONCE = 16


class StagePeers:
    """The peers that say that they are in a stage, for each stage. They may lie."""

    def __init__(self, host: Host, me: Member, manifest: Manifest) -> None:
        assert manifest.stages
        self.found: list[list[PeerId]] = [[] for _ in manifest.stages]
        self._transport, self._me, self._run = host.transport, me, manifest.run_id[:12]
        self._seats = Seats(manifest, host.signer)
        self._known: list[list[PeerId]] = [[] for _ in manifest.stages]  # hearsay, those that are live first
        self._why: dict[PeerId, str] = {}
        self._turn = asyncio.Semaphore(AT_ONCE)

    async def search(self, peers: Sequence[PeerId]) -> None:
        """Find peers of each stage. Takes at most `SEARCH_SECONDS`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SEARCH_SECONDS):
                await self._ask_all(peers)
                await self._hear(peers)
                for attempt in range(ATTEMPTS if any(self.found) else 0):
                    lacking = [known for known, found in zip(self._known, self.found, strict=True) if not found]
                    if not any(lacking):
                        break
                    await asyncio.sleep(RETRY_SECONDS if attempt else 0)
                    await self._ask_all(peer for known in lacking for peer in known)
        if not any(self.found):
            raise TrainedError(f"run {self._run}: {self._causes(peers)}: give the address of another of its peers")
        if missing := [stage for stage, each in enumerate(self.found) if not each]:
            raise TrainedError(self._missing(missing))

    def seat(self, stage: int) -> StageSeat:
        """Of a stage for which a peer was found."""
        return self._seats.known[stage]

    async def _ask_all(self, peers: Iterable[PeerId]) -> None:
        async with task_group() as group:
            for peer in peers:
                group.create_task(self._ask(peer))

    async def _ask(self, peer: PeerId) -> None:
        """Have a peer tell its stage and the seats that it knows, or note why it does not."""
        async with self._turn:
            try:
                answer = await ask_seats(self._transport, peer, self._me, loop_time() + ANSWER_SECONDS)
                self._seats.add(answer.seats)
                if answer.stage not in self._seats.known:
                    raise BadPayload("it names a stage without its first member")
            except PeerError as error:
                self._why[peer] = error.why
            except BadPayload as error:
                self._why[peer] = str(error)
            else:
                if peer not in self.found[answer.stage]:
                    self.found[answer.stage].append(peer)

    async def _hear(self, peers: Sequence[PeerId]) -> None:
        """Ask these peers which others they know."""

        async def others(peer: PeerId) -> Sequence[PeerStatus]:
            try:
                return parse(await ask_status(self._transport, peer, loop_time() + ANSWER_SECONDS)).peers
            except (PeerError, BadPayload, ValueError):
                return ()

        heard = [each for some in await asyncio.gather(*map(others, peers)) for each in some]
        for each in sorted(heard, key=lambda each: not each.live):
            if 0 <= each.stage < len(self._known):
                known = self._known[each.stage]
                if each.peer not in known and each.peer not in peers and len(known) < MOST_TRIED:
                    known.append(each.peer)

    def _missing(self, stages: Sequence[int]) -> str:
        """The line about stages without a peer."""
        *others, last = map(str, stages)
        named = f"stages {', '.join(others)} and {last}" if others else f"stage {last}"
        known = [peer for stage in stages for peer in self._known[stage]]
        instead = "give the address of one by another --bootstrap, or a state directory of each stage by --state-dir"
        if not known:
            return f"run {self._run}: no peer of {named} is known there: wait until one has joined, or {instead}"
        return f"run {self._run}: no peer of {named} can be reached ({self._causes(known)}): {instead}"

    def _causes(self, peers: Sequence[PeerId]) -> str:
        """Why the first of these peers that failed did so."""
        return next((f"{short(peer)}: {self._why[peer]}" for peer in peers if peer in self._why), "no answer in time")
