"""Round reports and evaluations: the lines of `rounds.jsonl`, and sums over them."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Mapping, MutableSequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, Self

from protocols.base import LocalProgress


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What one round came to at one peer. Ids and hashes are hex, except peer ids; times are seconds.

    A peer that caught up reports that as a round with outcome `superseded`, from its own head, `parent`, to `lineage`.

    Tokens, seconds and bytes are those since the previous report. So the sums over a peer's reports are what it
    trained, spent and transferred, each counted once, whatever the rounds came to.
    """

    run: str  # id of the run
    peer: str
    incarnation: int  # number of this start of the peer
    round: int  # from 0; on the screen from 1
    # The record that the round extends, and the one that it led to; with protocols other than butterfly, the roots of
    # this peer's own state before and after.
    parent: str
    lineage: str  # see `parent`
    anchor_lineage: str  # of the anchor that the round's work was measured from; a skipped round does not change it
    # committed, skipped, undecided, superseded (the peer went over to what others had decided), alone (committed by a
    # roster of one) or fork. With other protocols than butterfly: committed (the state of another peer was counted;
    # with Moshpit also where the others of a group only received), skipped (none was: the peer continues from its own
    # step), superseded (it downloaded another's state; the next line has the cost of a failed attempt).
    outcome: str
    # Those in the mean; with protocols other than butterfly, those of which something was counted. Gossip leaves this
    # peer out. Push-sum includes it if a share of its own returned (which alone makes a round committed, too).
    # parameter_server_async names this peer alone.
    peers: tuple[str, ...]
    # Peer -> lineage of its anchor (empty if not known, as of other peers with independent state), chunks counted,
    # chunks in all.
    contributions: dict[str, tuple[str, int, int]]
    blamed: dict[str, str]  # peers that were refused, lost or clamped -> why
    finite: bool  # whether all outer parameters are finite
    weight: float  # of this peer in the mean; null if it did not know the plan, and with the baselines
    # Tokens that this peer trained on in the round, counted or not. Its contribution may include more, from earlier
    # rounds that did not count its work.
    tokens: int
    loss: float  # mean training loss over the contribution
    params_hash: str  # of the outer parameters after the round
    seconds_train: float
    seconds_wait: float  # in neither training nor averaging
    seconds_average: float  # without the training meanwhile
    bytes_sent: int  # of rounds and of catching up, whether that succeeded or not
    bytes_received: int
    time: float  # when the round was over, since 1970 by this machine's clock
    lost_rounds: int = 0  # given up with a branch, since the fork point; 0 if the peer was only behind
    lost_tokens: int = 0  # of this peer's work, that counted in these rounds
    replayed_rounds: int = 0  # outer steps taken again with stored means
    bytes_downloaded: int = 0  # of snapshot chunks
    # The last group that this peer completed, where there are groups: all peers that name it hold the same bits.
    group: str = ""
    messages: tuple[str, ...] = ()  # the states that were counted, each under a unique name
    half_exchanges: int = 0  # that may have changed one peer only
    # The most that they together may have moved the mean of all, as a share of a state's length.
    mass_drift: float = 0.0
    # Gossip and push-sum, in the report of a run's last round: closing exchanges that succeeded, without training.
    # Their seconds, bytes, messages and contributions are in the same report.
    closing_exchanges: int = 0
    # Not butterfly: max ‖θ_i − mean‖ / ‖mean‖ over the live peers, estimated by sketches within about 9 %.
    spread: float = math.nan
    spread_limit: float = math.nan  # the run's limit of the spread
    threads: int = 0  # of the worker when the round was over; 0 if not known
    # Loss of the outer parameters after the round, in nats per token, on data that no peer trains on.
    held_out_loss: float = math.nan
    loop_lag_p99_seconds: float = 0.0  # lag of the event loop since the previous report
    loop_lag_max_seconds: float = 0.0
    rss_bytes: int = 0  # memory of the peer's own process, its worker and p2pd
    open_files: int = 0  # of the peer's own process, when the round was over
    tasks: int = 0  # of the peer's event loop, when the round was over
    stage: int = 0  # this peer's; 0 without stages
    # Number of stages; 1 without. Tokens are those that passed this stage: the sum over one stage is what the run has
    # trained on.
    stages: int = 1
    # With stages: time in which the worker computed microbatches; the rest of `seconds_train` it waited for others.
    seconds_compute: float = 0.0
    fragment: int = 0  # of the parameters, that the round averaged; always 0 without `recipe.fragments`
    contributors: int = 0  # with clusters: peers of all of them with work in the mean; `peers` are in the own cluster
    seconds_overlap: float = 0.0  # the part of `seconds_train` in which the round averaged
    tokens_overlap: int = 0  # the part of `tokens` that was trained then, for the next round
    # With stages: those that lost all their members, and began again from a backup -> training rounds lost by that.
    refilled: dict[str, int] = field(default_factory=dict)
    microbatches: int = 0  # with stages: counted at this peer since the previous report
    abandoned: dict[str, int] = field(default_factory=dict)  # of a driver: why microbatches were abandoned -> how many
    # Butterfly: the part of `seconds_average` and `seconds_overlap` in which data moved to or from this peer, at over
    # 40 kB/s. In the rest it waited for other peers, their parts and votes, or computed. Null with other protocols.
    seconds_moving: float = math.nan
    # With clusters: leads of the others -> chunks counted of all their members together, chunks that these have in all.
    # `contributions` then names the members of this peer's own cluster.
    clusters: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def in_mean(self) -> int:
        """Number of peers with work in the mean, in all clusters."""
        return self.contributors or len(self.peers)

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
        """Parse a line, which may lack fields that have a default. Raises ValueError."""
        values = json.loads(line)
        try:
            given = {each.name: values[each.name] for each in fields(cls) if each.name in values or _is_required(each)}
        except (TypeError, KeyError):
            raise ValueError("not a report of this version") from None
        unknown = [each.name for each in fields(cls) if each.type == "float" and given.get(each.name, 0) is None]
        return cls(**given | dict.fromkeys(unknown, math.nan))


