"""Exported models: Hugging Face's own library loads them, and computes the same."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from node.config.run_config import load_run
from node.export import hugging_face, load_again
from node.export.checking import Expected, problems, require_loading, write_job
from node.export.hugging_face import export
from node.export.trained_model import load_trained
from node.tasks.hf.settings import ModelError
from tests.support.refusals import one_line
from tests.support.statedir_fixtures import keep, kept_gpt


def refusal(directory: Path, out: Path) -> str:
    return one_line(ModelError, export, load_trained([directory]), out)


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_transformers_load_the_same_model_and_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    ours = kept_gpt(tmp_path / "peer")
    found = load_trained([tmp_path / "peer"])
    export(found, tmp_path / "new" / "out")
    (tmp_path / "new" / "out").rename(tmp_path / "out")
    assert not [*(tmp_path / "new").iterdir()], "no unfinished file is left"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert isinstance(theirs, LlamaForCausalLM) and theirs.dtype == torch.float32
    assert theirs.config.max_position_embeddings == ours.shape.context and not theirs.config.tie_word_embeddings
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "\n# small of course\n" in card
    assert found.manifest.run_id in card and found.checkpoints[0].lineage.hex() in card
    assert "| rounds | 5 of 20 |" in card and "| held-out loss | 2.5000 nats per byte |" in card
    tokens = torch.randint(256, (3, ours.shape.context), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (theirs(tokens).logits - ours(tokens)).abs().max() < 1e-5
    everything = "def f(x):\n\treturn 'é', \"日本\" # 100%  \r\n\x00\x7f " + "".join(map(chr, range(33, 0x180)))
    assert tokenizer(everything)["input_ids"] == list(everything.encode())
    assert tokenizer.decode(list(everything.encode())) == everything and len(tokenizer) == 256
    prompt = tokenizer("def ", return_tensors="pt")
    more = theirs.generate(**prompt, do_sample=False, max_new_tokens=8)[0, 4:]
    assert bytes(more.tolist()) == ours.generate(b"def ", 8)


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_another_model_than_the_runs_is_noticed(tmp_path: Path, written: dict[Path, Expected]) -> None:
    kept_gpt(tmp_path / "peer")
    export(load_trained([tmp_path / "peer"]), tmp_path / "out")
    (right,) = written.values()
    assert right.logits is not None
    wrong = {
        "its logits differ by 0.0": replace(right, logits=right.logits * 1.01),
        "its tokenizer makes other tokens of a text": replace(right, tokens=[*right.tokens, 0]),
        "it cannot be loaded: ValueError": replace(right, base=tmp_path / "peer"),
    }
    for number, (words, each) in enumerate({"": right, **wrong}.items()):
        found = load_again.problem(json.loads(write_job(tmp_path, number, tmp_path / "out", each).read_text()))
        assert found.startswith(words) and bool(found) == bool(words), found


def test_export_is_loaded_in_a_process_of_its_own(tmp_path: Path, written: dict[Path, Expected]) -> None:
    keep(tmp_path / "peer", load_run(None, {"task": "mine.tasks:make"}, ["butterfly"]), nn.Linear(3, 4))
    export(load_trained([tmp_path / "peer"]), tmp_path / "out")
    (right,) = written.values()
    wrong = Expected(tensors=right.tensors | {"weight": "other"})  # type: ignore[operator]
    found = problems([(tmp_path / "out", right), (tmp_path / "out", wrong), (tmp_path / "absent", right)])
    assert found[:2] == ["", "1 tensors differ from the run's, such as weight"]
    assert found[2].startswith("it cannot be loaded: FileNotFoundError")


BAD_PROCESSES = {
    """print('{"problem": "it is bad"}')""": "the export was loaded again, and it is bad: it was removed",
    "import os; os.kill(os.getpid(), 9)": "was killed, probably because memory ran out, so the export was removed",
    "1 / 0": "last output: Traceback",
}


def test_export_that_loads_otherwise_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_gpt(tmp_path / "peer")
    monkeypatch.setattr(hugging_face, "require_loading", require_loading)
    monkeypatch.setattr(load_again, "__file__", str(tmp_path / "program.py"))
    for program, words in BAD_PROCESSES.items():
        (tmp_path / "program.py").write_text(program)
        assert words in refusal(tmp_path / "peer", tmp_path / "out")
        assert {each.name for each in tmp_path.iterdir()} == {"peer", "program.py"}


def test_own_module_is_exported_under_its_names(tmp_path: Path) -> None:
    config = load_run(None, {"task": "mine.tasks:make"}, ["butterfly"])
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    keep(tmp_path / "peer", config, module, loss=None)
    (tmp_path / "out").mkdir()  # an empty directory counts as absent
    export(load_trained([tmp_path / "peer"]), tmp_path / "out")
    assert {each.name for each in (tmp_path / "out").iterdir()} == {"README.md", "model.safetensors"}
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == dict(module.named_parameters()).keys()
    assert all(torch.equal(found[name], parameter) for name, parameter in module.named_parameters())
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("# starling\n") and "`mine.tasks:make`" in card and "| not measured |" in card


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    kept_gpt(tmp_path / "peer")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "full", "link"):
        assert "exists already and is not overwritten" in refusal(tmp_path / "peer", tmp_path / name)
    assert (tmp_path / "full" / "config.json").read_text() == (tmp_path / "file").read_text() == "mine"


def test_failed_export_gives_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_gpt(tmp_path / "peer")
    inside_a_file = tmp_path / "peer" / "manifest.bin" / "out"
    assert "cannot be written (Not a directory)" in refusal(tmp_path / "peer", inside_a_file)
    assert "cannot be written" in refusal(tmp_path / "peer", Path("/proc/nothing/out"))
    write = os.pwrite

    def full(file: int, data: memoryview, offset: int) -> int:
        if offset:
            raise OSError(28, "No space left on device")
        return write(file, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    assert "No space left on device" in refusal(tmp_path / "peer", tmp_path / "out")
    assert {each.name for each in tmp_path.iterdir()} == {"peer"}
