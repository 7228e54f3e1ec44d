"""What must hold of the histories of a run in stages. Each stage has a chain of its own, and is checked by itself.

one-stage       a peer works in one stage, unless it moves: then in one for each incarnation
stage-round     each round of stage 0 is decided, by a mean or by a record that skips it: none is missing
counted-below   the microbatches that a stage counted are at least those of the stage before it, but for reports that
                died with their peers
one-pace        at the end no stage is more than one training round behind another
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from tests.support import checkers
from tests.support.checkers import DECIDED, Report, Tree, Violation

Histories = Mapping[str, Sequence[Report]]

STAGES_APART = 1
"""Rounds by which stages may differ at the end: their reports are written at different moments."""


def by_stage(histories: Histories) -> dict[int, dict[str, Sequence[Report]]]:
    """The histories of each stage: of a peer that has moved, what it did there. One without reports is in none."""
    found: dict[int, dict[str, Sequence[Report]]] = {}
    for name, history in histories.items():
        for stage in {each["stage"] for each in history}:
            found.setdefault(stage, {})[name] = [each for each in history if each["stage"] == stage]
    return dict(sorted(found.items()))


def check(histories: Histories, movers: Collection[str] = ()) -> list[Violation]:
    """Every violation in these histories. `movers` are peers that were moved to another stage."""
    found = [violation for stage in by_stage(histories).values() for violation in checkers.check(stage)]
    return [*found, *one_stage(histories, movers), *no_gap(by_stage(histories).get(0, {}))]


def one_stage(histories: Histories, movers: Collection[str] = ()) -> Iterator[Violation]:
    """A violation for each peer that worked in two stages without a move, or that states another number of stages.

    Rounds without a mean are not work: after them a peer may still lose its stage.
    """
    for name, reports in histories.items():
        history = [each for each in reports if each["peers"]]
        lives = {each["incarnation"] if name in movers else 0 for each in history}
        for life in lives:
            places = {(each["stage"], each["stages"]) for each in history if life in (0, each["incarnation"])}
            if len(places) > 1:
                named = " and ".join(f"{k} of {n}" for k, n in sorted(places))
                yield Violation("one-stage", name, -1, f"was in {named}")


def no_gap(drivers: Histories) -> Iterator[Violation]:
    """A violation for each round of stage 0 that no driver has decided, between its first and its last."""
    decided = {each["round"] for history in drivers.values() for each in history if each["outcome"] in DECIDED}
    for lost in sorted(set(range(min(decided, default=0), max(decided, default=-1))) - decided):
        yield Violation("stage-round", "", lost, "no peer of stage 0 has decided it")


def counted_below(histories: Histories, unreported: Mapping[int, int]) -> Iterator[Violation]:
    """A violation for each stage that counted less than the stage before it."""
    counted = {
        stage: sum(each["microbatches"] for history in peers.values() for each in history)
        for stage, peers in by_stage(histories).items()
    }
    for stage in sorted(counted)[1:]:
        before = counted.get(stage - 1, 0)
        if counted[stage] + unreported.get(stage, 0) < before:
            lost = f"{unreported[stage]} unreported at most" if unreported.get(stage) else "none unreported"
            detail = f"stage {stage} counted {counted[stage]} microbatches, stage {stage - 1} {before}; {lost}"
            yield Violation("counted-below", "", -1, detail)


def one_pace(histories: Histories, stages: int, until: float) -> Iterator[Violation]:
    """A violation if the stages' training rounds until that wall time are too far apart."""
    last = dict.fromkeys(range(stages), 0)
    for stage, peers in by_stage(histories).items():
        reports = [each for history in peers.values() for each in history if each["time"] <= until]
        last[stage] = trained(reports)
    if max(last.values()) - min(last.values()) > STAGES_APART:
        rounds = ", ".join(f"stage {stage} after {count}" for stage, count in sorted(last.items()))
        yield Violation("one-pace", "", -1, f"{rounds} training rounds")


def trained(reports: Sequence[Report]) -> int:
    """Training rounds of the longest branch: all but forks without a mean, as `Chain.trained` counts them."""
    tree = Tree(reports)
    idle = {each["lineage"] for each in reports if each["outcome"] == "fork" and not each["peers"]}
    head = max(tree.rounds, key=lambda lineage: tree.rounds[lineage], default="")
    return tree.rounds.get(head, 0) - len(idle & set(tree.line(head)))
