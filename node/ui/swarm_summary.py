"""Combines the reports of a swarm's peers, round by round and at the end. No I/O."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from node.reporting.report import RoundEvaluation, RoundReport, Totals

DECIDED = ("committed", "alone", "fork", "skipped")
_COUNTED = ("committed", "alone", "fork")
KEEP_ROUNDS = 4096  # Latest rounds that are kept, for the curve of losses
MAX_OPEN_ROUNDS = 64  # Most rounds that wait for reports; the oldest is then closed without them


class PeerSummary:
    """One peer's reports, summed up. `well`: its process has ended with exit code 0."""

    def __init__(self, name: str, stage: int = 0) -> None:
        self.name, self.stage = name, stage
        self.peer = self.lineage = self.params_hash = ""
        self.rounds = 0
        self.totals = Totals()
        self.last: RoundReport | None = None
        self.well = False

    def add(self, report: RoundReport) -> None:
        self.last, self.stage = report, report.stage
        self.peer, self.lineage, self.params_hash = report.peer, report.lineage, report.params_hash
        self.rounds += report.outcome in _COUNTED
        self.totals.add(report)

    def as_json(self) -> dict[str, Any]:
        totals = self.totals
        return {
            "peer_id": self.peer,
            "stage": self.stage,
            "rounds": self.rounds,
            "lineage": self.lineage,
            "params_hash": self.params_hash,
            "tokens": totals.tokens,
            "bytes_sent": totals.bytes_sent,
            "bytes_received": totals.bytes_received,
            "seconds_train": totals.seconds_train,
            "seconds_average": totals.seconds_average,
        }


@dataclass(frozen=True, slots=True)
class SwarmRound:
    """One round of the whole swarm."""

    number: int
    held_out_loss: float
    tokens_per_second: float  # of all peers of stage 0: the same tokens pass every stage
    in_mean: int  # peers of stage 0 in its mean, by their first report
    seconds: float  # since the previous round ended; for the first round, its duration
    spread: float = math.nan
    stages: int = 1


@dataclass(frozen=True, slots=True)
class StageSummary:
    """One stage's peers at the end."""

    stage: int
    agree: bool  # whether they all left in good order and agree; false if the stage has no peer
    params_hash: str  # empty if they do not agree or hold different parameters


