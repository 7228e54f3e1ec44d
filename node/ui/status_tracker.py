"""The status of a peer, as `starling status` and the terminal show it."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from node.direct.routes import Route
from node.membership.membership import Membership
from node.membership.peer_record import PeerRecord
from node.outer.round_history import LocalHistory, RoundHistory
from node.reporting.report import RoundReport
from node.reporting.status import PeerStatus, Status, SyncStatus, printable, short
from node.runtime.metrics import LoopLag, Vitals, rss_bytes, vitals
from node.storage.journal import Journal
from protocols.base import LocalProgress, Member, PeerId
from protocols.sync.progress import SyncProgressLine

_RECENT_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class RunLabels:
    """The run's description in a status."""

    name: str = ""
    run_id: str = ""
    task: str = ""
    protocol: str = ""
    rounds: int = 0
    stage: int = 0
    stages: int = 1


@dataclass(frozen=True, slots=True)
class OuterLoopSources:
    """Sources of a status once the outer loop runs."""

    journal: Journal
    waiting_for: Callable[[], Sequence[PeerId]] = tuple  # peers that the round waits for
    sync_progress: Callable[[], SyncProgressLine | None] = lambda: None
    checkpoint_age_seconds: Callable[[], float | None] = lambda: None
    pids: Callable[[], Sequence[int]] = lambda: (os.getpid(),)
    waiting_reason: Callable[[], str] = lambda: ""  # why nothing is trained now, for the user
    worker_restarts: Callable[[], int] = lambda: 0
    joiners: Callable[[], int] = lambda: 0  # that download this peer's state
    checkpoint_problem: Callable[[], str] = lambda: ""


