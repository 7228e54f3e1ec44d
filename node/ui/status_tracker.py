"""What a peer shows of itself, put together from those of its parts that exist already."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict

from node.membership.membership import Membership
from node.outer.round_history import LocalHistory, RoundHistory
from node.reporting.report import RoundReport
from node.reporting.status import PeerStatus, Status, SyncStatus, short
from node.runtime.metrics import LoopLag, rss_bytes
from node.storage.journal import Journal
from protocols.base import LocalProgress, PeerId
from protocols.sync.progress import SyncProgressLine

_RECENT_ROUNDS = 5


class StatusTracker:
    """Filled in as the peer comes to life; `status()` works from the first moment on.

    Attributes:
        state, reason: as in `Status`.
        pids: of the peer's processes.
        waiting_for: whom the round waits for.
        progress: how far catching up is, while it goes on.
        checkpoint_age_seconds: of the newest whole one; None: there is none.
    """

    def __init__(self, nickname: str) -> None:
        self.state, self.reason = "starting", "its processes come up"
        self.nickname, self.peer, self.incarnation = nickname, "", 0
        self.run, self.run_id, self.task, self.protocol, self.rounds = "", "", "", "", 0
        self.addresses: Callable[[], Sequence[str]] = tuple
        self.pids: Callable[[], Sequence[int]] = lambda: (os.getpid(),)
        self.waiting_for: Callable[[], Sequence[PeerId]] = tuple
        self.progress: Callable[[], SyncProgressLine | None] = lambda: None
        self.checkpoint_age_seconds: Callable[[], float | None] = lambda: None
        self.journal: Journal | None = None
        self.membership: Membership | None = None
        self.chain: RoundHistory | None = None
        self.lag: LoopLag | None = None
        self.held_out_loss = self.loss = self.spread = self.spread_limit = float("nan")
        self._work = LocalProgress(0, float("nan"), 0.0, 0.0)
        self._ends: deque[float] = deque(maxlen=_RECENT_ROUNDS + 1)

    def set_state(self, state: str, reason: str = "") -> None:
        """The peer does something else now; whatever it is, one that leaves is leaving until it has."""
        if self.state not in ("leaving", "finished") or state == "finished":
            self.state, self.reason = state, reason

    def _awaited(self) -> tuple[str, ...]:
        """By name; while this peer itself is among them, nobody else is held up."""
        waits = self.waiting_for() if self.state in ("averaging", "training") else ()
        return () if self.peer in waits else self._names(waits)

    def on_progress(self, phase: str, work: LocalProgress) -> None:
        """How far the round is."""
        self._work = work
        self.set_state(phase, self._looks_on())

    def _looks_on(self) -> str:
        """Why this peer has no vote, and what it waits for; empty if it has one."""
        roster = {member.peer for member in self.chain.head.roster} if self.chain else {self.peer}
        if self.peer in roster:
            return ""
        live = {each.peer for each in self.membership.contacts() if each.live} if self.membership else roster
        if roster & live:
            return "not in the roster yet: it is admitted at the end of a round"
        names = ", ".join(self._names(sorted(roster))[:4])
        return (
            f"the members of the last roster are not here ({names}): waiting for one, or for most of those before them"
        )

    def reported(self, report: RoundReport) -> None:
        """A round is over."""
        self._ends.append(asyncio.get_running_loop().time())
        self.loss = report.loss
        if report.held_out_loss == report.held_out_loss:
            self.held_out_loss = report.held_out_loss
        if report.spread == report.spread:
            self.spread, self.spread_limit = report.spread, report.spread_limit
        self._work = LocalProgress(0, float("nan"), 0.0, 0.0)

    def _eta_seconds(self, round_number: int) -> float | None:
        if len(self._ends) < 2 or not self.rounds:
            return None
        each = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return max(0.0, each * (self._total() - round_number))

    def _total(self) -> int:
        """Rounds of the run as they are counted: those that were no rounds of training come on top."""
        return self.rounds + (self.chain.head.key.round - self.chain.trained if self.chain and self.rounds else 0)

    def _rate(self) -> float:
        last = self.journal.last if self.journal else None
        if self._work.seconds > 0:
            return self._work.tokens / self._work.seconds
        return last.tokens / last.seconds_train if last and last.seconds_train > 0 else 0.0

    def _syncing(self) -> SyncStatus | None:
        progress = self.progress()
        return SyncStatus(**asdict(progress)) if progress else None

    def _names(self, peers: Sequence[PeerId]) -> tuple[str, ...]:
        known = {each.peer: each.nickname for each in self._peers()}
        return tuple(known.get(peer) or short(peer) for peer in peers)

    def _peers(self) -> tuple[PeerStatus, ...]:
        if self.membership is None or self.chain is None:
            return ()
        roster = {member.peer for member in self.chain.head.roster}
        votes = not isinstance(self.chain, LocalHistory)
        return tuple(
            PeerStatus(
                peer=each.peer,
                nickname=each.hello.nickname if each.hello else "",
                member=each.peer in roster or not votes,
                live=each.live,
                round=each.round,
                address=each.addresses[0] if each.addresses else "",
            )
            for each in self.membership.contacts()
            if each.hello or each.peer in roster
        )

    def status(self) -> Status:
        """Everything, as of now."""
        key, journal = (self.chain.head.key if self.chain else None), self.journal
        round_number = key.round if key else 0
        return Status(
            state=self.state,
            reason=self.reason,
            waiting_for=self._awaited(),
            round=round_number,
            rounds=self._total(),
            lineage=key.lineage.hex() if key else "",
            run=self.run,
            run_id=self.run_id,
            peer=self.peer,
            nickname=self.nickname,
            peers=self._peers(),
            addresses=tuple(self.addresses()),
            tokens=(journal.totals.tokens if journal else 0) + self._work.tokens,
            tokens_per_second=self._rate(),
            loss=self._work.loss if self._work.tokens else self.loss,
            held_out_loss=self.held_out_loss,
            bytes_sent=journal.totals.bytes_sent if journal else 0,
            bytes_received=journal.totals.bytes_received if journal else 0,
            rss_bytes=rss_bytes(self.pids()),
            loop_lag_p99_seconds=self.lag.peek() if self.lag else 0.0,
            eta_seconds=self._eta_seconds(round_number),
            pid=os.getpid(),
            incarnation=self.incarnation,
            syncing=self._syncing(),
            task=self.task,
            protocol=self.protocol,
            spread=self.spread,
            spread_limit=self.spread_limit,
            clock=self.membership.host_monitor.clock if self.membership else "",
            checkpoint_age_seconds=self.checkpoint_age_seconds(),
        )
