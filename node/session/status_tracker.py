"""The status of a peer, as `starling status` and the terminal show it."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from node._version import VERSION
from node.config.manifest import Manifest
from node.membership.membership import Membership
from node.membership.peer_record import PeerRecord
from node.network.address_scope import shareable
from node.outer.outer_loop import OuterLoop
from node.outer.round_history import LocalHistory, RoundHistory
from node.reporting.report import RoundEvaluation, RoundReport, Totals
from node.reporting.status import OTHERS_REDUCE, PeerStatus, Status, printable, short
from node.runtime.metrics import LoopLag, Vitals, rss_bytes, vitals, with_children
from node.session.pausing import PauseController
from node.session.stage_backups import StageBackups
from node.session.stage_mover import MoveRefused, StageMover
from node.session.stage_refill import StageRefill
from node.session.traffic_limits import TrafficLimits
from node.storage.checkpoint_manager import CheckpointManager
from node.storage.journal import Journal
from node.training.remote import RemoteTrainer
from protocols.base import Clock, LocalProgress, Member, PeerId
from protocols.sync.service import SyncServiceBase
from protocols.wire import MAX_ROSTER

if TYPE_CHECKING:
    from node.network.libp2p import LibP2PTransport
    from node.session.pipeline_session import PipelineSession

_ENDING = ("moving", "leaving", "finished")
_RECENT_ROUNDS = 5
_NOTHING = LocalProgress(0, float("nan"), 0.0, 0.0)


def _ends(state: str) -> int:
    """How far the end of a peer's session is: 0 in the states before."""
    return _ENDING.index(state) + 1 if state in _ENDING else 0


