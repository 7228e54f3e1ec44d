"""The verdict and the figures of the test, by the judge of `tests.faults`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.docker.cases import Struck
from tests.docker.swarm import Swarm
from tests.faults.goodput import reports
from tests.faults.judge import NO_ROUND, Verdict, judge
from tests.faults.recording import Event, Limits, Recording
from tests.faults.timeline import timeline
from tests.support.checkers import Violation

RECOVERY_SECONDS = 120.0
Figures = dict[str, Any]


def judged(play: Recording, swarm: Swarm, struck: Sequence[Struck], file: Path, say: Callable[[str], None]) -> Verdict:
    """The verdict of `tests.faults`, and what only containers show. The timeline is written to `file`."""
    found = judge(play)
    extra = [each.as_dict() for each in (*forks(play, struck), *unnamed(swarm))]
    violations = found.violations + extra
    found = replace(found, violations=violations, verdict="fail" if violations else "pass")
    lines = timeline(play, found)
    file.write_text("\n".join(lines) + "\n")
    for line in lines[-(2 + len(violations)) :]:
        say(line)
    return found


def broken(found: Verdict) -> list[str]:
    return [f"{each['invariant']}: {each['peer']}: {each['detail']}" for each in found.violations]


def play(
    swarm: Swarm,
    events: Sequence[Event],
    struck: Sequence[Struck],
    calm: tuple[float, float],
    ended: float,
    stages: int = 1,
) -> Recording:
    """The swarm has left, and its volumes still exist."""
    everybody = swarm.everybody()
    last = struck[-1] if struck else Struck("the start", over=calm[1], should=tuple(everybody))
    return Recording(
        scenario="docker",
        seed=0,
        protocol="butterfly",
        task="gpt",
        limits=Limits(RECOVERY_SECONDS, forks=True),  # `forks` checks each one
        calm=calm,
        healed=last.over,
        ended=ended,
        should=last.should,
        ids={name: peer.id for name, peer in everybody.items()},
        events=events,
        histories={name: peer.reports() for name, peer in everybody.items()},
        logs=swarm.logs,
        incarnations=swarm.incarnations(),
        left=swarm.left(),
        measures={},
        stuck=[f"{case.name}: {what}" for case in struck for what in case.failed],
        stages=stages,
    )


def forks(play: Recording, struck: Sequence[Struck]) -> Iterator[Violation]:
    windows = [
        (case.began, case.over + case.figures.get("recovery_seconds", RECOVERY_SECONDS), case) for case in struck
    ]
    for report in reports(play, ("fork",)):
        name = next((name for name, peer in play.ids.items() if peer == report["peer"]), "")
        if not any(began <= report["time"] <= end and name in case.targets for began, end, case in windows):
            yield Violation(
                "fork", report["peer"], report["round"], "it went on without most of its roster, which was there"
            )


def unnamed(swarm: Swarm) -> Iterator[Violation]:
    for spell in swarm.spells:
        if not spell.name:
            what = f"a container ended with {spell.code} before it held a directory"
            yield Violation("exit-code", spell.container[:12], NO_ROUND, what)


def losses(play: Recording) -> tuple[float, float]:
    reported = [
        each["held_out_loss"]
        for each in reports(play, ("committed", "alone", "fork"))
        if each["held_out_loss"] is not None and math.isfinite(each["held_out_loss"])
    ]
    return (reported[0], reported[-1]) if reported else (math.nan, math.nan)


def figures(play: Recording, swarm: Swarm, struck: Sequence[Struck]) -> Figures:
    everything = [report for history in play.histories.values() for report in history]
    first, last = losses(play)
    failed = sum(code != 0 for code in swarm.health.values())
    return {
        "cases": cases(struck),
        "rounds": max((each["round"] + 1 for each in everything), default=0),
        "held_out_loss": [first, last],
        "bytes_sent": sum(each["bytes_sent"] for each in everything),
        "bytes_received": sum(each["bytes_received"] for each in everything),
        "bytes_downloaded": sum(each["bytes_downloaded"] for each in everything),
        "health_checks": len(swarm.health),
        "health_checks_failed": failed,
        "seconds": play.ended - play.calm[0],
    }


def cases(struck: Sequence[Struck]) -> list[Figures]:
    return [
        {"name": each.name, "whom": each.targets, "peers": len(each.should), "failed": each.failed, **each.figures}
        for each in struck
    ]


def table(found: Figures) -> list[str]:
    lines = ["| fault | the others' next round, s | all in one mean again, s | peers | |", "|---|---|---|---|---|"]
    for case in found["cases"]:
        cells = [_number(case.get(f"{what}_seconds")) for what in ("next_round", "recovery")]
        others = {
            name.removesuffix("_seconds").replace("_", " "): value
            for name, value in case.items()
            if name.endswith("_seconds") and name not in ("next_round_seconds", "recovery_seconds")
        }
        more = [f"{name} {value:.1f} s" for name, value in others.items()] + [
            f"failed: {each}" for each in case["failed"]
        ]
        lines.append(f"| {case['name']} | {' | '.join(cells)} | {case['peers']} | {'; '.join(more)} |")
    return lines


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def summary(found: Figures) -> str:
    first, last = found["held_out_loss"]
    memory = [value / 2**20 for value in found["memory_bytes"].values()]
    return (
        f"{found['rounds']} rounds in {found['seconds']:.0f} s; held-out loss {first:.3f} -> {last:.3f}; "
        f"{found['bytes_sent'] / 1e6:.1f} MB sent, {found['bytes_received'] / 1e6:.1f} MB received, "
        f"{found['bytes_downloaded'] / 1e6:.1f} MB of state downloaded; image {found['image_bytes'] / 1e9:.2f} GB, "
        f"built in {found['build_seconds']:.0f} s; memory of a container {min(memory):.0f} to {max(memory):.0f} MiB; "
        f"health checks: {found['health_checks']}, failed {found['health_checks_failed']}; "
        f"all left within {found['stop_seconds']:.1f} s"
    )
