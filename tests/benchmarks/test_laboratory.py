"""The laboratory of learning: its journal, what it chooses from finished runs, and its tables."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.book import RunJournal
from benchmarks.laboratory import __main__ as laboratory
from benchmarks.laboratory.experiments import choose, experiments, outer_candidates, rate_candidates
from benchmarks.laboratory.report import table
from benchmarks.laboratory.trial import ARMS, Finished, LabRun, trial

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
        schedule = laboratory.Schedule(["baselines"], journal, workers=1)
        schedule.follow(pool, may_begin=lambda: True, over=lambda: True)
        assert not performed, "its time is over"
        schedule.follow(pool, may_begin=lambda: True, over=lambda: False)
    assert performed == [missing] and RunJournal(tmp_path / "runs.jsonl").loss(missing) == 1.6


def test_later_experiments_wait_for_every_baseline(tmp_path: Path) -> None:
    """With one run missing nothing is chosen. A best rate at the edge brings the next one, which has to run, too."""
    journal = RunJournal(tmp_path / "runs.jsonl")
    best = rate_candidates("diloco", journal)[2.0]
    for each in experiments(journal)[0].trials:
        entered(journal, each, 1.3 if each in best else 1.4)
    baselines, outer, *_ = experiments(journal)
    *most, last = (each for each in baselines.trials if each not in journal)
    assert {each.run.rate for each in (*most, last)} == {4.0} and outer.waits_for and not outer.rows
    for each in (*most, last):
        entered(journal, each, 1.5)
    _, outer, seeds, *_ = experiments(journal)
    assert {each.run.rate for each in outer.trials if each.arm == "diloco"} == {2.0}
    assert seeds.waits_for == "the outer step"


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
    values = {("data-parallel", 0): 1.0, ("data-parallel", 1): 2.0, ("diloco", 0): 1.02, ("diloco", 1): 2.08}
    for (arm, seed), loss in {**values, ("alone", 0): 1.5}.items():
        entered(journal, trial(next(each for each in ARMS if each == arm), seed, outer=(0.81, 0.7)), loss)
    lines = list(table(experiments(journal)[0], journal))
    assert "5 of 24 runs" in lines[0]
    assert "| diloco, 1 x the inner rate | 1.0200 | 2.0800 | 1.5500 ± 0.7495 | +3.00% ± 1.41% |" in lines
    assert "| alone, 1 x the inner rate | 1.5000 | – | – | +50.00% (1 of 2 pairs) |" in lines
