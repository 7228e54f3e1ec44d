"""Builds a peer's session in the run that it has entered, with its outer loop and its storage, and runs it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from node.config.derived import protocol_settings
from node.config.peer_config import PeerConfig
from node.joining import resume
from node.joining.addresses_file import AddressesFile
from node.joining.bootstrap import BootstrapServer
from node.joining.known_peers import add_candidates, build_membership, local_peer
from node.joining.run_selector import RunSelector
from node.membership.handshake import LocalStage
from node.membership.membership import Membership
from node.network.dht import DhtDirectory
from node.outer.error_feedback import feedback
from node.outer.replicated_loop import ReplicatedOuterLoop
from node.outer.round_history import LocalHistory, RoundHistory
from node.reporting.event_feed import EventFeed
from node.reporting.report import tokens_counted
from node.reporting.status import public
from node.runtime.clock import WallClock
from node.session.machine_watch import watch_machine
from node.session.outer_loop_factory import OuterLoopFactory
from node.session.peer_session import SAMPLE_PROMPT, OuterLoopStack, PeerSession, PeerSessionDeps, SessionLimits
from node.session.resources import EnteredRun, PeerResources
from node.session.stage_setup import StageSetup
from node.session.traffic_limits import TrafficLimits
from node.storage.checkpoint_manager import CheckpointManager, CheckpointStorage
from node.storage.journal import Journal
from node.storage.scratch import ScratchSpace
from node.tasks.extra import extra_elements
from node.training.remote import RemoteTrainer
from node.ui.status_tracker import OuterLoopSources, StatusTracker
from protocols.aio import Gate, run_with_helper, task_group
from protocols.base import Host
from protocols.butterfly.part_store import LEAST_ROUNDS, PartStore
from protocols.vectors.codec import codec

if TYPE_CHECKING:
    from node.session.pipeline_session import PipelineTrainer

KEEP_CHECKPOINTS = 2
"""Checkpoints for which a peer keeps at least the reduced parts since: a joiner that fetches one needs them."""


@dataclass(frozen=True, slots=True)
class PeerServices:
    """What a peer has before its processes start."""

    config: PeerConfig
    clock: WallClock
    view: EventFeed
    status_tracker: StatusTracker
    limits: TrafficLimits
    selector: RunSelector


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a session is built of, besides its outer loop.

    Attributes:
        pipeline: the trainer, if the run has stages.
    """

    membership: Membership
    directory: DhtDirectory
    checkpoints: CheckpointManager
    journal: Journal
    trainer: RemoteTrainer
    host: Host
    pipeline: PipelineTrainer | None


