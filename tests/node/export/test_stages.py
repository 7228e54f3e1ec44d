"""The whole model from the state directories of its stages, and the one line where it cannot be assembled."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from node.config.run_config import load_run
from node.export.hugging_face import export
from node.export.trained_model import TrainedModel, load_trained, trained_rounds
from node.storage.certificate_log import CertificateLog
from node.tasks.gpt import Gpt
from node.tasks.gpt_stage import GptStage
from node.tasks.hf.settings import ModelError
from protocols.base import Member
from protocols.consensus.record import Kind
from protocols.history.chain import Chain
from tests.support.fake_rounds import RUN, decided, encoded
from tests.support.refusals import one_line
from tests.support.statedir_fixtures import StagedRun, found_in_stages, keep_checkpoint, kept_gpt, staged_run


@pytest.fixture
def run(tmp_path: Path) -> StagedRun:
    return staged_run(tmp_path / "founder")


@pytest.fixture
def kept(run: StagedRun, tmp_path: Path) -> list[Path]:
    """The directories of a peer of each stage."""
    return [run.keep(tmp_path / f"stage-{stage}", stage) for stage in range(3)]


def refusal(*directories: Path) -> str:
    return one_line(ModelError, load_trained, directories)


def same(found: TrainedModel, module: Gpt) -> bool:
    """Whether names, order and bits are those of the module."""
    wanted = module.state_dict()
    bits = (torch.equal(tensor, wanted[name]) for name, tensor in found.tensors.items())
    return list(found.tensors) == list(wanted) and all(bits)


def test_stages_in_any_order_are_the_whole_model(run: StagedRun, kept: list[Path]) -> None:
    for directories in (kept, kept[::-1], [*kept, kept[1]]):
        found = load_trained(directories)
        assert same(found, run.whole)
        assert found.rounds == (5, 5, 5) and found.held_out_loss == 2.5 and found.warning() == ""


def test_newest_checkpoint_of_a_stage_is_taken(run: StagedRun, kept: list[Path], tmp_path: Path) -> None:
    assert run.config.gpt
    later = GptStage(run.config.gpt.shape, 1, 3, seed=9)
    newer = run.keep(tmp_path / "newer", 1, 10, later)
    no_checkpoint = run.enter(tmp_path / "joined-just-now", 1)
    found = load_trained([no_checkpoint, newer, *kept])
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in later.state_dict().items())
    assert found.rounds == (5, 10, 5)
    assert found.warning() == (
        "warning: the checkpoints are of different rounds (stage 0 after 5, stage 1 after 10, stage 2 after 5): "
        "the model may be worse than that of a round"
    )
    assert math.isnan(found.held_out_loss), "it was measured with another stage 1"


def test_any_peer_of_stage_zero_knows_the_loss(run: StagedRun, kept: list[Path], tmp_path: Path) -> None:
    shutil.copytree(kept[0], tmp_path / "copy")
    (kept[0] / "rounds.jsonl").unlink()
    assert math.isnan(load_trained(kept).held_out_loss)
    assert load_trained([*kept, tmp_path / "copy"]).held_out_loss == 2.5


def test_model_card_names_each_stage(run: StagedRun, kept: list[Path], tmp_path: Path) -> None:
    found = load_trained(kept)
    export(found, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| rounds | 5 of 20 |" in card and "| held-out loss | 2.5000 nats per byte |" in card
    for stage, checkpoint in enumerate(found.checkpoints):
        assert f"| lineage of stage {stage} | `{checkpoint.lineage.hex()}` |\n" in card
    assert f"| parameters | {sum(each.numel() for each in run.whole.parameters()):,}, float32 |" in card
    run.keep(kept[2], 2, 10)
    export(load_trained(kept), tmp_path / "mixed")
    card = (tmp_path / "mixed" / "README.md").read_text()
    assert "| held-out loss | not measured |" in card and "`, after 10 rounds |\n" in card


def test_missing_stage_is_named(kept: list[Path]) -> None:
    assert refusal(kept[0], kept[2]) == (
        "stage 1 is missing: give the state directory of one of its peers by another --state-dir"
    )
    assert refusal(kept[1]).startswith("stages 0 and 2 are missing: give the state directory of a peer of each of them")


def test_directories_that_do_not_fit_give_one_line(run: StagedRun, kept: list[Path], tmp_path: Path) -> None:
    other = staged_run(tmp_path / "other-founder")
    stranger = other.keep(tmp_path / "stranger", 1)
    line = refusal(kept[0], stranger, kept[2])
    assert line == (
        f"{kept[0]} is of run {run.run_id[:12]}, {stranger} of run {other.run_id[:12]}: "
        "give state directories of one run only"
    )
    none = run.enter(tmp_path / "none", 1)
    assert f"{none} holds no whole checkpoint: a peer makes its first one" in refusal(kept[0], none, kept[2])
    assert "is not a directory" in refusal(*kept, tmp_path / "absent")
    assert "contains no run" in refusal(*kept, tmp_path)


def test_wrong_stage_file_gives_one_line(kept: list[Path]) -> None:
    file = kept[2] / "stage.json"
    file.write_text(json.dumps({"stage": 3}))
    assert f"{kept[2]} is of stage 3, its run has stages 0 to 2: correct its stage.json" in refusal(*kept)
    file.write_text("{")
    assert f"{file} is damaged" in refusal(*kept)
    file.write_text(json.dumps({"stage": 1}))
    assert refusal(*kept).startswith("stage 2 is missing")
    (kept[1] / "stage.json").write_text(json.dumps({"stage": 2}))
    assert f"the newest checkpoint in {kept[2]} has other tensors than stage 1 of its run" in refusal(*kept)


def test_run_without_stages_takes_one_directory(tmp_path: Path) -> None:
    kept_gpt(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    line = refusal(tmp_path / "a", tmp_path / "b")
    assert line.startswith("run ") and line.endswith(
        " has no stages, so each peer has the whole model: give one --state-dir, not 2"
    )
    (tmp_path / "a" / "stage.json").write_text(json.dumps({"stage": 4}))  # of an earlier run
    assert load_trained([tmp_path / "a"]).rounds == (5,)


def test_equal_names_get_the_stages_number(tmp_path: Path) -> None:
    config = load_run(None, {"task": "paced", "paced.elements": 5, "stages": 2}, ["butterfly"])
    modules = [nn.ParameterDict({"paced": torch.full((length,), float(length))}) for length in (3, 2)]
    run = found_in_stages(tmp_path / "founder", config, modules, (1, 2))
    export(load_trained([run.keep(tmp_path / str(stage), stage) for stage in (0, 1)]), tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in stored.items()} == {
        "stage0.paced": [3.0] * 3,
        "stage1.paced": [2.0] * 2,
    }


def test_idle_forks_do_not_count_as_rounds(run: StagedRun, kept: list[Path], tmp_path: Path) -> None:
    chain = Chain(RUN, "run", (Member("anna", 1),), bytes(32))
    log = CertificateLog(kept[1] / "certificates.bin")
    for kind in (Kind.MEAN, Kind.FORK, Kind.SKIP, Kind.MEAN, Kind.FORK, Kind.MEAN, Kind.MEAN):
        link = decided(chain.head, kind, root=bytes(32))
        chain.extend(link.certificate)
        log.extend([encoded(link)])
        if len(chain) == 6:
            lineage, trained = link.lineage, chain.trained
    assert trained == 4
    shutil.rmtree(kept[1] / "checkpoints")
    made = keep_checkpoint(kept[1], run.run_id, run.modules[1], 6, lineage)
    assert trained_rounds(kept[1], made) == 4
    for damage in (bytes(8), b"starcer1" + bytes(9)):
        (kept[1] / "certificates.bin").write_bytes(damage)
        assert trained_rounds(kept[1], made) == 6, "the chain does not lead to the checkpoint"
    assert (kept[1] / "certificates.bin").read_bytes() == damage, "a peer's file is left as it is"
