"""The timeline of a recording: what a person reads after a play."""

from __future__ import annotations

from dataclasses import replace

from tests.faults.judge import judge
from tests.faults.recording import Event, Limits
from tests.faults.timeline import COLUMNS, timeline
from tests.support.recordings import BEGAN, NO_CONTRIBUTIONS, after_death, history, voted_report


def test_timeline_lists_events_rounds_and_violations_in_order() -> None:
    """A death, a round whose end bert did not see, an orphan and a missed aim."""
    play = after_death()
    missed = voted_report("bert", 17, outcome="undecided", lineage="L17", params_hash="params 17", **NO_CONTRIBUTIONS)
    behind = voted_report("bert", 17, parent="L17", outcome="superseded", **NO_CONTRIBUTIONS, lost_tokens=20_480)
    history(play, "bert")[17:18] = [missed, behind]
    play = replace(
        play,
        events=[*play.events, Event(BEGAN + 15, "SIGKILL at send Chunk", ("cleo",), "fault")],
        limits=Limits(recovery_seconds=5.0, aims={"notice_seconds": 2.0}),
        left={"cleo": ("python -m node.training.worker " + 30 * "--more-of-it ",)},
        measures={"notice_seconds": (3.0,)},
    )
    lines = timeline(play, judge(play))
    assert {
        "   19.0  FAULT  cut off: bert",
        "   24.0  exit   cleo: SIGKILL",
        "   10.0         round 0 committed    anna bert cleo       anna, bert, cleo",
        "   27.0         round 17 undecided   -                    bert",
        "   27.0         round 17 superseded  now at round 18      bert; lost 20,480 tokens",
        "  missed: notice_seconds is 3.00, should be at most 2",
    } < set(lines)
    assert "FAIL  made-up, seed 7: 30 rounds committed, 0 skipped; recovery 1.00 s of 5 s" in "\n".join(lines)
    assert "  orphan         cleo: is left of it: python" in "\n".join(lines) and max(map(len, lines)) <= COLUMNS
    seconds = [float(line[:7]) for line in lines if line[:7].strip().replace(".", "").isdigit()]
    assert seconds == sorted(seconds) and len(seconds) > 35
