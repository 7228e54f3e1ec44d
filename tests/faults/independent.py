"""A play of peers that share no anchor, judged: each has a state of its own, and exchanges bring these near.

What there is no vote on cannot fork; it can drift. So the spread at the end is judged. Where the task trains, it is at
most what the run bears. Paced peers walk at random, each by itself, round a mean of 0: n that never mix come to a
spread of √(n − 1), so those who mix must stay well below that. It is a coarse limit: four that mix go up and down
between .2 and 1.0 of 1.7. Whether they mix at all is judged by recovery.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from tests.faults.recording import Life, Recording
from tests.support.checkers import Report, Violation, lives
from tests.support.independent_checkers import check, mixed

APART = 0.75
"""Of the spread of walks that never meet."""
LAST_REPORTS = 3


def broken(play: Recording) -> list[Violation]:
    """Every violation of what such a protocol promises."""
    return [*check(play.histories, play.protocol), *_apart(play)]


def recovery_seconds(play: Recording) -> float:
    """From the end of the faults until all who should had mixed, in rounds that began after it; nan: they have not."""
    reports = (report for name in play.should for report in play.histories.get(name, ()))
    found = mixed(reports, [play.ids.get(name, "") for name in play.should], play.healed)
    return found["time"] - play.healed if found else math.nan


def goodput(play: Recording) -> float:
    """How much of what the living could have brought has counted; 1 is as in the calm. nan if that rate is unknown.

        tokens that counted, from each peer's last round of the calm to `ended`
        ───────────────────────────────────────────────────────────────────────
        the calm's tokens per second of a peer × seconds that peers were up since

    What a peer trains is in its own state, and counts when it commits: when that state is mixed. Rounds that were
    skipped wait for the next that is not; what is in a state that dies, or is left for another's, does not count.
    The calm's rate is that from each peer's first round of it to its last.
    """
    usual = calm_seconds = brought = seconds = 0.0
    for name in play.ids:
        counted = list(_counted(play.histories.get(name, ())))
        calm = [time for time, _ in counted if play.calm[0] <= time <= play.calm[1]]
        first, last = (calm[0], calm[-1]) if calm else (play.calm[1], play.calm[1])
        usual += sum(tokens for time, tokens in counted if first < time <= last)
        calm_seconds += last - first
        brought += sum(tokens for time, tokens in counted if last < time <= play.ended)
        seconds += sum(_overlap(life, last, play.ended) for life in play.lives.get(name, ()))
    if not (usual and calm_seconds and seconds):
        return math.nan
    return brought / (usual / calm_seconds * seconds)


def participation(play: Recording) -> float:
    """The share of all peers' own rounds since the calm began in which they mixed; nan if there was none."""
    told = [
        report["outcome"] == "committed"
        for history in play.histories.values()
        for report in history
        if play.calm[0] <= report["time"] <= play.ended and report["outcome"] in ("committed", "skipped")
    ]
    return sum(told) / len(told) if told else math.nan


def _counted(history: Sequence[Report]) -> Iterator[tuple[float, float]]:
    """When how many of a peer's own tokens counted."""
    for life in lives(history):
        waiting = 0.0
        for report in life:
            waiting = 0.0 if report["outcome"] == "superseded" else waiting + report["tokens"]
            if report["outcome"] == "committed":
                yield report["time"], waiting
                waiting = 0.0


def _overlap(life: Life, since: float, until: float) -> float:
    return max(0.0, min(life.ended, until) - max(life.began, since))


def measures(play: Recording) -> dict[str, list[float]]:
    """How far apart they were, and what may have moved one end of an exchange alone."""
    reports = [report for history in play.histories.values() for report in history]
    return {
        "spread_in_the_calm": _spreads(play, *play.calm),
        "spread_at_the_end": _last_spreads(play),
        "half_exchanges": [sum(report["half_exchanges"] for report in reports)],
    }


def _spreads(play: Recording, since: float, until: float) -> list[float]:
    """Of each peer, the median of what it reported last in that time."""
    told = ([each["spread"] for each in last] for last in _last(play, since, until))
    return [median(each) for each in told if each]


def _last_spreads(play: Recording) -> list[float]:
    """The same at the end; each compares itself with what others told last, so that all hold the same is known better.

    That they are apart by nothing is seen from a hash of parameters that all who should had among their last.
    """
    ends = _spreads(play, play.healed, play.ended)
    held = [{each["params_hash"] for each in last} for last in _last(play, play.healed, play.ended) if last]
    same = len(held) >= len(play.should) and bool(set.intersection(*held)) if held else False
    return [0.0 for _ in ends] if same else ends


def _last(play: Recording, since: float, until: float) -> list[list[Report]]:
    """Of each peer, the last reports of that time that tell a spread, oldest first."""
    histories = [play.histories.get(name, ()) for name in play.ids]
    return [
        [each for each in told if since < each["time"] <= until and _known(each)][-LAST_REPORTS:] for told in histories
    ]


def _known(report: Report) -> bool:
    return report["spread"] is not None and math.isfinite(report["spread"])


def _apart(play: Recording) -> Iterator[Violation]:
    """At the end, peers are as near to each other as they should be."""
    ends = _last_spreads(play)
    if play.task == "paced":
        limit = APART * math.sqrt(max(0, len(play.should) - 1))
    else:
        reports = (report for history in play.histories.values() for report in history)
        limit = min((each["spread_limit"] for each in reports if _known(each)), default=math.nan)
    if not max(ends, default=math.nan) <= limit:
        yield Violation("spread", "", -1, f"{max(ends, default=math.nan):.4f} apart at the end; at most {limit:.4f}")