@dataclass(frozen=True, slots=True)
class RoundEvaluation:
    """The held-out loss of a round's outer parameters in a run with stages, where it is measured beside the next round.

    The line comes after that of the round, maybe after those of later ones. A round whose loss is not known has none.
    """

    evaluated: int  # the round, from 0
    lineage: str  # that of the round's report
    held_out_loss: float  # in nats per token; every stage had the parameters of this round
    samples: int  # held-out microbatches of which this is the mean
    time: float  # when the last of them was done, since 1970 by this machine's clock


def parse_line(line: str | bytes) -> RoundReport | RoundEvaluation:
    """Parse a line of `rounds.jsonl`. Raises ValueError."""
    values = json.loads(line)
    if not isinstance(values, dict) or "evaluated" not in values:
        return RoundReport.from_json(line)
    try:
        return RoundEvaluation(**{each.name: values[each.name] for each in fields(RoundEvaluation)})
    except KeyError:
        raise ValueError("not an evaluation of this version") from None


def merge_line(reports: list[dict[str, Any]], line: str | bytes) -> None:
    """Add a line of `rounds.jsonl` to the reports of the lines before it: a report, or the loss of one of them."""
    values = json.loads(line)
    if "evaluated" not in values:
        reports.append(values)
        return
    for each in reversed(reports):
        if each["lineage"] == values["lineage"]:
            each["held_out_loss"] = values["held_out_loss"]
            return


def add_loss(reports: MutableSequence[RoundReport], evaluation: RoundEvaluation) -> None:
    """Give the last report of an evaluation's round its held-out loss, if it is among these."""
    for place in range(len(reports) - 1, -1, -1):
        if reports[place].lineage == evaluation.lineage:
            reports[place] = replace(reports[place], held_out_loss=evaluation.held_out_loss)
            return


def read_reports(data: str | bytes) -> list[dict[str, Any]]:
    """The reports in whole lines of `rounds.jsonl`, each with its held-out loss."""
    reports: list[dict[str, Any]] = []
    for line in data.splitlines():
        merge_line(reports, line)
    return reports


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


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
            counted[bytes.fromhex(each.lineage)] = tokens - each.tokens_overlap
        if each.outcome == "superseded":
            tokens = 0  # dropped with the anchor that it was measured from
        elif each.outcome in ("committed", "alone") or each.peers:
            tokens = each.tokens_overlap  # the rest is counted or dropped
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

    def since_lap(self) -> float:
        return self._loop.time() - self._mark

    def total(self) -> float:
        return self._loop.time() - self.began
