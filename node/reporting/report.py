"""What a peer tells of a round: one line of its history."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Self

from protocols.base import LocalProgress


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What became of one round at one peer. Ids and hashes are hex but for peer ids; times are seconds.

    A peer that caught up reports it as a round of its own, `superseded`: from `parent`, where it stood, to `lineage`.

    Tokens, seconds and bytes are those since the report before: whatever became of the rounds, the plain sums over a
    peer's reports are what it trained, spent and moved, each once.

    Attributes:
        anchor_lineage: of the state that the round's work was measured from; it stays where a round was skipped.
        contributions: peer -> lineage of its anchor (empty: not known, where none is shared), chunks counted, chunks.
        weight: of this peer in the mean; nan where it is in, but did not know the plan.
        tokens: that this peer has trained on in the round, counted or not. The work that it brought may hold more, of
            rounds before that took none of it.
        loss: mean over all of that work.
        lost_rounds: rounds of the branch that was given up, since the two parted; 0 if it was merely behind.
        lost_tokens: of this peer's work that was counted in them.
        replayed_rounds: outer steps taken again from their kept means.
        bytes_downloaded: of snapshots' chunks.
        group, messages, half_exchanges, mass_drift: where no anchor is shared, as `protocols.base.LooseSession` and
            `Contribution` have them; messages of all peers.
        closing_exchanges: in the report of a run's last round: of those after it, without training, so many held. Their
            seconds, bytes, messages and contributions are in the same report.
        spread: where none is shared, about max ‖θ_i − mean‖ / ‖mean‖ over the peers that are here, by their sketches.
        spread_limit: what the run bears of that.
        threads: that the worker computed with when the round was over; 0: not known.
        held_out_loss: of the outer parameters after the round, nats per token of data that no peer trains on.
        loop_lag_p99_seconds, loop_lag_max_seconds: of the event loop, since the last report.
        rss_bytes: of the peer's processes: its own, the worker's, p2pd's.
        open_files, tasks: of the peer's own process, when the round was over.
    """

    run: str
    peer: str
    incarnation: int
    round: int
    parent: str
    lineage: str
    anchor_lineage: str
    outcome: str
    peers: tuple[str, ...]
    contributions: dict[str, tuple[str, int, int]]
    blamed: dict[str, str]
    finite: bool
    weight: float
    tokens: int
    loss: float
    params_hash: str
    seconds_train: float
    seconds_wait: float
    seconds_average: float
    bytes_sent: int
    bytes_received: int
    time: float
    lost_rounds: int = 0
    lost_tokens: int = 0
    replayed_rounds: int = 0
    bytes_downloaded: int = 0
    group: str = ""
    messages: tuple[str, ...] = ()
    half_exchanges: int = 0
    mass_drift: float = 0.0
    closing_exchanges: int = 0
    spread: float = math.nan
    spread_limit: float = math.nan
    threads: int = 0
    held_out_loss: float = math.nan
    loop_lag_p99_seconds: float = 0.0
    loop_lag_max_seconds: float = 0.0
    rss_bytes: int = 0
    open_files: int = 0
    tasks: int = 0

    def after(self, failed: RoundReport) -> RoundReport:
        """This report, and what an attempt to catch up just before it moved and found out, which came to nothing."""
        return replace(
            self,
            blamed={**self.blamed, **failed.blamed},
            bytes_sent=self.bytes_sent + failed.bytes_sent,
            bytes_received=self.bytes_received + failed.bytes_received,
            bytes_downloaded=self.bytes_downloaded + failed.bytes_downloaded,
        )

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        """From a line of a peer of this version.

        Raises:
            ValueError: it is none.
        """
        values = json.loads(line)
        try:
            given = {each.name: values[each.name] for each in fields(cls)}
        except (TypeError, KeyError):
            raise ValueError("not a report of this version") from None
        unknown = [each.name for each in fields(cls) if each.type == "float" and given[each.name] is None]
        return cls(**given | dict.fromkeys(unknown, math.nan))


def tokens_counted(reports: Iterable[RoundReport]) -> dict[bytes, int]:
    """Lineage -> tokens of a peer's work in the round that led to it.

    Work of several rounds is counted together where the ones before were skipped or undecided.

    Args:
        reports: of one peer, oldest first; former lives' among them.
    """
    counted: dict[bytes, int] = {}
    tokens, life = 0, ("", -1)
    for each in reports:
        if (each.peer, each.incarnation) != life:
            tokens, life = 0, (each.peer, each.incarnation)
        tokens += each.tokens
        if each.outcome in ("committed", "alone", "fork") and each.peer in each.peers:
            counted[bytes.fromhex(each.lineage)] = tokens
        if each.outcome in ("committed", "alone", "superseded") or each.peers:
            tokens = 0  # spent, or dropped with the anchor that it was measured from
    return counted


class Totals:
    """What one peer's reports add up to."""

    def __init__(self) -> None:
        self.tokens = self.bytes_sent = self.bytes_received = 0
        self.seconds_train = self.seconds_average = 0.0

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Self:
        """From `vars` of another.

        Raises:
            TypeError, ValueError: these are none.
        """
        totals = cls()
        for name, start in vars(totals).items():
            kind: type = type(start)
            setattr(totals, name, kind(dict(values).get(name, start)))
        return totals

    def add(self, report: RoundReport) -> None:
        self.tokens += report.tokens
        self.seconds_train += report.seconds_train
        self.seconds_average += report.seconds_average
        self.bytes_sent += report.bytes_sent
        self.bytes_received += report.bytes_received


class TrainingDelta:
    """What was trained since the last report, out of what a trainer says of all its work since the anchor.

    Attributes:
        tokens, seconds: since they were taken last.
    """

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0
        self._heard = 0, 0.0

    def hear(self, work: LocalProgress) -> None:
        """A trainer says how much there is now; of an account that starts again, because of a new anchor or a new
        worker, it first says that there is nothing but what was carried over.
        """
        tokens, seconds = work.tokens - work.carried, work.seconds
        if tokens < self._heard[0] or seconds < self._heard[1]:
            self._heard = 0, 0.0
        self.tokens += tokens - self._heard[0]
        self.seconds += seconds - self._heard[1]
        self._heard = tokens, seconds

    def take(self) -> tuple[int, float]:
        """Tokens and seconds since the last call."""
        taken = self.tokens, self.seconds
        self.tokens, self.seconds = 0, 0.0
        return taken


class LapTimer:
    """Laps of the loop's time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.began = self._mark = self._loop.time()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = self._loop.time()
        self.seconds[name], self._mark = now - self._mark, now

    def total(self) -> float:
        return self._loop.time() - self.began
