"""The laboratory of learning: its journal, what it chooses from finished runs, and its tables."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.journal import RunJournal
from benchmarks.laboratory import __main__ as laboratory
from benchmarks.laboratory.choices import choose, outer_candidates, rate_candidates
from benchmarks.laboratory.experiments import experiments
from benchmarks.laboratory.perform import Finished
from benchmarks.laboratory.report import table
from benchmarks.laboratory.runs import ARMS, LabRun, trial

FIRST, SECOND = trial("alone", 0), trial("alone", 1)


def entered(journal: RunJournal, given: LabRun, loss: float) -> None:
    journal.enter(given, [(2000, loss)], 1.0)


def test_torn_line_is_run_again(tmp_path: Path) -> None:
    """And costs neither the runs before it nor those after it."""
    path = tmp_path / "runs.jsonl"
    entered(RunJournal(path), FIRST, 1.5)
    whole = path.read_text()
    path.write_text(whole + whole.replace(FIRST.name(), SECOND.name())[:-20])
    journal = RunJournal(path)
    assert FIRST in journal and SECOND not in journal
    entered(journal, SECOND, 1.6)
    again = RunJournal(path)
    assert (again.loss(FIRST), again.loss(SECOND)) == (1.5, 1.6)


def test_two_processes_append_and_first_run_counts(tmp_path: Path) -> None:
    one, other = RunJournal(tmp_path / "runs.jsonl"), RunJournal(tmp_path / "runs.jsonl")
    entered(one, FIRST, 1.5)
    entered(other, FIRST, 1.7)
    entered(other, SECOND, 1.6)
    one.read()
    assert (one.loss(FIRST), one.loss(SECOND)) == (1.5, 1.6)


def test_resume_performs_only_missing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = RunJournal(tmp_path / "runs.jsonl")
    *done, missing = laboratory.due(["baselines"], journal)
    for each in done:
        entered(journal, each, 1.5)
    performed = list[LabRun]()

    def perform(given: LabRun) -> Finished:
        performed.append(given)
        return Finished([(2000, 1.6)], 1.0, 1.0, {})

    monkeypatch.setattr(laboratory, "perform", perform)
    with ThreadPoolExecutor(1) as pool:
        schedule = laboratory.Schedule(lambda: laboratory.due(["baselines"], journal), journal, workers=1)
        schedule.follow(pool, may_begin=lambda: True, over=lambda: True)
        assert not performed, "its time is over"
        schedule.follow(pool, may_begin=lambda: True, over=lambda: False)
    assert performed[0] == missing and not set(performed) & set(done)
    assert RunJournal(tmp_path / "runs.jsonl").loss(missing) == 1.6


def test_later_experiments_wait_for_every_baseline(tmp_path: Path) -> None:
    """A best rate at the edge brings the next one. With one run missing, nothing is chosen."""
    journal = RunJournal(tmp_path / "runs.jsonl")
    for _ in range(3):  # rates of 1 and 2; the next one; the better half's second seed
        *most, last = (each for each in experiments(journal)[0].trials if each not in journal)
        outer = next(each for each in experiments(journal) if each.name == "outer")
        assert outer.waits_for and not outer.rows
        for each in (*most, last):
            entered(journal, each, 1.3 if each.arm == "diloco" and each.run.rate == 2.0 else 1.4)
    _, _, outer, seeds, *_ = experiments(journal)
    assert {each.run.rate for each in outer.trials if each.arm == "diloco"} == {2.0}
    assert set(rate_candidates("diloco", journal)) == {1.0, 2.0, 4.0}
    assert set(rate_candidates("alone", journal)) == {1.0, 2.0, 0.5}
    assert seeds.waits_for == "the outer step"


@pytest.mark.long
def test_only_the_better_half_of_outer_steps_gets_a_second_seed(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path / "runs.jsonl")
    steps = list(outer_candidates(1.0, journal))
    for number, outer in enumerate(steps):
        entered(journal, trial("diloco", 0, outer=outer), 1.5 + number / 100)
    assert {each.run.outer for each in sum(outer_candidates(1.0, journal).values(), ()) if each.run.seed} == {
        *steps[:6]
    }
    assert choose(outer_candidates(1.0, journal), journal) is None
    for outer in steps[:6]:
        entered(journal, trial("diloco", 1, outer=outer), 1.5 if outer == steps[3] else 1.6)
    assert choose(outer_candidates(1.0, journal), journal) == steps[3]


def test_table_pairs_seeds_and_marks_missing_runs(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path / "runs.jsonl")
    for arm, seed, loss in (("data-parallel", 0, 1.0), ("data-parallel", 1, 2.0), ("diloco", 0, 1.02)):
        entered(journal, trial(next(each for each in ARMS if each == arm), seed, outer=(0.81, 0.7)), loss)
    lines = list(table(experiments(journal)[0], journal))
    assert "2 of 8 runs" in lines[0]
    assert "| diloco, 1 x the inner rate | 1.0200 | 1.0200 | +2.00% |" in lines
