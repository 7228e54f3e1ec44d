"""Round reports: the lines of `rounds.jsonl`, and sums over them."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:  # it loads PyTorch
    from protocols.base import LocalProgress


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What one round came to at one peer. Ids and hashes are hex, except peer ids; times are seconds.

    A peer that caught up reports that as a round with outcome `superseded`, from its own head, `parent`, to `lineage`.

    Tokens, seconds and bytes are those since the previous report. So the sums over a peer's reports are what it
    trained, spent and transferred, each counted once, whatever the rounds came to.

    Attributes:
        anchor_lineage: lineage of the anchor that the round's work was measured from; a skipped round does not change
            it.
        contributions: peer -> lineage of its anchor (empty if not known, as with independent state), chunks counted,
            chunks in all.
        weight: weight of this peer in the mean; nan if it is in the mean but did not know the plan.
        tokens: tokens that this peer trained on in the round, counted or not. Its contribution may include more, from
            earlier rounds that did not count its work.
        loss: mean training loss over the contribution.
        lost_rounds: rounds given up with a branch, since the fork point; 0 if the peer was only behind.
        lost_tokens: tokens of this peer's work that counted in these rounds.
        replayed_rounds: outer steps taken again with stored means.
        bytes_downloaded: bytes of snapshot chunks.
        group, messages, half_exchanges, mass_drift: only with independent state, as in
            `protocols.base.IndependentSession` and `Contribution`; the messages are those of all peers.
        closing_exchanges: in the report of a run's last round: closing exchanges that succeeded. Their seconds, bytes,
            messages and contributions are in the same report.
        spread: only with independent state: about max ‖θ_i − mean‖ / ‖mean‖ over the live peers, by their sketches.
        spread_limit: the run's limit of the spread.
        threads: threads of the worker when the round was over; 0 if not known.
        held_out_loss: loss of the outer parameters after the round, in nats per token, on data that no peer trains on.
        loop_lag_p99_seconds, loop_lag_max_seconds: lag of the event loop since the previous report.
        rss_bytes: memory of the peer's own process, its worker and p2pd.
        open_files, tasks: file descriptors and tasks of the peer's own process when the round was over.
        stage, stages: this peer's stage, and the number of stages; 0 and 1 in a run without stages. Tokens are those
            that passed this stage: the sum over one stage is what the run has trained on.
        seconds_compute: with stages, time in which the worker computed microbatches since the previous report; the
            rest of `seconds_train` it waited for other stages.
        microbatches: microbatches that were counted at this peer since the previous report; 0 without stages.
        abandoned: of a driver: why microbatches were abandoned -> how many.
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
    stage: int = 0
    stages: int = 1
    seconds_compute: float = 0.0
    microbatches: int = 0
    abandoned: dict[str, int] = field(default_factory=dict)

    def after(self, failed: RoundReport) -> RoundReport:
        """This report, with the faults and bytes of an attempt to catch up that failed just before it."""
        return replace(
            self,
            blamed={**self.blamed, **failed.blamed},
            bytes_sent=self.bytes_sent + failed.bytes_sent,
            bytes_received=self.bytes_received + failed.bytes_received,
            bytes_downloaded=self.bytes_downloaded + failed.bytes_downloaded,
        )

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        """Parse a line written by this version. Raises ValueError."""
        values = json.loads(line)
        try:
            given = {each.name: values[each.name] for each in fields(cls)}
        except (TypeError, KeyError):
            raise ValueError("not a report of this version") from None
        unknown = [each.name for each in fields(cls) if each.type == "float" and given[each.name] is None]
        return cls(**given | dict.fromkeys(unknown, math.nan))


def tokens_counted(reports: Iterable[RoundReport]) -> dict[bytes, int]:
    """Lineage -> tokens of a peer's work that counted in the round of that lineage.

    `reports` are of one peer, oldest first, of all its incarnations. If rounds were skipped or undecided, their work is
    added to that of the next round that counted it.
    """
    counted: dict[bytes, int] = {}
    tokens, member = 0, ("", -1)
    for each in reports:
        if (each.peer, each.incarnation) != member:
            tokens, member = 0, (each.peer, each.incarnation)
        tokens += each.tokens
        if each.outcome in ("committed", "alone", "fork") and each.peer in each.peers:
            counted[bytes.fromhex(each.lineage)] = tokens
        if each.outcome in ("committed", "alone", "superseded") or each.peers:
            tokens = 0  # counted, or dropped with the anchor that it was measured from
    return counted


class Totals:
    """Sums over one peer's reports."""

    def __init__(self) -> None:
        self.tokens = self.bytes_sent = self.bytes_received = 0
        self.seconds_train = self.seconds_average = 0.0

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Self:
        """Restore sums from the `vars` of an earlier instance. Raises TypeError or ValueError if they are malformed."""
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
    """Tokens and seconds trained since the last `take`, computed from a trainer's progress since its anchor."""

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0
        self._seen = 0, 0.0

    def hear(self, work: LocalProgress) -> None:
        """Take in a trainer's progress.

        After a new anchor or a new worker its sums start again; the first progress then holds only carried work.
        """
        tokens, seconds = work.tokens - work.carried, work.seconds
        if tokens < self._seen[0] or seconds < self._seen[1]:
            self._seen = 0, 0.0
        self.tokens += tokens - self._seen[0]
        self.seconds += seconds - self._seen[1]
        self._seen = tokens, seconds

    def take(self) -> tuple[int, float]:
        taken = self.tokens, self.seconds
        self.tokens, self.seconds = 0, 0.0
        return taken


class LapTimer:
    """Stopwatch with named laps, in the event loop's time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.began = self._mark = self._loop.time()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = self._loop.time()
        self.seconds[name], self._mark = now - self._mark, now

    def total(self) -> float:
        return self._loop.time() - self.began
