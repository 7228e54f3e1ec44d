"""Composes a peer's session in the run that it has entered, and what runs beside it: read `open_session`."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from node.config.derived import machine_rules, protocol_settings
from node.config.manifest import Manifest
from node.config.run_config import RunConfig
from node.doctor.dial_back import PortProber
from node.joining import resume
from node.joining.addresses_file import keep_addresses_file
from node.joining.bootstrap import BootstrapServer, RunInfo, add_candidates, ask_summary, reach
from node.joining.stages import StageAssigner
from node.machine.monitor import MachineMonitor, SleepGuard
from node.membership.handshake import LocalPeer, LocalStage
from node.membership.membership import Membership
from node.membership.watching import Known, Role, roster_role, stage_role
from node.network.dht import DhtDirectory
from node.outer.error_feedback import feedback
from node.outer.independent_loop import IndependentOuterLoop
from node.outer.noloco import NoLoCo
from node.outer.outer_loop import OuterLoop
from node.outer.replicated_loop import ReplicatedOuterLoop
from node.outer.round_history import LocalHistory, RoundHistory
from node.outer.state import OuterSGD, OuterState
from node.reporting.report import RoundEvaluation, RoundReport, tokens_counted
from node.reporting.status import public
from node.reporting.swarm import DECIDED
from node.session.discovery import discover
from node.session.peer_session import PeerSession
from node.session.processes import PeerProcesses
from node.session.stage_entrance import StageEntrance
from node.session.stage_parts import StageParts, local_stage
from node.storage.buffers import ScratchSpace
from node.storage.certificate_log import spool
from node.storage.checkpoint_manager import CheckpointManager
from node.storage.journal import Journal
from node.tasks.extra import extra_elements
from node.training.remote import RemoteTrainer
from protocols.aio import Gate, task_group
from protocols.base import Host, Layout, PeerId, Settings
from protocols.blobs.parts import LEAST_ROUNDS, STORE_ROUNDS, PartCache, PartStore
from protocols.consensus.record import genesis
from protocols.consensus.vote_tally import SMALL_ROSTER
from protocols.registry import load_averager
from protocols.sync.chain_sync import ChainSync
from protocols.sync.independent_sync import IndependentStateSync
from protocols.vectors.codec import codec
from protocols.wire import MAX_ROSTER

if TYPE_CHECKING:
    from node.session.pipeline_session import PipelineSession

OuterLoopAndSync: TypeAlias = tuple[ReplicatedOuterLoop, ChainSync] | tuple[IndependentOuterLoop, IndependentStateSync]
KEEP_CHECKPOINTS = 2
"""Checkpoints for which a peer keeps at least the reduced parts since: a joiner that fetches one needs them."""


@asynccontextmanager
async def open_session(
    peer: PeerProcesses,
    *,
    manifest: Manifest,
    info: RunInfo,
    start: resume.RestartPoint,
    worker: RemoteTrainer,
    entrance: StageEntrance | None,
    unanswered: Sequence[str],
    on_fatal: Callable[[str], None],
    on_lost: Callable[[str], None],
    is_leaving: Callable[[], bool],
) -> AsyncIterator[PeerSession]:
    """Build the session, and keep up what runs beside it until the context ends.

    `info` is what joiners get of the run. `entrance` led to this peer's stage; None without stages. `unanswered` are
    multiaddrs that the user gave and where no peer answered. `on_lost` is called with the reason if this peer has to
    ask for a stage again.
    """
    build = SessionBuilder(peer, manifest, start, worker)
    past = await peer.disk.run(build.journal.recent, 0)  # what earlier incarnations of this peer reported
    has_begun = build.has_begun(past, is_again=bool(entrance and entrance.seat.base))
    stage = local_stage(peer, entrance, start.chain, has_begun) if entrance else None
    membership = build.membership(stage, unanswered, on_fatal)
    async with (
        build.directory(membership) as directory,
        ScratchSpace(peer.state.path, peer.disk) as scratch,
        build.checkpoints() as checkpoints,
    ):
        host = build.host(directory, membership)
        parts, pipeline = None, None
        if entrance:
            parts = StageParts(
                peer,
                entrance,
                manifest=manifest,
                chain=start.chain,
                membership=membership,
                everyone=host,
                has_begun=has_begun,
            )
            pipeline = parts.pipeline(worker, is_leaving)
        loop, sync = build.outer_loop(
            pipeline.host if pipeline else host, membership, pipeline, checkpoints=checkpoints, scratch=scratch
        )
        await resume.restore(start, loop, worker, checkpoints)
        build.answer_joiners(info, parts.assigner if parts else None)
        peer.recall(past)
        if isinstance(loop, ReplicatedOuterLoop):
            loop.recall(tokens_counted(past))
        session = build.session(loop, sync, membership, pipeline)
        peer.pauses.attach(loop.pause, lambda: loop.holds_up_run)
        beside = build.beside(membership, directory, loop, checkpoints)
        if parts:
            beside += parts.beside(session, loop, rebalance=bool(manifest.config.rebalance), on_lost=on_lost)
        async with task_group() as group:
            helpers = [group.create_task(each) for each in beside]
            yield session
            peer.tracker.mover = peer.tracker.backups = peer.tracker.refill = None
            for each in helpers:
                each.cancel()


class SessionBuilder:
    """Builds the parts of one session, which share the peer, its run, the restart point and the worker."""

    def __init__(
        self, peer: PeerProcesses, manifest: Manifest, start: resume.RestartPoint, worker: RemoteTrainer
    ) -> None:
        self._peer, self._manifest, self._run, self._start = peer, manifest, manifest.config, start
        self._worker, self._key = worker, start.chain.head.key
        newcomer = not start.checkpoints and manifest.founder.peer != peer.me.peer
        self._history: RoundHistory = (
            start.chain if start.shares_anchor else LocalHistory(peer.me, self._key, lacks_state=newcomer)
        )
        self.journal = Journal(peer.state.rounds)
        # in a run with clusters, once the averager is built: see `Butterfly.ties` and `Butterfly.followers`
        self._ties: Callable[[], tuple[PeerId, ...]] = tuple
        self._followers: Callable[[], tuple[PeerId, ...]] = tuple
        vectors, elements = codec(self._run.codec), sum(worker.layout.sizes())
        self._not_sent = feedback(vectors, elements, peer.compute, extra_elements(worker.layout))

    def has_begun(self, past: Sequence[RoundReport], is_again: bool = False) -> Callable[[], bool]:
        """Whether a mean was decided at this peer, which has reported the `past` rounds, or its stage began again.

        A first member whose stage was given to another peer meanwhile may still fork and skip rounds by itself.
        """
        # not by the chain alone, which a restart cuts back to the last checkpoint
        chain = self._start.chain
        decided = is_again or any(each.outcome in DECIDED and each.peers for each in past)
        unmoved = genesis(self._key.run, self._key.scope)
        return lambda: decided or chain.head.anchor != unmoved

    def membership(
        self, stage: LocalStage | None, unanswered: Sequence[str], on_fatal: Callable[[str], None]
    ) -> Membership:
        """The run's membership. From now on it receives the peers that files of addresses name."""
        peer, tracker, bootstrap, history = self._peer, self._peer.tracker, self._peer.bootstrap, self._history
        silent = {other: address for address, _, other in (each.rpartition("/p2p/") for each in unanswered)}
        local = LocalPeer(
            me=peer.me,
            run=self._key.run,
            nonce=secrets.randbits(63),
            nickname=tracker.nickname,
            addresses=lambda: [address.rpartition("/p2p/")[0] for address in tracker.greeted_addresses()],
            round=lambda: history.head.key.round,
            stage=stage,
        )
        membership = Membership(
            peer.transport,
            local,
            clock=peer.clock,
            signer=peer.state.identity,
            wanted=lambda: [*self._members(), *self._ties(), *self._followers(), *silent],
            role=partial(self._role, stage),
            reach=partial(reach, peer.transport.connect),
            drop=peer.transport.forget,
            seen_at=peer.transport.seen_at,
            on_duplicate_identity=on_fatal,
            say=peer.view.say,
        )
        peer.private.offset_seconds = membership.offset_seconds
        met = {other: (address.rpartition("/p2p/")[0],) for other, address in bootstrap.met.items()}
        given = {other: (address,) for other, address in silent.items()}
        for known in (given, met, peer.state.peers()):
            for other, addresses in known.items():
                membership.add_candidate(other, addresses)
        bootstrap.on_named = add_candidates(membership)
        return membership

    def _members(self) -> list[PeerId]:
        """The others of the latest rosters."""
        return [member.peer for member in self._history.members(MAX_ROSTER) if member != self._peer.me]

    def _role(self, stage: LocalStage | None, known: Sequence[Known]) -> Role:
        """Which peers to watch if there are too many. Peers with independent state watch any others."""
        if isinstance(self._history, LocalHistory):
            return Role()
        roster = [member.peer for member in self._history.head.roster]
        role = roster_role(self._peer.me.peer, roster, self._ties())
        if stage is None:
            return role
        seats = stage.seats  # those that were given and not used yet count until their peers are away
        firsts = [seat.member.peer for seat in seats.known.values() if not seats.is_final(seat)]
        return stage_role(role, stage.seat.stage, seats.stages, firsts, known)

    def directory(self, membership: Membership) -> DhtDirectory:
        peer = self._peer
        return DhtDirectory(peer.transport, peer.state.identity, peer.clock, self._key.run, membership.offset_seconds)

    def host(self, directory: DhtDirectory, membership: Membership) -> Host:
        peer, seed, removed = self._peer, self._run.seed, self._peer.private.exchange.has_removed
        return Host(peer.transport, directory, membership, peer.compute, peer.clock, peer.state.identity, seed, removed)

    def checkpoints(self) -> CheckpointManager:
        peer = self._peer
        return CheckpointManager(
            peer.state.home,
            self._start.like(self._manifest.run_id, self._worker.layout),
            every_rounds=peer.config.checkpoint_every,
            limit_bytes=int(peer.config.disk_limit_bytes),
            disk=peer.disk,
            inner=self._worker,
            feedback=self._not_sent,
            sync=self._start.archive.sync,
        )

    def outer_loop(
        self,
        host: Host,
        membership: Membership,
        pipeline: PipelineSession | None,
        *,
        checkpoints: CheckpointManager,
        scratch: ScratchSpace,
    ) -> OuterLoopAndSync:
        """The outer loop of the run's protocol, and what fetches the state that it misses. The status shows both."""
        peer, stage = self._peer, pipeline.stage if pipeline else 0
        settings = protocol_settings(self._manifest, peer.config, peer.state.incarnation, stage, peer.limits.claim)
        made: OuterLoopAndSync
        if isinstance(self._history, LocalHistory):
            made = self._independent(self._history, host, settings, membership, checkpoints)
        else:
            parts = self._part_cache(host, scratch)
            made = self._replicated(host, settings, membership, pipeline, checkpoints=checkpoints, parts=parts)
        loop, sync = made
        loop.on_progress, loop.activity.announce = peer.tracker.on_progress, membership.announce_activity
        peer.tracker.enter_session(
            history=self._history,
            membership=membership,
            loop=loop,
            sync=sync,
            worker=self._worker,
            pipeline=pipeline,
            checkpoints=checkpoints,
            journal=self.journal,
        )
        return made

    def _independent(
        self,
        history: LocalHistory,
        host: Host,
        settings: Settings,
        membership: Membership,
        checkpoints: CheckpointManager,
    ) -> tuple[IndependentOuterLoop, IndependentStateSync]:
        run, worker = self._run, self._worker
        loop = IndependentOuterLoop(
            history,
            load_averager(run.protocol)(host, settings),
            # a copy: exchanges may change the state while the worker trains from its own start
            state=OuterState(worker.anchor().clone(), _outer_rule(run, worker.layout), host.compute),
            trainer=worker,
            wall=host.clock.wall,
            checkpoints=checkpoints,
            compare=membership.compare,
            spread_limit=run.spread_limit,
            run_rounds=run.recipe.rounds,
            rounds_of_others=membership.rounds,
        )
        return loop, IndependentStateSync(
            host,
            settings,
            snapshots=checkpoints.snapshots,
            key=lambda: history.key,
            hints=membership.peers,
            has_state=lambda: not loop.seeks_state,
        )

    def _replicated(
        self,
        host: Host,
        settings: Settings,
        membership: Membership,
        pipeline: PipelineSession | None,
        *,
        checkpoints: CheckpointManager,
        parts: PartCache,
    ) -> tuple[ReplicatedOuterLoop, ChainSync]:
        run, worker, chain = self._run, self._worker, self._start.chain
        most = min(SMALL_ROSTER, settings.voters)  # a record admits no more
        wanted = 1 if pipeline else min(self._peer.config.wait_for_peers, most)

        def least_members() -> int:
            return 1 if chain.trained else wanted

        awaits_backup = pipeline.awaits_backup if pipeline else settings.awaits_backup
        settings = replace(settings, least_members=least_members, awaits_backup=awaits_backup)
        sync = ChainSync(
            host,
            settings,
            chain=chain,
            snapshots=checkpoints.snapshots,
            part_cache=parts,
            hints=membership.peers,
            make_archive=partial(spool, self._peer.state.home),
            on_better=lambda branch: butterfly.supersede(),
        )
        butterfly = load_averager(run.protocol)(host, settings, parts, sync.hear, chain.lineage_of)
        lead: Callable[[], PeerId] = str
        if settings.clusters:
            self._peer.tracker.lead = lead = lambda: butterfly.lead
            self._ties, self._followers = butterfly.ties, butterfly.followers
        loop = ReplicatedOuterLoop(
            chain,
            butterfly,
            state=OuterState(worker.anchor(), _outer_rule(run, worker.layout), host.compute),
            trainer=pipeline.trainer if pipeline else worker,
            wall=host.clock.wall,
            feedback=self._not_sent,
            checkpoints=checkpoints,
            overlaps=settings.overlaps,
            alone=pipeline.trainer.train_alone if pipeline else None,
            least_members=least_members,
            lead=lead,
        )
        if pipeline:
            pipeline.change = lambda: loop.change
        return loop, sync

    def _part_cache(self, host: Host, scratch: ScratchSpace) -> PartCache:
        gate = Gate()
        fragments = self._run.recipe.fragment_count  # the means of a whole state take this number of rounds
        least_rounds = fragments * max(LEAST_ROUNDS, KEEP_CHECKPOINTS * self._peer.config.checkpoint_every)
        most_rounds, disk = fragments * STORE_ROUNDS, self._peer.disk
        store = PartStore(scratch.allocate, disk, gate, most_rounds=most_rounds, least_rounds=least_rounds)
        return PartCache(host, store, gate)

    def answer_joiners(self, info: RunInfo, assigner: StageAssigner | None) -> None:
        peer = self._peer
        probe, assign = PortProber(peer.transport.host_of).probe, assigner.assign if assigner else None
        BootstrapServer(peer.transport, info, lambda: asdict(public(peer.tracker.status())), assign, probe)

    def session(
        self,
        loop: OuterLoop,
        sync: ChainSync | IndependentStateSync,
        membership: Membership,
        pipeline: PipelineSession | None,
    ) -> PeerSession:
        peer, config = self._peer, self._peer.config
        return PeerSession(
            loop,
            sync,
            trainer=pipeline or self._worker,
            membership=membership,
            state=peer.state,
            disk=peer.disk,
            status_tracker=peer.tracker,
            view=peer.view,
            on_report=self._on_report,
            on_evaluated=self._on_evaluated,
            run_rounds=self._run.recipe.rounds,
            rounds=None if config.rounds is None else max(1, config.rounds - peer.rounds_done),
            wait_for_peers=config.wait_for_peers if self._key.round == 0 and not peer.has_moved else 1,
            pipeline=pipeline,
        )

    def _on_report(self, report: RoundReport) -> None:
        peer = self._peer
        self.journal.write(report)
        peer.tracker.reported(report)
        peer.view.report(report)
        peer.swarm.counted.add(report)
        peer.pauses.round_ended()

    def _on_evaluated(self, evaluation: RoundEvaluation) -> None:
        self.journal.evaluated(evaluation)
        self._peer.tracker.evaluated(evaluation)
        self._peer.view.evaluated(evaluation)

    def beside(
        self, membership: Membership, directory: DhtDirectory, loop: OuterLoop, checkpoints: CheckpointManager
    ) -> list[Coroutine[Any, Any, None]]:
        """What runs beside the session, with or without stages."""
        peer, config, addresses = self._peer, self._peer.config, self._peer.tracker.addresses

        async def save() -> None:
            await loop.keep()
            await checkpoints.published()

        live = lambda: [each.peer for each in membership.contacts() if each.live]  # noqa: E731
        beside = [
            discover(membership, directory, peer.me.peer, peer.tracker.greeted_addresses),
            peer.pauses.run(),
            MachineMonitor(machine_rules(config), peer.files, peer.pauses.wish, peer.limits.quota).run(),
            SleepGuard(save).run(),
            peer.swarm.run(partial(ask_summary, peer.transport), live),
            peer.private.exchange.spread(live),
        ]
        if config.addresses_file:
            beside.append(keep_addresses_file(config.addresses_file, addresses, peer.files, peer.view.say))
        return beside


def _outer_rule(run: RunConfig, layout: Layout) -> OuterSGD | NoLoCo:
    """SGD, or NoLoCo if the run's recipe sets `outer_pull`, as only runs with independent state may."""
    recipe, extra = run.recipe, extra_elements(layout)
    rate, momentum = recipe.outer_learning_rate, recipe.outer_momentum
    if recipe.outer_pull is not None:
        return NoLoCo(momentum, rate, recipe.outer_pull, extra)
    return OuterSGD(rate, momentum, recipe.rounds, recipe.outer_decay or 0.0, extra, recipe.fragment_count)
