"""Composes a peer's session in the run that it has entered, and what runs beside it: read `open_session`."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

from node.config.derived import machine_rules, protocol_settings
from node.config.manifest import Manifest
from node.config.run_config import RunConfig
from node.doctor.dial_back import PortProber
from node.joining import resume
from node.joining.addresses_file import keep_addresses_file
from node.joining.bootstrap import BootstrapServer, RunInfo, add_candidates, ask_summary, reach
from node.joining.stages import StageAssigner, placements
from node.machine.monitor import MachineMonitor, SleepGuard
from node.membership.handshake import LocalPeer, LocalStage
from node.membership.hello import UNPLACED
from node.membership.membership import Membership
from node.network.dht import DhtDirectory
from node.outer.error_feedback import ErrorFeedback, feedback
from node.outer.independent_loop import IndependentOuterLoop
from node.outer.noloco import NoLoCo
from node.outer.outer_loop import OuterLoop
from node.outer.replicated_loop import ReplicatedOuterLoop
from node.outer.round_history import LocalHistory, RoundHistory
from node.outer.state import OuterSGD, OuterState
from node.reporting.event_feed import EventFeed
from node.reporting.report import RoundEvaluation, RoundReport, tokens_counted
from node.reporting.status import public
from node.reporting.swarm import DECIDED
from node.session.discovery import discover
from node.session.peer_session import PeerSession
from node.session.processes import PeerProcesses
from node.session.stage_entrance import StageEntrance
from node.session.stage_mover import MoveRefused, Rebalancer, StageMover
from node.session.status_tracker import StatusTracker
from node.storage.buffers import ScratchSpace
from node.storage.certificate_log import spool
from node.storage.checkpoint_manager import CheckpointManager
from node.storage.journal import Journal
from node.storage.statedir import StateError
from node.tasks.extra import extra_elements
from node.training.remote import RemoteTrainer
from protocols.aio import Gate, task_group
from protocols.base import Host, Layout, PeerId, Trainer
from protocols.blobs.parts import LEAST_ROUNDS, STORE_ROUNDS, PartCache, PartStore
from protocols.registry import load_averager
from protocols.sync.chain_sync import ChainSync
from protocols.sync.independent_sync import IndependentStateSync
from protocols.sync.snapshot_download import StateUnavailable
from protocols.vectors.codec import codec
from protocols.wire import MAX_ROSTER

if TYPE_CHECKING:
    from node.session.pipeline_session import PipelineSession
    from node.training.remote_stage import RemoteStage

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
    config, state, tracker, view, run = peer.config, peer.state, peer.tracker, peer.view, manifest.config
    key = start.chain.head.key
    newcomer = not start.checkpoints and manifest.founder.peer != peer.me.peer
    history = start.chain if start.shares_anchor else LocalHistory(peer.me, key, lacks_state=newcomer)
    layout = worker.layout
    extra = extra_elements(layout)
    not_sent = feedback(codec(run.codec), sum(layout.sizes()), peer.compute, extra)
    journal = Journal(state.rounds)
    past = await peer.disk.run(journal.recent, 0)  # what earlier incarnations of this peer reported
    # not by the chain alone, which a restart cuts back to the last checkpoint
    decided = any(each.round > 0 or each.outcome in DECIDED for each in past)
    has_begun = lambda: decided or history.head.key.round > 0  # noqa: E731
    stage = local_stage(peer, entrance, start.chain.trained, has_begun) if entrance else None
    membership = _membership(peer, history, stage, unanswered, on_fatal)
    async with (
        DhtDirectory(peer.transport, state.identity, peer.clock, key.run, membership.offset_seconds) as directory,
        ScratchSpace(state.path, peer.disk) as scratch,
        CheckpointManager(
            state.home,
            start.like(manifest.run_id, worker.layout),
            every_rounds=config.checkpoint_every,
            limit_bytes=int(config.disk_limit_bytes),
            disk=peer.disk,
            inner=worker,
            feedback=not_sent,
            sync=start.archive.sync,
        ) as checkpoints,
    ):
        host = Host(peer.transport, directory, membership, peer.compute, peer.clock, state.identity, run.seed)
        pipeline, assigner, everyone = None, None, host
        if entrance:
            from node.session.pipeline_session import PipelineSession  # only runs with stages load its code

            assigner = StageAssigner(
                peer.me,
                entrance.seats,
                membership,
                peer.transport,
                keep=entrance.keep,
                has_begun=has_begun,
            )
            pipeline = PipelineSession(
                cast("RemoteStage", worker),
                manifest,
                me=peer.me,
                stage=entrance.seat.stage,
                host=host,
                membership=membership,
                chain=start.chain,
                is_leaving=is_leaving,
            )
            host = pipeline.host
        loop, sync = _outer_loop(
            peer,
            manifest,
            stage=entrance.seat.stage if entrance else 0,
            start=start,
            history=history,
            host=host,
            membership=membership,
            worker=worker,
            pipeline=pipeline,
            checkpoints=checkpoints,
            scratch=scratch,
            not_sent=not_sent,
        )
        loop.on_progress, loop.activity.announce = tracker.on_progress, membership.announce_activity
        tracker.enter_session(
            history=history,
            membership=membership,
            loop=loop,
            sync=sync,
            worker=worker,
            pipeline=pipeline,
            checkpoints=checkpoints,
            journal=journal,
        )
        await resume.restore(start, loop, worker, checkpoints)
        probe = PortProber(peer.transport.host_of).probe
        assign = assigner.assign if assigner else None
        BootstrapServer(peer.transport, info, lambda: asdict(public(tracker.status())), assign, probe)
        peer.recall(past)
        if isinstance(loop, ReplicatedOuterLoop):
            loop.recall(tokens_counted(past))

        def on_report(report: RoundReport) -> None:
            journal.write(report)
            tracker.reported(report)
            view.report(report)
            peer.swarm.counted.add(report)
            peer.pauses.round_ended()

        session = PeerSession(
            loop,
            sync,
            trainer=pipeline or worker,
            membership=membership,
            state=state,
            disk=peer.disk,
            status_tracker=tracker,
            view=view,
            on_report=on_report,
            on_evaluated=partial(_evaluated, journal, tracker, view),
            run_rounds=run.recipe.rounds,
            rounds=None if config.rounds is None else max(1, config.rounds - peer.rounds_done),
            wait_for_peers=config.wait_for_peers if key.round == 0 and not peer.has_moved else 1,
            pipeline=pipeline,
        )
        peer.pauses.attach(loop.pause, lambda: loop.holds_up_run)

        async def save() -> None:
            await loop.keep()
            await checkpoints.published()

        beside = [
            discover(membership, directory, peer.me.peer, tracker.greeted_addresses),
            peer.pauses.run(),
            MachineMonitor(machine_rules(config), peer.files, peer.pauses.wish, peer.limits.quota).run(),
            SleepGuard(save).run(),
            peer.swarm.run(partial(ask_summary, peer.transport), lambda: _live(membership)),
        ]
        if entrance and assigner:
            mover = _mover(peer, entrance, everyone, membership, session=session, loop=loop, has_begun=has_begun)
            if run.rebalance:
                beside.append(_rebalancer(peer, mover, entrance, membership, lambda: start.chain.trained).run())
            beside += [mover.run(), _keep_stage(entrance, assigner, has_begun, config.stage, on_lost)]
        if config.addresses_file:
            beside.append(keep_addresses_file(config.addresses_file, tracker.addresses, peer.files, view.say))
        async with task_group() as group:
            helpers = [group.create_task(each) for each in beside]
            yield session
            tracker.mover = None
            for each in helpers:
                each.cancel()


def local_stage(
    peer: PeerProcesses, entrance: StageEntrance, trained: int, has_begun: Callable[[], bool]
) -> LocalStage:
    """What this peer says of its stage, at which so many rounds have trained."""
    stage = LocalStage(entrance.line, entrance.seats, has_begun)
    pinned = peer.config.stage is not None or peer.state.is_pinned
    stage.placement = replace(UNPLACED, pinned=pinned, arrived=max(1, trained) if peer.has_moved else 0)
    stage.shown(peer.me.peer)  # so a seat that was used is final before others show theirs
    return stage


def _mover(
    peer: PeerProcesses,
    entrance: StageEntrance,
    host: Host,
    membership: Membership,
    *,
    session: PeerSession,
    loop: OuterLoop,
    has_begun: Callable[[], bool],
) -> StageMover:
    """What moves this peer to another stage if it is asked to. `host` is of the members of all stages."""

    def is_busy() -> str:
        if session.is_leaving:
            return "this peer is leaving the run"
        if loop.activity.pauses:
            return "this peer is paused: resume it first"
        return "" if has_begun() else "the run has not begun: its stages are still being given"

    async def fetch(target: int) -> None:
        peers = lambda: [each.peer for each in membership.contacts() if each.live and each.stage == target]  # noqa: E731
        try:
            await entrance.fetch(target, host, peer.me, peers)
        except (StateUnavailable, StateError) as error:
            raise MoveRefused(str(error)) from None

    def leave(target: int) -> None:
        session.leave(target, by_hand=mover.is_by_hand)

    peer.tracker.mover = mover = StageMover(
        peer.me,
        entrance.seat.stage,
        seats=entrance.seats,
        membership=membership,
        roster=lambda: loop.chain.head.roster,
        is_busy=is_busy,
        fetch=fetch,
        leave=leave,
        say=peer.view.say,
    )
    return mover


def _rebalancer(
    peer: PeerProcesses, mover: StageMover, entrance: StageEntrance, membership: Membership, trained: Callable[[], int]
) -> Rebalancer:
    view = lambda: placements(entrance.seats, membership, peer.me.peer, trained(), {})  # noqa: E731
    return Rebalancer(peer.me.peer, mover, view=view, say=peer.view.say)


def _evaluated(journal: Journal, tracker: StatusTracker, view: EventFeed, evaluation: RoundEvaluation) -> None:
    journal.evaluated(evaluation)
    tracker.evaluated(evaluation)
    view.evaluated(evaluation)


async def _keep_stage(
    entrance: StageEntrance,
    assigner: StageAssigner,
    has_begun: Callable[[], bool],
    wanted: int | None,
    on_lost: Callable[[str], None],
) -> None:
    """Watch whether this peer has to ask for a stage again before the run has begun; for another only if it may."""

    def needed() -> tuple[int, ...]:
        return tuple(stage for stage in assigner.needed() if wanted in (None, stage))

    on_lost(await entrance.until_lost(has_begun, needed))


def _live(membership: Membership) -> list[PeerId]:
    return [each.peer for each in membership.contacts() if each.live]


def _membership(
    peer: PeerProcesses,
    history: RoundHistory,
    stage: LocalStage | None,
    unanswered: Sequence[str],
    on_fatal: Callable[[str], None],
) -> Membership:
    """The run's membership. From now on it receives the peers that files of addresses name."""
    tracker, bootstrap, key = peer.tracker, peer.bootstrap, history.head.key
    silent = {other: address for address, _, other in (each.rpartition("/p2p/") for each in unanswered)}
    local = LocalPeer(
        me=peer.me,
        run=key.run,
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
        wanted=lambda: [*(member.peer for member in history.members(MAX_ROSTER) if member != peer.me), *silent],
        reach=partial(reach, peer.transport.connect),
        drop=peer.transport.forget,
        seen_at=peer.transport.seen_at,
        on_duplicate_identity=on_fatal,
        say=peer.view.say,
    )
    met = {other: (address.rpartition("/p2p/")[0],) for other, address in bootstrap.met.items()}
    given = {other: (address,) for other, address in silent.items()}
    for known in (given, met, peer.state.peers()):
        for other, addresses in known.items():
            membership.add_candidate(other, addresses)
    bootstrap.on_named = add_candidates(membership)
    return membership


