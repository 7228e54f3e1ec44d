"""How a peer gets its stage: the founder of a run is in stage 0, others ask for one, and a restart keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from functools import partial

from node.config.manifest import Manifest, ManifestError
from node.joining.stages import Seats, ask_stage, seat_of, seat_to_bytes, seats_of, seats_to_bytes
from node.membership.hello import ANY_STAGE, StageRejected, StageReply, StageSeat, WantStage
from node.storage.statedir import StateDir, StateError
from protocols.aio import loop_time
from protocols.base import BadPayload, Compute, Member, PeerError, PeerId, Signer, Transport

ASK_SECONDS = 20.0  # For one answer: the peer that is asked may have to ask the founder
PAUSE_SECONDS = 2.0


class StageEntrance:
    """Finds this peer's stage in a run with stages: its `seat`, once `found` or `enter` has returned."""

    seat: StageSeat

    def __init__(self, manifest: Manifest, state: StateDir, disk: Compute, signer: Signer) -> None:
        self.seats = Seats(manifest, signer)
        self._manifest, self._state, self._disk = manifest, state, disk

    async def found(self, me: Member) -> None:
        """Take the founder's stage, 0. Its seat is on the disk when this returns."""
        self.seat = self.seats.make(0, me)
        await self.keep([self.seat])
        self.seats.add([self.seat])
        await self._disk.run(partial(self._state.keep_stage, seat_to_bytes(self.seat)), 0)

    async def keep(self, seats: Iterable[StageSeat]) -> None:
        """Write the founder's seats to the disk."""
        await self._disk.run(partial(self._state.keep_seats, seats_to_bytes(seats)), 0)

    def kept(self, wanted: int | None) -> bool:
        """Take the stage of an earlier incarnation; False if this peer has none yet.

        Raises `StateError` if what is kept is damaged, or of another stage than the one that the user wants.
        """
        seat = seat_of(self._state.stage())
        if seat is None:
            if self._state.stage():
                raise StateError(f"{self._state.path / 'stage.json'} is damaged: start with another --state-dir")
            return False
        if wanted not in (None, seat.stage):
            raise StateError(
                f"{self._state.path} holds stage {seat.stage} of this run, not {wanted}: leave --stage out, or give "
                "another --state-dir"
            )
        try:
            self.seats.add([seat, *seats_of(self._state.seats() or b"[]")])
        except (BadPayload, ValueError) as error:
            raise StateError(f"a seat in {self._state.path} is damaged ({error}): restore the directory") from None
        self.seat = seat
        return True

    async def enter(
        self,
        me: Member,
        wanted: int | None,
        transport: Transport,
        peers: Collection[PeerId],
        say: Callable[[str], None],
    ) -> None:
        """Ask other peers, of whom more may be met meanwhile, for a stage until one gives it, and save it."""
        request = WantStage(me, ANY_STAGE if wanted is None else wanted)
        told = ""
        while True:
            for peer in tuple(peers):
                try:
                    answer = await ask_stage(transport, peer, request, loop_time() + ASK_SECONDS)
                    self.seat = self._seat(answer, wanted)
                except (PeerError, BadPayload) as error:
                    if str(error) != told:
                        say(f"no stage yet: {error} (retrying)")
                    told = str(error)
                else:
                    await self._disk.run(partial(self._state.keep_stage, seat_to_bytes(self.seat)), 0)
                    return
            await asyncio.sleep(PAUSE_SECONDS)

    def _seat(self, answer: StageReply | StageRejected, wanted: int | None) -> StageSeat:
        """The seat that a peer's answer gives; raises `BadPayload` if it gives none, or not the wanted one."""
        if isinstance(answer, StageRejected):
            raise BadPayload(answer.why)
        self.seats.add(answer.seats)
        if wanted not in (None, answer.stage) or answer.stage not in self.seats.known:
            raise BadPayload(f"it gives stage {answer.stage}, or does not know its first member")
        return self.seats.known[answer.stage]


def require_stage(manifest: Manifest, wanted: int | None) -> None:
    """Raise `ManifestError` if the run has no such stage."""
    if wanted is None:
        return
    if not manifest.stages:
        raise ManifestError("this run has no stages: leave --stage out")
    if wanted >= len(manifest.stages):
        raise ManifestError(f"this run has the stages 0 to {len(manifest.stages) - 1}: give one of them by --stage")
