"""How a peer gets its stage: the founder of a run is in stage 0, others ask for one, and a restart keeps it.

Before the run has begun, a peer may have to ask again: another peer has the seat of its stage by now, or another stage
needs a first member more than this one needs a further peer.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from node.config.derived import stream_seed
from node.config.manifest import Manifest, ManifestError
from node.joining.stages import ask_stage
from node.joining.state_download import StateDownload, begin_again, built_in_layout, clear, kept_state
from node.membership.hello import ANY_STAGE, VERSION, SeatBase, StageRejected, StageReply, StageSeat, WantStage
from node.membership.seats import SeatLine, Seats, seat_of, seat_to_bytes, seats_of, seats_to_bytes
from node.storage.checkpoint import DIRECTORY, Checkpoint, CheckpointError, DataCursor, places
from node.storage.statedir import StateDir, StateError
from protocols.aio import loop_time
from protocols.base import BadPayload, Compute, Host, Layout, Member, PeerError, PeerId, Signer, Transport
from protocols.sync.snapshot import Snapshot

log = logging.getLogger(__name__)

ASK_SECONDS = 20.0  # For one answer: the peer that is asked may have to ask the founder
PAUSE_SECONDS = 2.0
LOOK_SECONDS = 2.0  # between two looks whether this peer has to ask for a stage again


def home_name(seat: StageSeat) -> str:
    """The directory of a stage, below `stages/`: another one each time that it begins again."""
    return f"{seat.stage}-{seat.number}" if seat.base else str(seat.stage)


class StageEntrance:
    """Finds this peer's stage in a run with stages: the `line` of its seat, once `found` or `enter` has returned."""

    line: SeatLine

    def __init__(self, manifest: Manifest, state: StateDir, disk: Compute, signer: Signer) -> None:
        self.seats, self._manifest = Seats(manifest, signer), manifest
        self._me, self._state, self._disk = state.identity.peer_id, state, disk
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)  # of each stage, whose directory is one
        self._layouts: dict[int, Layout] = {}
        self.prepared: dict[int, str] = {}  # stage -> the name of the directory with which this peer may go there

    @property
    def seat(self) -> StageSeat:
        """Of the first member of this peer's stage."""
        return self.line[0]

    async def found(self, me: Member) -> None:
        """Take the founder's stage, 0. Its seat is on the disk when this returns."""
        self.seats.add([self.seats.make(0, me)])
        await self._take(0)

    async def _take(self, stage: int) -> None:
        self.line = self.seats.line(stage)
        await self.keep(self.seats.told())
        await self._disk.run(partial(self._state.enter_stage, home_name(self.seat), seat_to_bytes(self.seat)), 0)

    async def keep(self, seats: Iterable[StageSeat]) -> None:
        """Write the known seats to the disk."""
        await self._disk.run(partial(self._state.keep_seats, seats_to_bytes(seats)), 0)

    async def fetch(self, stage: int, host: Host, me: Member, peers: Callable[[], Sequence[PeerId]]) -> None:
        """Prepare the directory of another stage, and download its state from these peers into it.

        `me` is this peer's present incarnation: the next one starts from there. Raises StateError, StateUnavailable.
        """
        async with self._download(stage, host, me, peers) as download:
            await self._publish(download, await download.fetch())

    async def back_up(
        self, stage: int, host: Host, me: Member, peers: Callable[[], Sequence[PeerId]], *, after: int
    ) -> int:
        """The same of the newest state, if more than `after` rounds have trained it; it replaces what is there.

        Returns the number of its rounds; `after` if there is no newer state. Raises StateError, StateUnavailable.
        """
        async with self._download(stage, host, me, peers) as download:
            served = download.served()
            if (newest := max(served, default=after)) <= after:
                return after
            await self._disk.run(partial(download.clear, served[newest]), 0)
            await self._publish(download, await download.fetch(served[newest]))
            await self._disk.run(partial(download.clear, served[newest], also_whole=True), 0)
            return newest

    @asynccontextmanager
    async def _download(
        self, stage: int, host: Host, me: Member, peers: Callable[[], Sequence[PeerId]]
    ) -> AsyncIterator[StateDownload]:
        """A download of another stage's state into its directory, one at a time there. Its chain is proved."""
        async with self._turns[stage]:
            seat, following = self.seats.known[stage], replace(me, incarnation=me.incarnation + 1)
            await self.keep(self.seats.told())
            home = await self._disk.run(partial(self._state.prepare_stage, home_name(seat), seat_to_bytes(seat)), 0)
            self.prepared[stage] = home.name
            if stage not in self._layouts:
                self._layouts[stage] = await host.compute.run(partial(built_in_layout, self._manifest, stage), 1 << 30)
            data = DataCursor(stream_seed(following), following.incarnation, 0)
            try:
                download = StateDownload(
                    host,
                    self._manifest,
                    layout=self._layouts[stage],
                    seat=seat,
                    peers=peers,
                    directory=home,
                    data=data,
                )
                await download.prove()
                yield download
            except OSError as error:
                raise StateError(f"cannot write {home} ({error.strerror or error}): free space there") from None

    async def _publish(self, download: StateDownload, snapshot: Snapshot) -> None:
        await self._disk.run(partial(download.publish, snapshot), 0)

    async def backed_up(self, stage: int) -> int | None:
        """Number of rounds that trained what the directory of another stage holds; None if it holds no state.

        Deletes what was downloaded of the stage before it began again.
        """
        if (seat := self.seats.known.get(stage)) is None:
            return None
        await self.drop(stage, home_name(seat))
        found = await self._backup(seat)
        return found[0] if found else None

    async def _backup(self, seat: StageSeat) -> tuple[int, Checkpoint] | None:
        find = partial(kept_state, self._manifest, seat, self._state.stage_home(home_name(seat)))
        try:
            return await self._disk.run(find, 0)
        except (OSError, CheckpointError) as error:
            log.warning("no backup of stage %d: %s", seat.stage, error)
            return None

    async def drop(self, stage: int, kept: str = "") -> None:
        """Delete the states of a stage that this peer has downloaded, but those in the directory of this name, and in
        the present one. A directory of a seat that does not count goes as a whole if nothing else is in it.
        """
        kept = home_name(self.seat) if stage == self.seat.stage else kept

        def drop() -> None:
            for home in self._state.stage_homes(stage):
                if home.name != kept:
                    clear(home / DIRECTORY)
                    if kept and not places(home / DIRECTORY):
                        shutil.rmtree(home, ignore_errors=True)

        async with self._turns[stage]:
            await self._disk.run(drop, 0)

    # -- a stage that begins again ------------------------------------------------------------------------------------

    async def base(self, stage: int, trained: int) -> SeatBase | None:
        """From where a lost stage would begin again, after this number of rounds of the run; None without a backup."""
        found = await self._backup(self.seats.known[stage])
        if found is None:
            return None
        index = found[1].index
        return SeatBase(trained, min(found[0], trained), index.parameters_root, index.velocity_root)

    async def begin_again(self, seat: StageSeat) -> None:
        """Prepare the directory of this peer's own new seat, from its backup. Raises StateError.

        When this returns, the seat counts here, and is on the disk.
        """
        async with self._turns[seat.stage]:
            found = await self._backup(self.seats.known[seat.stage])
            if found is None:
                raise StateError(f"the backup of stage {seat.stage} cannot be read")
            home = await self._disk.run(partial(self._state.prepare_stage, home_name(seat), seat_to_bytes(seat)), 0)
            try:
                await self._disk.run(partial(self._install, seat, found[1], home), 0)
            except OSError as error:
                raise StateError(f"cannot write {home} ({error.strerror or error}): free space there") from None
            self.prepared[seat.stage] = home.name
        self.seats.add([seat])
        self.seats.let_count(seat)
        await self.keep(self.seats.told())

    def _install(self, seat: StageSeat, backup: Checkpoint, home: Path) -> None:
        data = DataCursor(stream_seed(seat.member), seat.member.incarnation, 0)
        begin_again(self._manifest, seat, backup, home, data)

    def kept(self, wanted: int | None) -> bool:
        """Take the stage of an earlier incarnation; False if this peer has none yet.

        Raises `StateError` if what is kept is damaged, or of another stage than the one that the user wants. A peer
        that was moved from that one stays where it is.
        """
        seat = seat_of(self._state.stage())
        if seat is None and self._state.stage():
            raise StateError(f"{self._state.home / 'stage.json'} is damaged: start with another --state-dir")
        try:
            self.seats.add([*([seat] if seat else []), *seats_of(self._state.seats() or b"[]")])
        except (BadPayload, ValueError) as error:
            raise StateError(f"a seat in {self._state.path} is damaged ({error}): restore the directory") from None
        if seat is None:
            return False
        if wanted not in (None, seat.stage) and not self._state.has_left(wanted):
            raise StateError(
                f"{self._state.path} holds stage {seat.stage} of this run, not {wanted}: leave --stage out, or give "
                "another --state-dir"
            )
        self.line = self._line_of(seat)
        return True

    def _line_of(self, seat: StageSeat) -> SeatLine:
        """The line of a kept seat, which may not count any more."""
        known = self.seats.line(seat.stage)
        return known if self.seats.is_same(known[0], seat) else (seat,)

    async def enter(
        self,
        me: Member,
        wanted: int | None,
        transport: Transport,
        peers: Callable[[], Collection[PeerId]],
        say: Callable[[str], None],
    ) -> None:
        """Ask other peers, of whom more may be met meanwhile, for a stage until one gives it, and save it."""
        request = WantStage(VERSION, me, ANY_STAGE if wanted is None else wanted)
        told: dict[PeerId, str] = {}
        while True:
            for peer in tuple(peers()):
                try:
                    answer = await ask_stage(transport, peer, request, loop_time() + ASK_SECONDS)
                    stage = self._stage(answer, wanted)
                except (PeerError, BadPayload) as error:
                    if str(error) != told.get(peer):
                        say(f"no stage yet: {error} (retrying)")
                    told[peer] = str(error)
                else:
                    return await self._take(stage)
            await asyncio.sleep(PAUSE_SECONDS)

    def _stage(self, answer: StageReply | StageRejected, wanted: int | None) -> int:
        """The stage that a peer's answer gives; raises `BadPayload` if it gives none, or not the wanted one."""
        if isinstance(answer, StageRejected):
            raise BadPayload(answer.why)
        self.seats.add(answer.seats)
        if wanted not in (None, answer.stage) or answer.stage not in self.seats.known:
            raise BadPayload(f"it gives stage {answer.stage}, or does not know its first member")
        return answer.stage

    # -- asking again -------------------------------------------------------------------------------------------------

    async def until_lost(self, has_begun: Callable[[], bool], needed: Callable[[], Collection[int]]) -> str:
        """Wait until this peer has to `leave` its stage and ask for one again; returns why.

        `needed` are the stages whose seat may be given. Once the run has begun, only a stage that has begun again with
        another seat is lost.
        """
        while True:
            begun = has_begun()
            if why := self._lost(() if begun else needed()):
                return why
            await asyncio.sleep(LOOK_SECONDS)

    async def leave(self, peers: Mapping[PeerId, Sequence[str]]) -> None:
        """Forget this peer's stage, but not the addresses of these peers of the run, which are saved after rounds only.

        Without them, a founder would start another run.
        """
        await self.keep(self.seats.told())
        await self._disk.run(partial(self._state.remember, peers), 0)
        await self._disk.run(self._state.leave_stage, 0)

    def _lost(self, needed: Collection[int]) -> str:
        if not self.seats.counts(self.seat):
            stage = self.seat.stage
            if self.seats.known[stage].base or self.seat.base:
                return f"stage {stage} has begun again without this peer: what it had trained since the backup is lost"
            return f"another peer is the first of stage {stage} by now, and nothing was trained yet"
        if needed and self.seat.member.peer != self._me:
            return f"stage {min(needed)} needs a first member, and nothing was trained yet"
        return ""


def require_stage(manifest: Manifest, wanted: int | None) -> None:
    """Raise `ManifestError` if the run has no such stage."""
    if wanted is None:
        return
    if not manifest.stages:
        raise ManifestError("this run has no stages: leave --stage out")
    if wanted >= len(manifest.stages):
        raise ManifestError(f"this run has the stages 0 to {len(manifest.stages) - 1}: give one of them by --stage")