class SessionSetup:
    """Builds and runs the session of a peer in the run that it has entered."""

    def __init__(
        self,
        services: PeerServices,
        resources: PeerResources,
        entered: EnteredRun,
        on_fatal: Callable[[str], None],
        is_leaving: Callable[[], bool],
    ) -> None:
        """
        Args:
            on_fatal: ends the peer, for a reason.
            is_leaving: returns whether this peer has been asked to leave.
        """
        self._services, self._resources, self._entered = services, resources, entered
        self._on_fatal, self._is_leaving = on_fatal, is_leaving
        self._stages = StageSetup(resources, services.status_tracker, services.view.say)
        layout = entered.trainer.layout
        sent_by, elements = codec(entered.manifest.config.codec), sum(layout.sizes())
        self._feedback = feedback(sent_by, elements, resources.compute, extra_elements(layout))

    async def run(self, on_built: Callable[[PeerSession], None]) -> None:
        """Build the session, and run it until the run is over or this peer leaves.

        Args:
            on_built: called with the session before it begins.
        """
        resources, services, start = self._resources, self._services, self._entered.start
        transport, state, key = resources.transport, resources.state, start.chain.head.key
        history = start.chain if start.shares_anchor else LocalHistory(resources.me, key)
        membership = self._membership(history)
        services.status_tracker.join_swarm(history, membership)
        offset = membership.offset_seconds
        async with (
            DhtDirectory(transport, state.identity, services.clock, key.run, offset) as directory,
            ScratchSpace(state.path, resources.disk) as scratch,
            self._checkpoints() as checkpoints,
        ):
            trainer, journal = self._entered.trainer, Journal(state.rounds)
            seed, compute = self._entered.manifest.config.seed, resources.compute
            host = Host(transport, directory, membership, compute, services.clock, state.identity, seed)
            pipeline = None
            stack: OuterLoopStack  # the pipeline's part asks for it only once the session runs
            if self._entered.place:
                outer_loop = lambda: stack.outer_loop  # noqa: E731
                pipeline = self._stages.trainer(self._entered, host, membership, outer_loop, self._is_leaving)
                trainer, host = cast(RemoteTrainer, pipeline), pipeline.host
            parts = _Parts(membership, directory, checkpoints, journal, trainer, host, pipeline)
            stack = self._outer_loop(parts, history, scratch)
            self._show_sources(parts, stack)
            await resume.restore(start, stack.outer_loop, trainer, checkpoints)
            status = lambda: asdict(public(services.status_tracker.status()))  # noqa: E731
            assign = self._stages.assigner(self._entered, membership)
            BootstrapServer(transport, self._entered.run, status, assign)
            await self._recall(journal, stack)
            limits = self._session_limits(key.round)
            session = PeerSession(self._deps(parts, stack), limits, services.status_tracker, services.view)
            resources.pauses.attach(stack.outer_loop.pause, lambda: stack.outer_loop.holds_up_run)
            on_built(session)
            await run_with_helper(session.run(), self._follow_machine(parts, stack))

    # -- parts --------------------------------------------------------------------------------------------------------

    def _membership(self, history: RoundHistory) -> Membership:
        """Build the run's membership. From now on it receives the peers that files of addresses name."""
        resources, services, entered = self._resources, self._services, self._entered
        tracker, bootstrap, state = services.status_tracker, resources.bootstrap, resources.state
        local = local_peer(resources.me, tracker.nickname, tracker.addresses, history)
        if entered.place and entered.entrance:
            place, seats = entered.place, entered.entrance.seats
            local = replace(local, stage=LocalStage(place.stage, place.seat, seats.judge))
        unanswered = services.selector.given(bootstrap) if services.selector.alone else ()
        membership = build_membership(
            resources.transport,
            local,
            clock=services.clock,
            signer=state.identity,
            history=history,
            met=bootstrap.met,
            unanswered=unanswered,
            remembered=state.peers(),
            on_duplicate_identity=self._on_fatal,
            say=services.view.say,
        )
        bootstrap.set_listener(add_candidates(membership))
        return membership

    def _checkpoints(self) -> CheckpointManager:
        resources, entered, config = self._resources, self._entered, self._services.config
        path, sync, trainer = resources.state.path, entered.start.archive.sync, entered.trainer
        like = entered.start.like(entered.manifest.run_id, trainer.layout)
        limit_bytes = int(config.disk_limit_bytes)
        storage = CheckpointStorage(path, config.checkpoint_every, limit_bytes, resources.disk, sync)
        return CheckpointManager(storage, like, trainer, self._feedback)

    def _outer_loop(self, parts: _Parts, history: RoundHistory, scratch: ScratchSpace) -> OuterLoopStack:
        resources, services, entered = self._resources, self._services, self._entered
        manifest, start, state = entered.manifest, entered.start, resources.state
        stage = entered.place.stage if entered.place else 0
        claim = services.limits.claim
        settings = protocol_settings(manifest, services.config, state.incarnation, stage, claim)
        on_progress = services.status_tracker.on_progress
        factory = OuterLoopFactory(
            parts.host, settings, manifest.config, parts.trainer, parts.checkpoints, parts.membership, on_progress
        )
        if isinstance(history, LocalHistory):
            newcomer = not start.checkpoints and manifest.founder.peer != resources.me.peer
            return factory.independent(history, newcomer)
        return factory.replicated(start.chain, partial(self._part_store, scratch), state.path, self._feedback)

    def _part_store(self, scratch: ScratchSpace, gate: Gate) -> PartStore:
        least_rounds = max(LEAST_ROUNDS, KEEP_CHECKPOINTS * self._services.config.checkpoint_every)
        return PartStore(scratch.allocate, self._resources.disk, gate, least_rounds=least_rounds)

    def _show_sources(self, parts: _Parts, stack: OuterLoopStack) -> None:
        """Let the status show this session."""
        clock, transport, trainer, made = (
            self._services.clock,
            self._resources.transport,
            parts.trainer,
            parts.checkpoints,
        )
        sources = OuterLoopSources(
            parts.journal,
            stack.outer_loop.waiting_for,
            stack.sync.sync_progress.progress,
            lambda: made.age_seconds(clock.wall()),
            lambda: [pid for pid in (os.getpid(), trainer.pid, transport.daemon_pid) if pid],
            worker_restarts=lambda: trainer.restarts,
            joiners=lambda: stack.sync.joiners,
            checkpoint_problem=lambda: made.problem,
        )
        if parts.pipeline:
            sources = replace(sources, waiting_reason=parts.pipeline.waiting_reason)
        self._services.status_tracker.start_outer_loop(sources)

    async def _recall(self, journal: Journal, stack: OuterLoopStack) -> None:
        """Take up what earlier incarnations of this peer reported."""
        past = await self._resources.disk.run(journal.recent, 0)
        self._services.view.recall(past)
        if isinstance(stack.outer_loop, ReplicatedOuterLoop):
            stack.outer_loop.recall(tokens_counted(past))

    def _deps(self, parts: _Parts, stack: OuterLoopStack) -> PeerSessionDeps:
        resources, services, pipeline = self._resources, self._services, parts.pipeline
        deps = PeerSessionDeps(
            *stack,
            parts.trainer,
            parts.membership,
            parts.directory,
            resources.state,
            parts.journal,
            resources.lag,
            services.clock,
            resources.disk,
            texts=services.view,
            prompt=b"" if self._entered.manifest.config.hf else SAMPLE_PROMPT,
            on_round_end=resources.pauses.round_ended,
        )
        if pipeline is None:
            return deps
        return replace(
            deps,
            annotate=pipeline.annotate,
            is_run_over=pipeline.is_run_over,
            lacking=pipeline.waiting_reason,
            on_decided=pipeline.announce_decided,
        )

    def _session_limits(self, round_number: int) -> SessionLimits:
        config = self._services.config
        wait_for = config.wait_for_peers if round_number == 0 else 1
        return SessionLimits(self._entered.manifest.config.recipe.rounds, config.rounds, wait_for)

    # -- beside the rounds --------------------------------------------------------------------------------------------

    async def _follow_machine(self, parts: _Parts, stack: OuterLoopStack) -> None:
        """Pause as user and machine wish, and keep this peer's addresses in the file where others look for them."""
        resources, services = self._resources, self._services

        async def save() -> None:
            await stack.outer_loop.keep()
            await parts.checkpoints.published()

        async with task_group() as group:
            group.create_task(
                watch_machine(services.config, resources.pauses, services.limits.quota, resources.files, save)
            )
            if path := services.config.addresses_file:
                addresses = services.status_tracker.addresses
                group.create_task(AddressesFile(path, addresses, resources.files, services.view.say).run())