def _outer_loop(
    peer: PeerProcesses,
    manifest: Manifest,
    *,
    stage: int,
    start: resume.RestartPoint,
    history: RoundHistory,
    host: Host,
    membership: Membership,
    worker: RemoteTrainer,
    pipeline: PipelineSession | None,
    checkpoints: CheckpointManager,
    scratch: ScratchSpace,
    not_sent: ErrorFeedback | None,
) -> OuterLoopAndSync:
    """The outer loop of the run's protocol, and what fetches the state that it misses."""
    run, state, snapshots = manifest.config, peer.state, checkpoints.snapshots
    settings = protocol_settings(manifest, peer.config, state.incarnation, stage, peer.limits.claim)
    anchor, rule = worker.anchor(), _outer_rule(run, worker.layout)
    trainer: Trainer = pipeline.trainer if pipeline else worker
    if isinstance(history, LocalHistory):
        averager = load_averager(run.protocol)(host, settings)
        independent = IndependentOuterLoop(
            history,
            averager,
            # a copy: exchanges may change the state while the worker trains from its own start
            state=OuterState(anchor.clone(), rule, host.compute),
            trainer=trainer,
            wall=peer.clock.wall,
            checkpoints=checkpoints,
            compare=membership.compare,
            spread_limit=run.spread_limit,
            run_rounds=run.recipe.rounds,
            rounds_of_others=membership.rounds,
        )
        is_whole = lambda: not independent.seeks_state  # noqa: E731
        peers = membership.peers
        return independent, IndependentStateSync(
            host, settings, snapshots=snapshots, key=lambda: history.key, hints=peers, has_state=is_whole
        )
    gate = Gate()
    fragments = run.recipe.fragment_count  # the means of a whole state take this number of rounds
    least_rounds = fragments * max(LEAST_ROUNDS, KEEP_CHECKPOINTS * peer.config.checkpoint_every)
    store = PartStore(
        scratch.allocate, peer.disk, gate, most_rounds=fragments * STORE_ROUNDS, least_rounds=least_rounds
    )
    parts = PartCache(host, store, gate)
    sync = ChainSync(
        host,
        settings,
        chain=start.chain,
        snapshots=snapshots,
        part_cache=parts,
        hints=membership.peers,
        make_archive=partial(spool, state.home),
        on_better=lambda branch: butterfly.supersede(),
    )
    butterfly = load_averager(run.protocol)(host, settings, parts, sync.hear)
    replicated = ReplicatedOuterLoop(
        start.chain,
        butterfly,
        state=OuterState(anchor, rule, host.compute),
        trainer=trainer,
        wall=peer.clock.wall,
        feedback=not_sent,
        checkpoints=checkpoints,
        overlaps=settings.overlaps,
        alone=pipeline.trainer.train_alone if pipeline else None,
    )
    if pipeline:
        pipeline.change = lambda: replicated.change
    return replicated, sync


def _outer_rule(run: RunConfig, layout: Layout) -> OuterSGD | NoLoCo:
    """SGD, or NoLoCo if the run's recipe sets `outer_pull`, as only runs with independent state may."""
    recipe, extra = run.recipe, extra_elements(layout)
    rate, momentum = recipe.outer_learning_rate, recipe.outer_momentum
    if recipe.outer_pull is not None:
        return NoLoCo(momentum, rate, recipe.outer_pull, extra)
    return OuterSGD(rate, momentum, recipe.rounds, recipe.outer_decay or 0.0, extra, recipe.fragment_count)
