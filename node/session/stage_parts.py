"""What a session has only in a run with stages: its pipeline, answers to joiners that ask for a stage, and moves."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from node.config.manifest import Manifest
from node.joining.stages import StageAssigner, placements
from node.membership.handshake import LocalStage
from node.membership.hello import UNPLACED
from node.membership.membership import Membership
from node.outer.outer_loop import OuterLoop
from node.session.peer_session import PeerSession
from node.session.processes import PeerProcesses
from node.session.stage_entrance import StageEntrance
from node.session.stage_mover import MoveRefused, Rebalancer, StageMover
from node.storage.statedir import StateError
from node.training.remote import RemoteTrainer
from protocols.base import Host
from protocols.history.chain import Chain
from protocols.sync.snapshot_download import StateUnavailable

if TYPE_CHECKING:
    from node.session.pipeline_session import PipelineSession
    from node.training.remote_stage import RemoteStage


def local_stage(
    peer: PeerProcesses, entrance: StageEntrance, trained: int, has_begun: Callable[[], bool]
) -> LocalStage:
    """What this peer says of its stage, at which so many rounds have trained."""
    stage = LocalStage(entrance.line, entrance.seats, has_begun)
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
        chain: Chain,
        membership: Membership,
        everyone: Host,
        has_begun: Callable[[], bool],
    ) -> None:
        self._peer, self._entrance, self._chain, self._has_begun = peer, entrance, chain, has_begun
        self._membership, self._everyone = membership, everyone
        self.assigner = StageAssigner(
            peer.me, entrance.seats, membership, peer.transport, keep=entrance.keep, has_begun=has_begun
        )

    def pipeline(self, worker: RemoteTrainer, manifest: Manifest, is_leaving: Callable[[], bool]) -> PipelineSession:
        from node.session.pipeline_session import PipelineSession  # only runs with stages load its code

        return PipelineSession(
            cast("RemoteStage", worker),
            manifest,
            me=self._peer.me,
            stage=self._entrance.seat.stage,
            host=self._everyone,
            membership=self._membership,
            chain=self._chain,
            is_leaving=is_leaving,
        )

    def beside(
        self, session: PeerSession, loop: OuterLoop, *, rebalance: bool, on_lost: Callable[[str], None]
    ) -> list[Coroutine[Any, Any, None]]:
        """What runs beside the session: moves, by the rule as well if `rebalance`, and a look at the peer's seat."""
        peer, seats = self._peer, self._entrance.seats
        mover = peer.tracker.mover = self._mover(session, loop)
        beside = [mover.run(), self._keep_stage(on_lost)]
        if rebalance:
            view = lambda: placements(seats, self._membership, peer.me.peer, self._chain.trained, {})  # noqa: E731
            beside.append(Rebalancer(peer.me.peer, mover, view=view, say=peer.view.say).run())
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

    async def _fetch(self, target: int) -> None:
        contacts = self._membership.contacts
        peers = lambda: [each.peer for each in contacts() if each.live and each.stage == target]  # noqa: E731
        try:
            await self._entrance.fetch(target, self._everyone, self._peer.me, peers)
        except (StateUnavailable, StateError) as error:
            raise MoveRefused(str(error)) from None

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