class SwarmSummary:
    """Sums over all peers, and the swarm's rounds in order. Peer i of `names` joins stage i mod `stages`."""

    def __init__(self, names: Sequence[str], stages: int = 1) -> None:
        self.tracks = {name: PeerSummary(name, place % stages) for place, name in enumerate(names)}
        self._stages = stages
        # Complete rounds.
        self.rounds: deque[SwarmRound] = deque(maxlen=KEEP_ROUNDS)
        self.first_loss = math.nan
        self._open: dict[int, dict[str, RoundReport]] = {}
        self._ended = math.nan
        self._next = 0

    def add(self, name: str, report: RoundReport) -> None:
        self.tracks[name].add(report)
        if report.outcome in DECIDED and report.round >= self._next:
            self._open.setdefault(report.round, {})[name] = report

    def evaluated(self, name: str, evaluation: RoundEvaluation) -> SwarmRound | None:
        """Give a round its held-out loss, if it has none; returns the round if that was complete already."""
        number = evaluation.evaluated
        report = self._open.get(number, {}).get(name)
        if report and report.lineage == evaluation.lineage:
            self._open[number][name] = replace(report, held_out_loss=evaluation.held_out_loss)
            return None
        for place in range(len(self.rounds) - 1, -1, -1):
            done = self.rounds[place]
            if done.number == number and math.isnan(done.held_out_loss):
                self.rounds[place] = done = replace(done, held_out_loss=evaluation.held_out_loss)
                self._note_first(done.held_out_loss)
                return done
        return None

    def _note_first(self, loss: float) -> None:
        if math.isnan(self.first_loss):
            self.first_loss = loss

    def complete(self, running: Collection[str]) -> Iterator[SwarmRound]:
        """Rounds that all running peers have reported, or that a peer of their stage has passed; each comes once."""
        while self._open:
            number = min(self._open)
            if len(self._open) <= MAX_OPEN_ROUNDS and self._missing(number, running):
                return
            reports = self._open.pop(number)
            self._next = number + 1
            done = self._round(number, list(reports.values()))
            self.rounds.append(done)
            self._note_first(done.held_out_loss)
            yield done

    def _missing(self, number: int, running: Collection[str]) -> bool:
        """Whether a report of the oldest open round may still come.

        A stage counts its rounds by itself, so that one may be a round ahead of another after a skipped round.
        """
        ahead = {each.stage for other, reports in self._open.items() if other > number for each in reports.values()}
        return any(name not in self._open[number] and self.tracks[name].stage not in ahead for name in running)

    def _round(self, number: int, reports: Sequence[RoundReport]) -> SwarmRound:
        drivers = [each for each in reports if each.stage == 0]
        first = min(drivers or reports, key=lambda each: each.time)
        seconds = first.time - self._ended
        if math.isnan(seconds):
            seconds = first.seconds_train + first.seconds_wait + first.seconds_average
        self._ended = first.time
        losses = [each.held_out_loss for each in reports if math.isfinite(each.held_out_loss)]
        return SwarmRound(
            number=number,
            held_out_loss=losses[0] if losses else math.nan,
            tokens_per_second=sum(each.tokens / each.seconds_train for each in drivers if each.seconds_train > 0),
            in_mean=first.in_mean if drivers else 0,
            seconds=seconds,
            spread=max((each.spread for each in reports if math.isfinite(each.spread)), default=math.nan),
            stages=len(self.stage_numbers),
        )

    @property
    def losses(self) -> list[float]:
        """Held-out losses of the kept rounds, without those that are not known."""
        return [each.held_out_loss for each in self.rounds if math.isfinite(each.held_out_loss)]

    @property
    def spread(self) -> tuple[float, float]:
        """Largest spread in the peers' last reports, and the run's limit; both nan with replicated state.

        All last reports count, because the peers that stay longest see the fewest others. A peer estimates the spread
        from the others' last sketches, which may be of an earlier round. If all parameters are equal, it is 0.
        """
        last = [each.last for each in self.tracks.values() if each.last]
        known = [each.spread for each in last if not math.isnan(each.spread)]
        limits = [each.spread_limit for each in last if not math.isnan(each.spread_limit)]
        if limits and len({each.params_hash for each in last}) == 1:
            known = [0.0]
        return max(known, default=math.nan), max(limits, default=math.nan)

    @property
    def stage_numbers(self) -> list[int]:
        """The stages, in order; 0 alone in a run without stages."""
        reported = {each.stage for each in self.tracks.values()}  # a stage that the run should lack counts, too
        return sorted(reported | set(range(self._stages)))

    @property
    def stages(self) -> list[StageSummary]:
        return [self._stage(stage) for stage in self.stage_numbers]

    def _stage(self, stage: int) -> StageSummary:
        tracks = [each for each in self.tracks.values() if each.stage == stage]
        agree = bool(tracks) and all(each.well and each.last for each in tracks)
        spread, limit = self.spread
        if math.isnan(limit):
            agree &= len({(each.lineage, each.params_hash) for each in tracks}) == 1
        else:
            agree &= spread <= limit
        hashes = {each.params_hash for each in tracks}
        return StageSummary(stage, agree, hashes.pop() if agree and len(hashes) == 1 else "")

    @property
    def agree(self) -> bool:
        """Whether all peers left in good order and those of each stage agree.

        With replicated state they must have the same lineage and parameters; with independent state, a spread within
        the run's limit.
        """
        return all(each.agree for each in self.stages)

    @property
    def fell(self) -> bool:
        """Whether the held-out loss is lower than after the first round.

        With stages, rounds shorter than an evaluation have none. If only the last one has, nothing is known.
        """
        if self._stages > 1 and len(self.losses) == 1 < len(self.rounds):
            return True
        return bool(self.losses) and self.losses[-1] < self.first_loss

    def as_json(self) -> dict[str, Any]:
        return {
            "agree": self.agree,
            "spread": self.spread[0],
            "spread_limit": self.spread[1],
            "rounds": self._next,
            "loss_first": self.first_loss,
            "loss_last": (self.losses or [math.nan])[-1],
            "stages": [asdict(each) for each in self.stages],
            "peers": [each.as_json() for each in self.tracks.values()],
        }
