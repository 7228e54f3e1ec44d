"""Judges a play of an independent protocol, in which each peer owns its state and exchanges bring the states together.

Without votes there are no forks, but states can drift apart. So the spread at the end is judged. For a task that
trains, the limit is the run's spread limit. Paced peers walk at random around 0: n peers that never mix reach a spread
of √(n − 1), and peers that mix must stay well below it. The limit is coarse, as the spread of four mixing peers varies
between 0.2 and 1.0 of 1.7. The recovery shows whether the peers mix at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from tests.faults.recording import Incarnation, Recording
from tests.support.checkers import Report, Violation, incarnations
from tests.support.independent_checkers import check, mixed

APART = 0.75
"""The spread limit of paced peers, as a share of the spread of peers that never mix."""
LAST_REPORTS = 3


def broken(play: Recording) -> list[Violation]:
    return [*check(play.histories, play.protocol), *_apart(play)]


def recovery_seconds(play: Recording) -> float:
    """Seconds from the end of the faults until all expected peers have mixed, in later rounds; nan if they have not."""
    reports = (report for name in play.should for report in play.histories.get(name, ()))
    found = mixed(reports, [play.ids.get(name, "") for name in play.should], play.healed)
    return found["time"] - play.healed if found else math.nan


def goodput(play: Recording) -> float:
    """The share of the possible tokens that counted; 1 is the calm's rate. nan if that rate is unknown.

        tokens that counted, from each peer's last round of the calm to `ended`
        ───────────────────────────────────────────────────────────────────────
        the calm's tokens per second of a peer × seconds that peers were up since

    Tokens count when their peer next commits a round, that is, mixes its state. The tokens of skipped rounds count
    with the next committed one. Those in a state that is lost or replaced do not count. The calm's rate is measured
    from each peer's first round in the calm to its last.
    """
    usual = calm_seconds = brought = seconds = 0.0
    for name in play.ids:
        counted = list(_counted(play.histories.get(name, ())))
        calm = [time for time, _ in counted if play.calm[0] <= time <= play.calm[1]]
        first, last = (calm[0], calm[-1]) if calm else (play.calm[1], play.calm[1])
        usual += sum(tokens for time, tokens in counted if first < time <= last)
        calm_seconds += last - first
        brought += sum(tokens for time, tokens in counted if last < time <= play.ended)
        seconds += sum(_overlap(incarnation, last, play.ended) for incarnation in play.incarnations.get(name, ()))
    if not (usual and calm_seconds and seconds):
        return math.nan
    return brought / (usual / calm_seconds * seconds)


def participation(play: Recording) -> float:
    """The share of the peers' rounds since the calm began in which they mixed; nan without rounds."""
    mixed = [
        report["outcome"] == "committed"
        for history in play.histories.values()
        for report in history
        if play.calm[0] <= report["time"] <= play.ended and report["outcome"] in ("committed", "skipped")
    ]
    return sum(mixed) / len(mixed) if mixed else math.nan


def _counted(history: Sequence[Report]) -> Iterator[tuple[float, float]]:
    for incarnation in incarnations(history):
        waiting = 0.0
        for report in incarnation:
            waiting = 0.0 if report["outcome"] == "superseded" else waiting + report["tokens"]
            if report["outcome"] == "committed":
                yield report["time"], waiting
                waiting = 0.0


def _overlap(incarnation: Incarnation, since: float, until: float) -> float:
    return max(0.0, min(incarnation.ended, until) - max(incarnation.began, since))


def measures(play: Recording) -> dict[str, list[float]]:
    reports = [report for history in play.histories.values() for report in history]
    return {
        "spread_in_the_calm": _spreads(play, *play.calm),
        "spread_at_the_end": _last_spreads(play),
        "half_exchanges": [sum(report["half_exchanges"] for report in reports)],
    }


def _spreads(play: Recording, since: float, until: float) -> list[float]:
    """The median of each peer's last reported spreads in that time."""
    spreads = ([each["spread"] for each in last] for last in _last(play, since, until))
    return [median(each) for each in spreads if each]


def _last_spreads(play: Recording) -> list[float]:
    """The same at the end; 0 for all if they hold the same parameters, since spreads compare with older sketches."""
    ends = _spreads(play, play.healed, play.ended)
    held = [{each["params_hash"] for each in last} for last in _last(play, play.healed, play.ended) if last]
    same = len(held) >= len(play.should) and bool(set.intersection(*held)) if held else False
    return [0.0 for _ in ends] if same else ends


def _last(play: Recording, since: float, until: float) -> list[list[Report]]:
    histories = [play.histories.get(name, ()) for name in play.ids]
    return [
        [each for each in history if since < each["time"] <= until and _known(each)][-LAST_REPORTS:]
        for history in histories
    ]


def _known(report: Report) -> bool:
    return report["spread"] is not None and math.isfinite(report["spread"])


def _apart(play: Recording) -> Iterator[Violation]:
    ends = _last_spreads(play)
    if play.task == "paced":
        limit = APART * math.sqrt(max(0, len(play.should) - 1))
    else:
        reports = (report for history in play.histories.values() for report in history)
        limit = min((each["spread_limit"] for each in reports if _known(each)), default=math.nan)
    if not max(ends, default=math.nan) <= limit:
        yield Violation("spread", "", -1, f"{max(ends, default=math.nan):.4f} apart at the end; at most {limit:.4f}")
