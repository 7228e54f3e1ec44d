"""Models of Hugging Face, fine-tuned: what export writes loads in transformers and peft; text and losses from them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from node.cli.app import main
from node.config.run_config import load_run
from node.export import load_again
from node.export.checking import Expected, write_job
from node.export.fetching import fetchable
from node.export.fine_tuned import fine_tuned_layout, load_fine_tuned
from node.export.trained_model import load_trained
from node.tasks.flat import layout_of, unfrozen
from node.tasks.hf.model import load_model
from node.tasks.hf.settings import ModelError
from tests.support.long import diagonal
from tests.support.small_models import story, write_model
from tests.support.statedir_fixtures import keep, kept_gpt

IDS = torch.tensor([[9, 11, 40, 7, 300, 12, 77, 5]])
EXPERTS = ("q_proj", "experts.down_proj", "experts.gate_up_proj")
EXPORTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "full": ("qwen3", {"train": "full"}, ()),
    "rank 2": ("gpt2", {"lora_rank": 2}, ()),
    "rank 16": ("bfloat16", {"lora_rank": 16}, ()),
    "experts": ("olmoe", {"lora_targets": EXPERTS}, ()),
    "merged tied": ("qwen3", {}, ("--merge",)),
    "merged Conv1D": ("gpt2", {}, ("--merge",)),
    "merged bfloat16": ("bfloat16", {}, ("--merge",)),
    "merged experts": ("olmoe", {"lora_targets": EXPERTS}, ("--merge",)),
    "merged output layer": ("llama", {"lora_targets": ("lm_head", "q_proj")}, ("--merge",)),
}
"""Name -> the base's kind, the run's settings, options of export."""


def trained(home: Path, kind: str, train: str = "lora", **settings: Any) -> Any:
    """Write a state directory with a trained model, and return the model."""
    if not (home / "base").exists():
        write_base(home / "base", kind)
    wanted = {f"hf.{name}": value for name, value in settings.items()}
    config = load_run(None, {"task": "hf", "hf.train": train, "hf.context": 64, **wanted}, ["butterfly"])
    assert config.hf
    loaded = load_model(str(home / "base"), config.hf, None, "cpu", torch.float32)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in loaded.module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    keep(home / "peer", config, loaded.module, model=loaded.pins)
    return loaded.module.eval()


def write_base(folder: Path, kind: str) -> None:
    """Write a model that was saved elsewhere. That of the kind bfloat16 has one tensor in float32."""
    write_model(folder, "qwen3" if kind == "bfloat16" else kind)
    weights, config = folder / "model.safetensors", folder / "tokenizer_config.json"
    if kind == "bfloat16":
        found = {name: each.bfloat16() for name, each in load_file(weights).items()}
        save_file(found | {"model.norm.weight": found["model.norm.weight"].float()}, weights, {"format": "pt"})
    places = {"name_or_path": str(folder), "special_tokens_map_file": "/root/.cache/special_tokens_map.json"}
    config.write_text(json.dumps(json.loads(config.read_text()) | places))


def logits(module: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = module(input_ids=IDS).logits.float()
        return found


def run_card(folder: Path, base: Path) -> Any:
    """Run the snippet of an export's card, and return the model."""
    snippet = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(snippet.replace('"."', repr(str(folder))).replace('"PATH/OF/THE/BASE"', repr(str(base))), names)
    assert names["tokenizer"]("Ann")["input_ids"]
    return names["model"].eval()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft's own use of transformers
def test_exports_load_elsewhere_with_the_same_logits(tmp_path: Path, written: dict[Path, Expected]) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    wanted, expected = {}, {}
    for name, (kind, settings, options) in EXPORTS.items():
        (here / kind).mkdir(parents=True, exist_ok=True)
        wanted[name] = logits(trained(here / kind, kind, **settings))
        place = ("--state-dir", str(here / kind / "peer"), "--model", str(here / kind / "base"))
        assert main(["export", *place, "--out", str(here / name), *options]) == 0
        (_, expected[name]) = written.popitem()
        shutil.rmtree(here / kind / "peer")
    here.rename(there)
    for number, (name, (kind, _, options)) in enumerate(EXPORTS.items()):
        out, base = there / name, there / kind / "base"
        fresh = replace(expected[name], base=base if expected[name].base else None)
        job = write_job(tmp_path, number, out, fresh)
        assert load_again.problem(json.loads(job.read_text())) == "", name
        model = run_card(out, base)
        half = bool(options) and kind == "bfloat16"
        tolerance = 0.05 * float(wanted[name].std()) if half else 1e-4
        assert float((logits(model.float()) - wanted[name]).abs().max()) < tolerance, name
        texts = [each.read_text() for each in out.iterdir() if each.suffix in (".json", ".md")]
        assert not any(str(tmp_path) in each or "/root" in each for each in texts), name
        if options:
            assert dtypes(out) == dtypes(base), "the same tensors, as large as the base's"


def dtypes(folder: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (each.dtype, each.shape) for name, each in load_file(folder / "model.safetensors").items()}


@diagonal("kind, train", ["qwen3", "llama", "gpt2"], ["lora", "full"])
def test_layout_of_a_run_is_known_without_weights(kind: str, train: str, tmp_path: Path) -> None:
    module = trained(tmp_path, kind, train)
    manifest = load_trained([tmp_path / "peer"]).manifest
    (tmp_path / "base" / "model.safetensors").unlink()
    sealed = (tmp_path / "peer" / "manifest.bin").read_bytes()
    assert fetchable(sealed, str(tmp_path / "base")).layouts == (layout_of(unfrozen(module)),)
    with pytest.raises(ModelError, match="needs its base on this machine: give base by --model"):
        fetchable(sealed)
    write_model(tmp_path / "base", "llama" if kind == "gpt2" else "gpt2")
    with pytest.raises(ModelError, match="has another configuration than the run's model"):
        fine_tuned_layout(manifest, str(tmp_path / "base"))


def test_text_and_losses_come_from_the_trained_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, "qwen3", "lora")
    place = ("--state-dir", str(tmp_path / "peer"), "--model", str(tmp_path / "base"))
    capsys.readouterr()
    assert main(["evaluate", *place]) == 2
    assert "this run has no held-out sample: give texts to evaluate on by --data" in capsys.readouterr().err
    (tmp_path / "more.txt").write_text(story(20))
    assert main(["evaluate", *place, "--data", str(tmp_path / "more.txt"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] > 2 and abs(found["base_loss"] - found["loss"]) > 1e-3, "without the adapters, and with them"
    assert main(["generate", "Ann", *place, "--tokens", "12", "--temperature", "0"]) == 0
    text = capsys.readouterr().out
    assert main(["generate", "Ann", *place, "--tokens", "12", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == text != "\n"


def test_base_that_is_missing_or_superfluous_is_named(tmp_path: Path) -> None:
    trained(tmp_path, "llama", "full")
    with pytest.raises(ModelError, match="needs its base on this machine: give base by --model"):
        load_fine_tuned(load_trained([tmp_path / "peer"]), None)
    kept_gpt(tmp_path / "gpt")
    with pytest.raises(ModelError, match="this run trains gpt: leave --model and NODE_MODEL out"):
        load_fine_tuned(load_trained([tmp_path / "gpt"]), "base")
