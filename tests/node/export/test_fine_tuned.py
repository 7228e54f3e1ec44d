"""Models of Hugging Face, fine-tuned: what export writes loads in transformers and peft; text and losses from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from node.cli.app import main
from node.config.run_config import load_run
from node.export.fetching import fetchable
from node.export.fine_tuned import fine_tuned_layout, load_fine_tuned
from node.export.trained_model import TrainedError, load_trained
from node.tasks.flat import layout_of, unfrozen
from node.tasks.hf.model import load_model
from tests.support.small_models import story, write_model
from tests.support.statedir_fixtures import keep, kept_gpt

IDS = torch.tensor([[9, 11, 40, 7, 300, 12, 77, 5]])


def trained(home: Path, kind: str, train: str) -> Any:
    """Write a state directory with a trained model, and return the model."""
    write_model(home / "base", kind)
    config = load_run(None, {"task": "hf", "hf.train": train, "hf.context": 64}, ["butterfly"])
    assert config.hf
    loaded = load_model(str(home / "base"), config.hf, None, "cpu", torch.float32)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in loaded.module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    keep(home / "peer", config, loaded.module, model=loaded.pins)
    return loaded.module.eval()


def logits(module: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = module(input_ids=IDS).logits
        return found


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft's own use of transformers
@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_export_loads_with_the_same_logits(kind: str, train: str, tmp_path: Path) -> None:
    module = trained(tmp_path, kind, train)
    place = ("--state-dir", str(tmp_path / "peer"), "--model", str(tmp_path / "base"))
    assert main(["export", *place, "--out", str(tmp_path / "whole"), "--merge"]) == 0
    whole, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert float((logits(whole) - logits(module)).abs().max()) < (1e-6 if train == "full" else 1e-4)
    if train == "lora":
        import peft

        assert main(["export", *place, "--out", str(tmp_path / "adapter")]) == 0
        adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
        assert torch.equal(logits(adapted), logits(module))
    assert "| base | base, weights `" in (tmp_path / "whole" / "README.md").read_text()


@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_layout_of_a_run_is_known_without_weights(kind: str, train: str, tmp_path: Path) -> None:
    module = trained(tmp_path, kind, train)
    manifest = load_trained([tmp_path / "peer"]).manifest
    (tmp_path / "base" / "model.safetensors").unlink()
    sealed = (tmp_path / "peer" / "manifest.bin").read_bytes()
    assert fetchable(sealed, str(tmp_path / "base")).layouts == (layout_of(unfrozen(module)),)
    with pytest.raises(TrainedError, match="needs its base on this machine: give base by --model"):
        fetchable(sealed)
    write_model(tmp_path / "base", "llama" if kind == "gpt2" else "gpt2")
    with pytest.raises(TrainedError, match="has another configuration than the run's model"):
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
    with pytest.raises(TrainedError, match="needs its base on this machine: give base by --model"):
        load_fine_tuned(load_trained([tmp_path / "peer"]), None)
    kept_gpt(tmp_path / "gpt")
    with pytest.raises(TrainedError, match="this run trains gpt: leave --model and NODE_MODEL out"):
        load_fine_tuned(load_trained([tmp_path / "gpt"]), "base")
