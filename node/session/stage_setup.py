"""A peer's part in a run with stages, built of what the peer holds: its stage, its trainer, its answers to joiners."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from node.config.derived import stage_values
from node.config.manifest import Manifest
from node.config.run_config import RunConfig
from node.joining.bootstrap import AssignStage
from node.joining.stages import StageAssigner, StagePlace
from node.membership.membership import Membership
from node.outer.independent_loop import IndependentOuterLoop
from node.outer.replicated_loop import ReplicatedOuterLoop
from node.runtime.clock import monotonic_seconds
from node.session.resources import EnteredRun, PeerResources
from node.session.stage_entrance import StageEntrance
from node.tasks.spec import StageValues
from node.ui.status_tracker import StatusTracker
from protocols.base import Host, Member

if TYPE_CHECKING:
    from node.joining.stage_plan import StagePlan
    from node.session.pipeline_session import PipelineTrainer

OuterLoopGetter = Callable[[], ReplicatedOuterLoop | IndependentOuterLoop]


class StageSetup:
    """Builds what only a run with stages needs. Only its methods load the code of pipelines."""

    def __init__(self, resources: PeerResources, status_tracker: StatusTracker, say: Callable[[str], None]) -> None:
        """
        Args:
            say: prints a user-facing line.
        """
        self._resources, self._status_tracker, self._say = resources, status_tracker, say

    async def plan(self, config: RunConfig) -> StagePlan | None:
        """Where the model is cut; None in a run without stages. Measures the model, which takes seconds."""
        if config.stages == 1:
            return None
        from node.joining.stage_plan import plan_stages

        plan = await self._resources.compute.run(partial(plan_stages, config, monotonic_seconds), 1 << 30)
        for line in (*plan.table.splitlines(), *plan.advice(config)):
            self._say(line)
        return plan

    async def found(self, manifest: Manifest) -> tuple[StageEntrance | None, StagePlace | None]:
        """The founder's stage; None twice in a run without stages."""
        if not manifest.stages:
            return None, None
        entrance = self._entrance(manifest)
        place = await entrance.found(self._resources.me)
        self._status_tracker.enter_stage(place.stage, len(manifest.stages))
        return entrance, place

    async def enter(self, manifest: Manifest, wanted: int | None) -> tuple[StageEntrance | None, StagePlace | None]:
        """This peer's stage, from its directory or from another peer; None twice in a run without stages.

        Args:
            wanted: the stage that the user wants; None for any.
        """
        if not manifest.stages:
            return None, None
        resources, entrance = self._resources, self._entrance(manifest)
        place = entrance.kept(wanted)
        if place is None:
            self._status_tracker.set_state("joining", "asking which stage this peer works in")
            met = resources.bootstrap.met
            place = await entrance.enter(resources.me, wanted, resources.transport, lambda: met, self._say)
        self._say(f"this peer is in stage {place.stage} (of 0 to {len(manifest.stages) - 1})")
        self._status_tracker.enter_stage(place.stage, len(manifest.stages))
        return entrance, place

    def _entrance(self, manifest: Manifest) -> StageEntrance:
        state = self._resources.state
        return StageEntrance(manifest, state, self._resources.disk, state.identity)

    def trainer(
        self,
        entered: EnteredRun,
        host: Host,
        membership: Membership,
        outer_loop: OuterLoopGetter,
        is_leaving: Callable[[], bool],
    ) -> PipelineTrainer:
        """This peer's part of the pipeline.

        Args:
            host: of the whole run's members.
            outer_loop: returns the outer loop, which is built later.
            is_leaving: returns whether this peer has been asked to leave.
        """
        from node.session.pipeline_session import PipelinePeer, PipelineTrainer, settled_rounds
        from node.training.remote_stage import RemoteStage

        assert entered.place and isinstance(entered.trainer, RemoteStage)
        me, chain = self._resources.me, entered.start.chain

        def lacks_state() -> bool:
            present = outer_loop()
            return not isinstance(present, ReplicatedOuterLoop) or present.lacks_state

        def is_member() -> bool:
            return me in chain.head.roster and not lacks_state()

        def trained() -> int:
            return settled_rounds(chain, lacks_state())

        peer = PipelinePeer(me, entered.place.stage, host, membership, trained, is_member, is_leaving)
        return PipelineTrainer(entered.trainer, peer, entered.manifest)

    def assigner(self, entered: EnteredRun, membership: Membership) -> AssignStage | None:
        """Answers joiners that ask for a stage; None in a run without stages."""
        if entered.entrance is None:
            return None
        me, entrance, transport = self._resources.me, entered.entrance, self._resources.transport
        return StageAssigner(me, entered.manifest, entrance.seats, membership, transport, entrance.keep).assign


def values_of(manifest: Manifest, stage: int, me: Member) -> StageValues | None:
    """The stage's part of a worker's specification; None in a run without stages."""
    if not manifest.stages:
        return None
    return stage_values(manifest.config, manifest.bounds, manifest.elements[stage], stage, me)
