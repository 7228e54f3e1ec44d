"""What a session has only in a run with stages: its pipeline, answers to joiners that ask for a stage, and moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from statistics import median_low
from typing import TYPE_CHECKING, Any, cast

from node.config.manifest import Manifest
from node.joining.stages import StageAssigner, placements
from node.membership.handshake import LocalStage
from node.membership.hello import MAX_RATE, MAX_TEAM, UNPLACED, StageSeat, StageTeam
from node.membership.membership import Membership
from node.outer.outer_loop import OuterLoop
from node.session.peer_session import PeerSession
from node.session.processes import PeerProcesses
from node.session.stage_backups import StageBackups
from node.session.stage_entrance import StageEntrance
from node.session.stage_mover import MoveRefused, Rebalancer, StageMover
from node.session.stage_refill import Promises, StageRefill
from node.storage.statedir import StateError
from node.training.remote import RemoteTrainer
from protocols.base import Host, PeerId
from protocols.history.chain import Chain
from protocols.sync.snapshot import buffer_bytes
from protocols.sync.snapshot_download import StateUnavailable

if TYPE_CHECKING:
    from node.session.pipeline_session import PipelineSession
    from node.training.remote_stage import RemoteStage
    from protocols.pipeline.balance import Placements


TEAM_SECONDS = 5.0


def local_stage(
    peer: PeerProcesses, entrance: StageEntrance, chain: Chain, has_begun: Callable[[], bool]
) -> LocalStage:
    """What this peer says of its stage, whose chain this is."""
    trained = chain.trained
    stage = LocalStage(entrance.line, entrance.seats, has_begun, lambda: peer.me in chain.head.roster)
    pinned = peer.config.stage is not None or peer.state.is_pinned
    stage.placement = replace(UNPLACED, pinned=pinned, arrived=max(1, trained) if peer.has_moved else 0)
    stage.shown(peer.me.peer)  # so a seat that was used is final before others show theirs
    return stage


class StageParts:
    """Parts of a peer's session in the stage to which `entrance` led it.

    `chain` is the stage's, `everyone` the host of the members of all stages.
    """

    def __init__(
        self,
        peer: PeerProcesses,
        entrance: StageEntrance,
        *,
        manifest: Manifest,
        chain: Chain,
        membership: Membership,
        everyone: Host,
        has_begun: Callable[[], bool],
    ) -> None:
        self._peer, self._entrance, self._chain, self._has_begun = peer, entrance, chain, has_begun
        self._manifest, self._membership, self._everyone = manifest, membership, everyone
        self.assigner = StageAssigner(
            peer.me, entrance.seats, membership, peer.transport, keep=entrance.keep, has_begun=has_begun
        )

    def pipeline(self, worker: RemoteTrainer, is_leaving: Callable[[], bool]) -> PipelineSession:
        from node.session.pipeline_session import PipelineSession  # only runs with stages load its code

        return PipelineSession(
            cast("RemoteStage", worker),
            self._manifest,
            me=self._peer.me,
            stage=self._entrance.seat.stage,
            host=self._everyone,
            membership=self._membership,
            chain=self._chain,
            is_leaving=is_leaving,
            refilled=self._entrance.seats.lost_rounds,
            upload=self._peer.limits.upload,
            say=self._peer.view.say,
        )

    def beside(
        self, session: PeerSession, loop: OuterLoop, *, rebalance: bool, on_lost: Callable[[str], None]
    ) -> list[Coroutine[Any, Any, None]]:
        """What runs beside the session: moves, by the rule as well if `rebalance`, backups, and a look at the peer's
        seat.
        """
        peer = self._peer
        mover = peer.tracker.mover = self._mover(session, loop)
        backups = peer.tracker.backups = self._backups(mover)
        refill = peer.tracker.refill = self._refill(mover, backups)
        beside = [mover.run(), backups.run(), refill.run(), self._keep_stage(on_lost), self._tell_team()]
        if rebalance:
            beside.append(
                Rebalancer(peer.me.peer, mover, view=partial(self._view, whole=True), say=peer.view.say).run()
            )
        return beside

    def _mover(self, session: PeerSession, loop: OuterLoop) -> StageMover:
        """What moves this peer to another stage if it is asked to."""

        def is_busy() -> str:
            if session.is_leaving:
                return "this peer is leaving the run"
            if loop.activity.pauses:
                return "this peer is paused: resume it first"
            return "" if self._has_begun() else "the run has not begun: its stages are still being given"

        mover = StageMover(
            self._peer.me,
            self._entrance.seat.stage,
            seats=self._entrance.seats,
            membership=self._membership,
            roster=lambda: self._chain.head.roster,
            is_busy=is_busy,
            fetch=self._fetch,
            leave=lambda target: session.leave(target, by_hand=mover.is_by_hand),
            say=self._peer.view.say,
        )
        return mover

    def _view(self, whole: bool = False) -> Placements:
        return placements(self._entrance.seats, self._membership, self._peer.me.peer, self._chain.trained, {}, whole)

    async def _tell_team(self) -> None:
        """In a run whose peers do not watch all others, tell them what works in this peer's stage."""
        while True:
            team = None if self._membership.watches_all else self._view().team(self._entrance.seat.stage)
            self._membership.announce_team(team and StageTeam(min(team[0], MAX_TEAM), min(team[1], MAX_RATE)))
            await asyncio.sleep(TEAM_SECONDS)

    def _clock(self) -> int:
        """Training rounds of the run: those that have ended at the median driver; of this peer's stage without one."""
        drivers = [each.said.rounds for each in self._membership.contacts() if each.here and each.stage == 0]
        if self._entrance.seat.stage == 0 or not drivers:
            drivers.append(self._chain.trained)
        return median_low(drivers)

    async def _fetch(self, target: int) -> None:
        try:
            await self._entrance.fetch(target, self._everyone, self._peer.me, lambda: self._live_in(target))
        except (StateUnavailable, StateError) as error:
            raise MoveRefused(str(error)) from None

    def _live_in(self, stage: int) -> list[PeerId]:
        return [each.peer for each in self._membership.contacts() if each.live and each.stage == stage]

    def _backups(self, mover: StageMover) -> StageBackups:
        entrance, me, membership = self._entrance, self._peer.me, self._membership
        seats = entrance.seats

        async def fetch(stage: int, after: int) -> int:
            return await entrance.back_up(stage, self._everyone, me, lambda: self._live_in(stage), after=after)

        return StageBackups(
            me.peer,
            entrance.seat.stage,
            sizes=[buffer_bytes(sum(self._manifest.elements_of(stage))) for stage in range(entrance.seats.stages)],
            limit_bytes=self._peer.config.backup_bytes,
            view=self._view,
            seat=lambda stage: seats.digest(seats.known[stage]) if stage in seats.known else None,
            find=entrance.backed_up,
            fetch=fetch,
            drop=entrance.drop,
            is_target=lambda stage: mover.target == stage,
            announce=lambda held: membership.announce_placement(held=held),
            say=self._peer.view.say,
        )

    def _refill(self, mover: StageMover, backups: StageBackups) -> StageRefill:
        peer, entrance = self._peer, self._entrance

        async def begin(seat: StageSeat) -> None:
            try:
                await entrance.begin_again(seat)
            except StateError as error:
                raise MoveRefused(str(error)) from None

        async def keep(promises: bytes) -> None:
            await peer.disk.run(partial(peer.state.keep_endorsed, promises), 0)

        return StageRefill(
            peer.me,
            entrance.seat.stage,
            seats=entrance.seats,
            membership=self._membership,
            transport=peer.transport,
            promises=Promises(peer.state.endorsed(), keep),
            view=self._view,
            clock=self._clock,
            held=lambda: backups.held,
            base=lambda stage: entrance.base(stage, self._clock()),
            move=mover.refill,
            begin=begin,
            say=peer.view.say,
        )

    async def _keep_stage(self, on_lost: Callable[[str], None]) -> None:
        """Watch whether this peer has to ask for a stage again before the run has begun; for another only if it may."""
        wanted = self._peer.config.stage

        def needed() -> tuple[int, ...]:
            return tuple(stage for stage in self.assigner.needed() if wanted in (None, stage))

        why = await self._entrance.until_lost(self._has_begun, needed)
        await self._entrance.leave(
            {each.peer: each.addresses for each in self._membership.contacts() if each.addresses}
        )
        on_lost(why)