class StatusTracker:
    """Assembles the status of a peer from those of its parts that exist already.

    The peer sets `pauses`, `transport` and `stage` as soon as they are known, and calls `enter_run` and
    `enter_session`. `status()` works before and after each of these.
    """

    pauses: PauseController | None = None
    mover: StageMover | None = None
    backups: StageBackups | None = None
    refill: StageRefill | None = None
    transport: LibP2PTransport | None = None
    stage: int | None = None  # None in a run without stages, too

    # These exist from `enter_session` on.
    _history: RoundHistory
    _membership: Membership
    _loop: OuterLoop
    _sync: SyncServiceBase[Any]
    _worker: RemoteTrainer
    _pipeline: PipelineSession | None
    _checkpoints: CheckpointManager
    _journal: Journal

    def __init__(self, nickname: str, me: Member, limits: TrafficLimits, clock: Clock) -> None:
        self.state, self.reason = "starting", "its processes come up"
        self.nickname, self.peer, self.incarnation = nickname, me.peer, me.incarnation
        self._limits, self.clock = limits, clock
        self.lag = LoopLag()
        self._manifest: Manifest | None = None
        self._run_id = ""
        self._in_session = False
        self.lead: Callable[[], PeerId] = str  # with clusters: the member through which this peer's work counts
        self.moved = ""  # what became of the latest move that ended the session
        self._held_out_loss = self._loss = self._spread = self._spread_limit = float("nan")
        self._work = _NOTHING
        self._ends: deque[float] = deque(maxlen=_RECENT_ROUNDS + 1)

    # -- called by the peer -------------------------------------------------------------------------------------------

    def enter_run(self, manifest: Manifest) -> None:
        self._manifest, self._run_id = manifest, manifest.run_id

    def move(self, stage: int) -> str:
        """Begin to move to another stage; returns a line for the user. Raises `MoveRefused`."""
        if self._manifest and not self._manifest.stages:
            raise MoveRefused("this run has no stages: each peer has the whole model")
        if self.mover is None or not self._in_session:
            raise MoveRefused(f"this peer is {self.state}: ask again when it trains")
        return self.mover.request(stage)

    def begin_again(self, me: Member) -> None:
        """A new incarnation, which has no session yet."""
        self.incarnation, self._in_session, self._work = me.incarnation, False, _NOTHING
        self.state, self.reason = "joining", "its worker starts"

    def enter_session(
        self,
        *,
        history: RoundHistory,
        membership: Membership,
        loop: OuterLoop,
        sync: SyncServiceBase[Any],
        worker: RemoteTrainer,
        pipeline: PipelineSession | None,
        checkpoints: CheckpointManager,
        journal: Journal,
    ) -> None:
        self._history, self._membership, self._loop, self._sync = history, membership, loop, sync
        self._worker, self._pipeline, self._checkpoints, self._journal = worker, pipeline, checkpoints, journal
        self._in_session = True

    def set_state(self, state: str, reason: str = "") -> None:
        """Change the peer's state. A moving or leaving peer stays that until it leaves or has finished."""
        if _ends(state) >= _ends(self.state):
            self.state, self.reason = state, reason

    def on_progress(self, phase: str, work: LocalProgress) -> None:
        self._work = work
        self.set_state(phase, self._why_no_vote())

    def reported(self, report: RoundReport) -> None:
        self._ends.append(asyncio.get_running_loop().time())
        self._loss = report.loss
        if report.held_out_loss == report.held_out_loss:
            self._held_out_loss = report.held_out_loss
        if report.spread == report.spread:
            self._spread, self._spread_limit = report.spread, report.spread_limit
        self._work = _NOTHING

    def evaluated(self, evaluation: RoundEvaluation) -> None:
        self._held_out_loss = evaluation.held_out_loss

    # -- parts of the status ------------------------------------------------------------------------------------------

    def addresses(self) -> Sequence[str]:
        found = self.transport.addresses if self.transport else ()
        return shareable(found) or found

    def greeted_addresses(self) -> Sequence[str]:
        """What other peers are told: also the private addresses that announced ones hide from the join line."""
        return (*self.addresses(), *(self.transport.hidden_addresses if self.transport else ()))

    def contacts(self) -> Sequence[PeerRecord]:
        """The other peers that this one knows; none before the session."""
        return self._membership.contacts() if self._in_session else ()

    def pids(self) -> Sequence[int]:
        if not self._in_session or not self.transport:
            return (os.getpid(),)
        worker, daemon = self._worker.pid, self.transport.daemon_pid
        return (os.getpid(), *(with_children(worker) if worker else ()), *((daemon,) if daemon else ()))

    def vitals(self) -> Vitals:
        """Take the event loop's lag since the last call, and measure the peer's processes."""
        return vitals(self.lag, self.pids())

    def refused(self) -> Mapping[str, int]:
        """Part of the peer -> number of peers and messages refused by it."""
        return {"membership": sum(self._membership.refused.values())} if self._in_session else {}

    def restarts(self) -> Mapping[str, int]:
        """Process -> how often it was replaced."""
        return {"worker": self._worker.restarts} if self._in_session else {}

    def _shown(self) -> tuple[str, str]:
        """State and reason as shown: a pause above what the rounds of a peer in a run do meanwhile."""
        state, reason = self.state, self.reason
        if self._in_session and not _ends(state):
            if self.mover and self.mover.target is not None:
                return "moving", self.mover.phase
            if self.pauses and (why := self.pauses.reason):
                return "paused", why
            if state == "training" and self._work.resting and (why := self._worker.resting_reason):
                return "waiting", why
            if state == "training" and self._loop.awaits_members:
                return "waiting", reason or "for the other peers to be admitted"
            if state == "averaging" and self._loop.is_overlapped:
                return state, "training continues meanwhile"
            if state == "training" and self._pipeline:
                reason = reason or self._pipeline.waiting_reason()
        return state, reason

    def _waiting_for(self) -> tuple[str, ...]:
        """Names of the peers that the round waits for; none while this peer is among them."""
        in_round = self._in_session and self.state in ("averaging", "training")
        peers = self._loop.waiting_for() if in_round else ()
        return () if self.peer in peers else self._names(peers)

    def _move(self) -> str:
        """The latest move between stages, in words; empty if there was none."""
        mover = self.mover
        if mover and mover.target is not None:
            return f"moving to stage {mover.target}"
        return (mover.problem if mover else "") or self.moved

    def _why_no_vote(self) -> str:
        """Why this peer has no vote, and what it waits for; empty if it has a vote."""
        roster = {member.peer for member in self._history.head.roster}
        if self.peer in roster:
            return ""
        if lead := self.lead():
            return f"without a vote: contributes through {self._names([lead])[0]}"
        if roster & {each.peer for each in self._membership.contacts() if each.live}:
            return self._why_outside(len(roster))
        names = ", ".join(self._names(sorted(roster))[:4])
        return f"waiting for a member of the last round ({names})"

    def _why_outside(self, members: int) -> str:
        """Why this peer is not in a roster of so many members, some of which it sees."""
        config = self._manifest.config if self._manifest else None
        if members < ((config.voters if config else None) or MAX_ROSTER):
            return "not in the roster yet: it is admitted at the end of a round"
        if config and config.clusters:
            return "without a vote: asks the voters for a place in a cluster"
        return f"the roster is full ({members}): its work does not count until a member is gone"

    def _names(self, peers: Sequence[PeerId]) -> tuple[str, ...]:
        known = {each.peer: each.nickname for each in self._peers()}
        return tuple(known.get(peer) or short(peer) for peer in peers)

    def _peers(self) -> tuple[PeerStatus, ...]:
        if not self._in_session:
            return ()
        roster = {member.peer for member in self._history.head.roster}
        votes = not isinstance(self._history, LocalHistory)
        routes = self.transport.routes if self.transport else {}
        apart = self._apart()

        def is_member(each: PeerRecord) -> bool:
            elsewhere = self.stage is not None and each.stage != self.stage  # the roster is of this peer's stage
            return not votes or each.peer in roster or (elsewhere and each.live)

        return tuple(
            PeerStatus(
                peer=each.peer,
                nickname=printable(each.hello.nickname) if each.hello else "",
                member=is_member(each),
                live=each.live,
                round=each.said.round,
                address=each.addresses[0] if each.addresses else "",
                stage=each.stage or 0,
                route=OTHERS_REDUCE if each.peer in apart else routes[each.peer].kind if each.peer in routes else "",
                route_reason=routes[each.peer].why if each.peer in routes else "",
                left=each.left,
            )
            for each in self._membership.contacts()
            if (each.hello or each.peer in roster) and not each.unwatched
        )

    def _apart(self) -> set[PeerId]:
        """Members with which this one exchanges no data, as that failed: other members reduce."""
        head = self._history.head
        ends = [{each.first, each.second} for each in head.complaints if each.until > head.key.round]
        return {peer for pair in ends if self.peer in pair for peer in pair - {self.peer}}

    def _last_round(self) -> int:
        """Number of the run's last round: its training rounds plus the rounds without training so far."""
        rounds = self._manifest.config.recipe.rounds if self._manifest else 0
        return rounds + self._history.head.key.round - self._history.trained if self._in_session else rounds

    def _expected_seconds(self) -> float | None:
        """Mean duration of the last rounds; None if it is not known."""
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) if len(self._ends) > 1 else None

    def _rate(self) -> float:
        last = self._journal.last if self._in_session else None
        if self._work.seconds > 0:
            return self._work.tokens / self._work.seconds
        return last.tokens / last.seconds_train if last and last.seconds_train > 0 else 0.0

    def status(self) -> Status:
        session, config = self._in_session, self._manifest.config if self._manifest else None
        key = self._history.head.key if session else None
        totals = self._journal.totals if session else Totals()
        contacts = self._membership.contacts() if session else ()
        state, reason = self._shown()
        round_number, rounds, expected = key.round if key else 0, self._last_round(), self._expected_seconds()
        return Status(
            state=state,
            reason=printable(reason),
            waiting_for=self._waiting_for(),
            round=round_number,
            rounds=rounds,
            lineage=key.lineage.hex() if key else "",
            run=printable(config.name) if config else "",
            run_id=self._run_id,
            peer=self.peer,
            nickname=self.nickname,
            peers=self._peers(),
            addresses=tuple(self.addresses()),
            tokens=totals.tokens + self._work.tokens,
            tokens_per_second=self._rate(),
            loss=self._work.loss if self._work.tokens else self._loss,
            held_out_loss=self._held_out_loss,
            bytes_sent=totals.bytes_sent,
            bytes_received=totals.bytes_received,
            rss_bytes=rss_bytes(self.pids()),
            loop_lag_p99_seconds=self.lag.peek(),
            eta_seconds=None if expected is None else max(0.0, expected * (rounds - round_number)),
            pid=os.getpid(),
            incarnation=self.incarnation,
            syncing=self._sync.sync_progress.progress() if session else None,
            task=config.consent_task if config else "",
            protocol=config.protocol if config else "",
            spread=self._spread,
            spread_limit=self._spread_limit,
            clock=self._membership.host_monitor.clock if session else "",
            checkpoint_age_seconds=self._checkpoints.age_seconds(self.clock.wall()) if session else None,
            stage=self.stage or 0,
            stages=config.stages if config and self.stage is not None else 1,
            round_seconds=asyncio.get_running_loop().time() - self._ends[-1] if self._ends else float("nan"),
            round_expected_seconds=expected,
            joiners=self._sync.joiners if session else 0,
            checkpoint_problem=printable(self._checkpoints.problem) if session else "",
            limits=self._limits.describe(1 + sum(each.live for each in contacts)),
            version=VERSION,
            device=printable(self._worker.device) if session else "",
            clusters=bool(config and config.clusters),
            private=bool(config and config.admission),
            move=printable(self._move()),
            backups=printable(self.backups.describe()) if session and self.backups else "",
            lost=printable(self.refill.describe()) if session and self.refill else "",
        )