class StatusTracker:
    """Assembles the status of a peer from those of its parts that exist already.

    The peer calls, in this order: `set_network`, `enter_run`, `join_swarm`, `start_outer_loop`. `status()` works before
    the first of them and after each. `limits` describes the limits on this peer's traffic, given the number of live
    peers, this one included.
    """

    def __init__(self, nickname: str, me: Member, limits: Callable[[int], str] = lambda peers: "") -> None:
        self.state, self.reason = "starting", "its processes come up"
        self.nickname, self.peer, self._incarnation, self._limits = nickname, me.peer, me.incarnation, limits
        self._addresses: Callable[[], Sequence[str]] = tuple
        self._lag: LoopLag | None = None
        self._routes: Callable[[], Mapping[PeerId, Route]] = dict
        self._run = RunLabels()
        self._chain: RoundHistory | None = None
        self._membership: Membership | None = None
        self._sources: OuterLoopSources | None = None
        self._held_out_loss = self._loss = self._spread = self._spread_limit = float("nan")
        self._pause_reason: Callable[[], str] = str
        self._work = LocalProgress(0, float("nan"), 0.0, 0.0)
        self._ends: deque[float] = deque(maxlen=_RECENT_ROUNDS + 1)

    # -- called by the peer -------------------------------------------------------------------------------------------

    def set_network(
        self,
        addresses: Callable[[], Sequence[str]],
        lag: LoopLag,
        routes: Callable[[], Mapping[PeerId, Route]] = dict,
    ) -> None:
        self._addresses, self._lag, self._routes = addresses, lag, routes

    def enter_run(self, run: RunLabels) -> None:
        self._run = run

    def enter_stage(self, stage: int, stages: int) -> None:
        self._run = replace(self._run, stage=stage, stages=stages)

    def join_swarm(self, chain: RoundHistory, membership: Membership) -> None:
        self._chain, self._membership = chain, membership

    def start_outer_loop(self, sources: OuterLoopSources) -> None:
        self._sources = sources

    def set_pauses(self, reason: Callable[[], str]) -> None:
        """Note where to read why this peer pauses; empty while it works."""
        self._pause_reason = reason

    def _shown(self, waiting: str) -> tuple[str, str]:
        """State and reason as shown: a pause above what the rounds of a peer in a run do meanwhile."""
        reason = self._pause_reason() if self._sources and self.state not in ("leaving", "finished") else ""
        if reason:
            return "paused", reason
        return self.state, self.reason or waiting

    def set_state(self, state: str, reason: str = "") -> None:
        """Change the peer's state. A leaving peer stays `leaving` until it has finished."""
        if self.state not in ("leaving", "finished") or state == "finished":
            self.state, self.reason = state, reason

    def addresses(self) -> Sequence[str]:
        return self._addresses()

    def pids(self) -> Sequence[int]:
        return self._sources.pids() if self._sources else (os.getpid(),)

    def vitals(self) -> Vitals:
        """Take the event loop's lag since the last call, and measure the peer's processes."""
        assert self._lag
        return vitals(self._lag, self.pids())

    def refused(self) -> Mapping[str, int]:
        """Part of the peer -> number of peers and messages refused by it."""
        return {"membership": sum(self._membership.refused.values())} if self._membership else {}

    def restarts(self) -> Mapping[str, int]:
        """Process -> how often it was replaced."""
        return {"worker": self._sources.worker_restarts()} if self._sources else {}

    def _waiting_for(self) -> tuple[str, ...]:
        """Names of the peers that the round waits for; none while this peer is among them."""
        sources = self._sources if self.state in ("averaging", "training") else None
        peers = sources.waiting_for() if sources else ()
        return () if self.peer in peers else self._names(peers)

    def on_progress(self, phase: str, work: LocalProgress) -> None:
        self._work = work
        self.set_state(phase, self._why_no_vote())

    def _why_no_vote(self) -> str:
        """Why this peer has no vote, and what it waits for; empty if it has a vote."""
        roster = {member.peer for member in self._chain.head.roster} if self._chain else {self.peer}
        if self.peer in roster:
            return ""
        live = {each.peer for each in self._membership.contacts() if each.live} if self._membership else roster
        if roster & live:
            return "not in the roster yet: it is admitted at the end of a round"
        names = ", ".join(self._names(sorted(roster))[:4])
        return f"waiting for a member of the last round ({names})"

    def reported(self, report: RoundReport) -> None:
        self._ends.append(asyncio.get_running_loop().time())
        self._loss = report.loss
        if report.held_out_loss == report.held_out_loss:
            self._held_out_loss = report.held_out_loss
        if report.spread == report.spread:
            self._spread, self._spread_limit = report.spread, report.spread_limit
        self._work = LocalProgress(0, float("nan"), 0.0, 0.0)

    def _eta_seconds(self, round_number: int) -> float | None:
        each = self._expected_seconds()
        if each is None or not self._run.rounds:
            return None
        return max(0.0, each * (self._total() - round_number))

    def _expected_seconds(self) -> float | None:
        """Mean duration of the last rounds; None if it is not known."""
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) if len(self._ends) > 1 else None

    def _total(self) -> int:
        """Number of the run's last round: its training rounds plus the rounds without training so far."""
        rounds, chain = self._run.rounds, self._chain
        return rounds + chain.head.key.round - chain.trained if chain and rounds else rounds

    def _rate(self) -> float:
        last = self._sources.journal.last if self._sources else None
        if self._work.seconds > 0:
            return self._work.tokens / self._work.seconds
        return last.tokens / last.seconds_train if last and last.seconds_train > 0 else 0.0

    def _syncing(self) -> SyncStatus | None:
        progress = self._sources.sync_progress() if self._sources else None
        return SyncStatus(**asdict(progress)) if progress else None

    def _names(self, peers: Sequence[PeerId]) -> tuple[str, ...]:
        known = {each.peer: each.nickname for each in self._peers()}
        return tuple(known.get(peer) or short(peer) for peer in peers)

    def _peers(self) -> tuple[PeerStatus, ...]:
        if self._membership is None or self._chain is None:
            return ()
        roster = {member.peer for member in self._chain.head.roster}
        votes = not isinstance(self._chain, LocalHistory)

        def is_member(each: PeerRecord) -> bool:
            elsewhere = self._run.stages > 1 and each.stage != self._run.stage  # the roster is of this peer's stage
            return not votes or each.peer in roster or (elsewhere and each.live)

        routes = self._routes()

        return tuple(
            PeerStatus(
                peer=each.peer,
                nickname=printable(each.hello.nickname) if each.hello else "",
                member=is_member(each),
                live=each.live,
                round=each.said.round,
                address=each.addresses[0] if each.addresses else "",
                stage=each.stage or 0,
                route=routes[each.peer].kind if each.peer in routes else "",
                route_reason=routes[each.peer].why if each.peer in routes else "",
                left=each.left,
            )
            for each in self._membership.contacts()
            if each.hello or each.peer in roster
        )

    def status(self) -> Status:
        key, sources = (self._chain.head.key if self._chain else None), self._sources
        totals = sources.journal.totals if sources else None
        round_number = key.round if key else 0
        state, reason = self._shown(sources.waiting_reason() if sources and self.state == "training" else "")
        return Status(
            state=state,
            reason=printable(reason),
            waiting_for=self._waiting_for(),
            round=round_number,
            rounds=self._total(),
            lineage=key.lineage.hex() if key else "",
            run=printable(self._run.name),
            run_id=self._run.run_id,
            peer=self.peer,
            nickname=self.nickname,
            peers=self._peers(),
            addresses=tuple(self.addresses()),
            tokens=(totals.tokens if totals else 0) + self._work.tokens,
            tokens_per_second=self._rate(),
            loss=self._work.loss if self._work.tokens else self._loss,
            held_out_loss=self._held_out_loss,
            bytes_sent=totals.bytes_sent if totals else 0,
            bytes_received=totals.bytes_received if totals else 0,
            rss_bytes=rss_bytes(self.pids()),
            loop_lag_p99_seconds=self._lag.peek() if self._lag else 0.0,
            eta_seconds=self._eta_seconds(round_number),
            pid=os.getpid(),
            incarnation=self._incarnation,
            syncing=self._syncing(),
            task=self._run.task,
            protocol=self._run.protocol,
            spread=self._spread,
            spread_limit=self._spread_limit,
            clock=self._membership.host_monitor.clock if self._membership else "",
            checkpoint_age_seconds=sources.checkpoint_age_seconds() if sources else None,
            stage=self._run.stage,
            stages=self._run.stages,
            round_seconds=asyncio.get_running_loop().time() - self._ends[-1] if self._ends else float("nan"),
            round_expected_seconds=self._expected_seconds(),
            joiners=sources.joiners() if sources else 0,
            checkpoint_problem=printable(sources.checkpoint_problem()) if sources else "",
            limits=self._limits(1 + sum(each.live for each in self._membership.contacts()) if self._membership else 1),
        )
