"""The experiment on protocols: paired runs, and data parallel training, which equals plain training with one peer."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.book import Book, due
from benchmarks.laboratory.reference import LabMember
from benchmarks.mixers import all_reduce, gossip, pairs
from benchmarks.protocols import ARMS, Arm, Pooled, loose, main, parse, up, wanted


def arm(protocol: str, peers: int, failure: float = 0.0, rounds: int = 1) -> Arm:
    return Arm(protocol, peers, rounds, inner_steps=2, preset="w64", seed=0, failure=failure)


def test_all_protocols_share_the_same_downtime() -> None:
    for number in range(200):
        downs = {tuple(up(arm(protocol, 8, 0.9), number)) for protocol in ARMS}
        assert len(downs) == 1 and any(*downs)
    share = sum(sum(up(arm("gossip", 8, 0.3), number)) for number in range(500)) / 4000
    assert share == pytest.approx(0.7, abs=0.03)


def test_data_parallel_with_one_peer_equals_plain_training() -> None:
    pooled, plain = Pooled(arm("data-parallel", 1)), LabMember(arm("one-worker", 1).run(), 0)
    pooled.among([0])
    for step in range(2):
        assert pooled.step(0, step).loss == plain.step(0, step).loss
    assert torch.equal(pooled.vectors[0], plain.vectors[0])


def test_rate_changes_run_name_and_step_length() -> None:
    """Without decay, the first step of AdamW is as long as its rate."""
    one, half = arm("alone", 1), replace(arm("alone", 1), rate=0.5)
    assert one.name() != half.name() and one.run().name() != half.run().name()
    moved = []
    for each in (one, half):
        member = LabMember(each.run(), 0)
        before = member.vectors[0].clone()
        member.step(0, 0)
        moved.append(float((member.vectors[0] - before).norm()))
    assert moved[1] == pytest.approx(moved[0] / 2, rel=0.01)


@pytest.mark.parametrize("protocol", ("moshpit", "noloco"))
def test_full_state_averaging_gives_one_model(protocol: str) -> None:
    """Then the mean of the losses is the loss of each."""
    averaged = loose(arm(protocol, 2), all_reduce(2, random.Random(0)), 1)[-1][1]
    apart = loose(arm(protocol, 2), lambda number, here, values: values, 1)[-1][1]
    assert averaged != apart and averaged == pytest.approx(apart, rel=0.01)


def test_interrupted_lab_reports_complete_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pairs are the seeds that both protocols have completed."""
    path = tmp_path / "runs.json"
    options, book = parse(["--json", str(path), "--seeds", "2"]), Book(path, resume=False)
    todo = due(list(wanted(options)), book)
    assert len(todo) == 40 and {each.seed for each in todo[:20]} == {0}
    for protocol, seed, loss in (("data-parallel", 0, 2.0), ("data-parallel", 1, 1.0), ("gossip", 0, 2.2)):
        done = replace(arm(protocol, 8, rounds=12), inner_steps=100, seed=seed)
        book.enter(done, [(1200, loss)], 1.0)
    assert len(due(todo, book)) == 37
    assert main(["--json", str(path), "--show", "--seeds", "2"]) == 0
    shown = capsys.readouterr().out
    assert "3 of 40 runs" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["gossip", "0", "2.2000", "-", "2.2000", "+10.00%"] in lines
    for protocol, loss in (("alone", 3.0), ("butterfly", 2.0)):
        book.enter(replace(arm(protocol, 8, rounds=12), inner_steps=100), [(1200, loss)], 1.0)
    main(["--json", str(path), "--show", "--seeds", "2"])
    (gossip_line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gossip")]
    assert gossip_line.endswith("80%"), "of what the butterfly gains over one that is alone"


def test_resume_rejects_runs_on_other_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.json"
    path.write_text('{"text": "of another Python", "runs": {}}')
    with pytest.raises(SystemExit, match="2"):
        main(["--json", str(path), "--resume", "--seeds", "1", "--only", "alone"])
    assert "another Python's text" in capsys.readouterr().err
    assert main(["--json", str(path), "--show"]) == 0


def test_gossip_replaces_partner_that_is_down() -> None:
    here, values = torch.tensor([True, False, True, True, False, True]), torch.eye(6, dtype=torch.float64)
    calm = gossip("random")(6, random.Random(1))(3, torch.ones(6, dtype=torch.bool), values)
    assert torch.equal(calm, pairs(6, random.Random(1))(3, torch.ones(6, dtype=torch.bool), values))
    for number in range(20):
        mixed = pairs(6, random.Random(1))(number, here, values)
        assert torch.equal(mixed[~here], values[~here])
        assert sorted(mixed[here].max(1).values.tolist()) == [0.5] * 4 and torch.equal(mixed.sum(0), torch.ones(6))


def test_bad_arguments_give_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--json", "x.json", "--failures", "1"])
    assert main(["--json", "/nowhere/x.json"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
