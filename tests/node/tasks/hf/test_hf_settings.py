"""What a run and its manifest say of a model of Hugging Face: bounds, old run ids, consent, memory that is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from node.cli.app import main
from node.config.derived import worker_spec
from node.config.manifest import Manifest, ManifestError
from node.config.peer_sources import load_peer
from node.config.run_config import RunConfig, _parse, load_run
from node.config.toml import ConfigError, canonical
from node.joining.run_selector import require_consent
from node.tasks.hf.memory import PROCESS_BYTES, MemoryNeed, TrainingPlan, advice, memory_need
from node.tasks.hf.model import load_module, loss_of
from node.tasks.hf.settings import HfSettings, HfValues, ModelPins
from node.tasks.hf.source import find_model
from protocols.base import Member
from tests.support.refusals import one_line
from tests.support.small_models import empty_model, shape

PINS = ModelPins("org/tiny@0", "a" * 64, 5, "b" * 64, "c" * 64, "", ("q_proj", "v_proj"), 2.5)


def run(**changes: Any) -> RunConfig:
    return load_run(None, {"task": "hf", **{f"hf.{name}": value for name, value in changes.items()}}, ["butterfly"])


def manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "config": run(), "founder": Member("founder", 1), "elements": (7,), "state_root": bytes(32), "created": 1.0,
        "model": PINS,
    }  # fmt: skip
    return Manifest(**fields | changes)


def test_run_has_settings_of_its_own() -> None:
    config = run(lora_rank=4)
    assert config.hf == HfSettings(lora_rank=4, lora_alpha=8) and config.elements is None
    assert (config.recipe.mean, config.recipe.decay, config.own_task, config.consent_task) == (
        "token",
        "matrices",
        "",
        "hf",
    )
    assert _parse(canonical(config)) == config
    assert run(lora_targets=["q_proj"]).hf == HfSettings(lora_targets=("q_proj",))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"context": 4}, "[hf]: context must be a whole number, 8 to 131072, not 4"),
        ({"rows": 4096}, "rows times context are 4194304, more than 1048576"),
        ({"train": "all"}, "'lora' or 'full'"),
        ({"lora_targets": ["a b"]}, "lora_targets must be 1 to 256 names of layers"),
        ({"lora_targets": []}, "lora_targets must be 1 to 256 names of layers"),
        ({"lora_rank": True}, "lora_rank"),
        ({"lora_ranks": 3}, 'unknown key "lora_ranks" in [hf]: did you mean "lora_rank"?'),
    ],
)
def test_bad_settings_give_one_line(changes: dict[str, Any], words: str) -> None:
    assert words in one_line(ConfigError, run, **changes)


def test_manifest_names_the_model() -> None:
    from node.config.manifest import _decode

    assert _decode(manifest().encode()) == manifest()
    with pytest.raises(ValueError, match="if, and only if"):
        manifest(model=None)
    plain = load_run(None, {}, ["butterfly"])
    with pytest.raises(ValueError, match="if, and only if"):
        manifest(config=plain, elements=(plain.elements,))


@pytest.mark.parametrize(
    "changes",
    [
        {"base": ""}, {"base": "a\nb"}, {"base": "é"}, {"base": "a" * 201}, {"weights": "A" * 64}, {"weights": ""},
        {"config": "b" * 63}, {"template": "x"}, {"size": -1}, {"size": 1 << 50}, {"targets": ("a/b",)},
        {"targets": ("a",) * 257}, {"base_loss": float("nan")},
    ],
)  # fmt: skip
def test_malformed_pins_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        replace(PINS, **changes)


def test_joiner_must_name_task_and_model() -> None:
    run_of = manifest()
    for named in (None, "mine:make"):
        with pytest.raises(ManifestError, match=r"calls org/tiny@0 \(0.00 GB\).*join with --task hf --model"):
            require_consent(run_of, named, "")
    require_consent(run_of, "hf", "")
    require_consent(run_of, None, run_of.run_id)
    plain = load_run(None, {}, ["butterfly"])
    require_consent(manifest(config=plain, elements=(plain.elements,), model=None), None, "")
    with pytest.raises(ConfigError, match=r"--model \(the founder's is org/tiny@0, 0.00 GB\)"):
        worker_spec(run_of.config, load_peer({}, {}, None), 1, pins=PINS)
    mine = load_peer({"model": "m", "held_out": "none", "checkpointing": True}, {}, None)
    spec = worker_spec(run_of.config, mine, 1, pins=PINS)
    values = spec.values
    assert isinstance(values, HfValues) and values.pins == PINS and spec.checkpointing
    assert (values.machine.held_out, values.machine.compile) == ("none", False)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("join", "--lora", "4"), "--lora and --train are for --task hf"),
        (("join", "--model", "qwen", "--data", "x.txt"), "--model is for --task hf: add that"),
        (("join", "--held-out", "none"), "--held-out is for --task hf"),
        (("swarm", "--task", "hf"), "task hf needs a model: name it by the variable NODE_MODEL"),
        (("join", "--task", "hf", "--train", "full", "--lora", "4"), "give one of them"),
        (("join", "--task", "hf", "--train", "some"), "'lora', 'full'"),
        (("data", "check", "x.txt"), "give it by --model"),
        (("data", "check", "absent.txt", "--model", "absent"), "there is no file or folder absent.txt"),
    ],
)
def test_command_that_cannot_work_gives_one_line(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("NODE_STATE_DIR", str(tmp_path / "state"))
    assert main(list(arguments)) == 2
    line = capsys.readouterr().err
    assert words in line and len(line.splitlines()) == 1


def test_needed_memory_is_told() -> None:
    need = MemoryNeed(frozen=1 << 30, trained=1 << 30, activations=4 << 30)
    told = "training needs about 7.2 GB (1.1 for what is trained, 1.1 for the rest of the model, 4.3 for a batch)"
    assert need.line(1 << 34, "") == f"{told}, 17.2 GB are free"
    assert need.line(4 << 30, "try less") == f"{told}, but only 4.3 GB are free: try less"


@dataclass(frozen=True)
class FakePlan(TrainingPlan):
    """A plan whose need is its rows in GB, and 3 GB more, of which one is spared by checkpointing."""

    def need(self) -> MemoryNeed:
        return MemoryNeed(0, 0, (self.settings.rows + 3 - self.checkpointing) * 10**9 - PROCESS_BYTES)

    def changes(self) -> Iterator[tuple[str, TrainingPlan]]:
        yield "--precision bfloat16", replace(self)
        if not self.checkpointing:
            yield "--checkpointing", replace(self, checkpointing=True)
        if (rows := self.settings.rows // 2) > 0:
            yield f"hf.rows = {rows}", self._with(rows=rows)


@pytest.mark.parametrize(
    "rows, available, words",
    [
        (8, 10, "try --checkpointing (10.0 GB) or hf.rows = 4 (7.0 GB)"),
        (8, 7, "try hf.rows = 4 (7.0 GB)"),
        (8, 4, "try --checkpointing, hf.rows = 2, all together (4.0 GB)"),
        (8, 2, "even --checkpointing, hf.rows = 1 need 3.0 GB: take a smaller model, or a machine with more memory"),
    ],
)
def test_memory_advice_names_what_lowers_the_need(rows: int, available: int, words: str) -> None:
    plan = FakePlan(None, HfSettings(rows=rows), False, True)
    assert advice(plan, available * 10**9, True) == words
    assert advice(plan, available * 10**9, False) == words.replace("hf.rows", "a run with hf.rows")
    assert advice(FakePlan(None, HfSettings(rows=1), True, True), 0, True).startswith("no setting lowers that: take a ")


def test_estimated_changes_are_those_of_training() -> None:
    module = empty_model(shape("olmoe")).train()
    plan = TrainingPlan(module, HfSettings(train="full", context=256, rows=64), False, True)
    needs = {words: each.need() for words, each in plan.changes()}
    now = plan.need()
    assert needs.keys() == {
        "--checkpointing", "--precision bfloat16", "hf.train = lora", "hf.rows = 32", "hf.context = 128"
    }  # fmt: skip
    assert all(each.total < now.total for each in needs.values())
    assert needs["hf.train = lora"].trained < now.trained == needs["--checkpointing"].trained
    assert needs["--precision bfloat16"].trained > now.trained, "of each parameter there are two copies"
    assert all(each.dtype == torch.float32 and each.requires_grad for each in module.parameters()), "it is not changed"


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2", "olmoe"])
def test_needed_memory_is_what_autograd_keeps(made: Path, kind: str) -> None:
    settings, kept = HfSettings(context=64, rows=4), {}
    module = load_module(find_model(str(made / kind)), True, "cpu", torch.float32).train()
    weights = {each.untyped_storage().data_ptr() for each in module.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.zeros(4, 64, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.random.fork_rng():
        loss_of(module, (tokens, torch.arange(64).expand(4, 64) % 32, tokens), torch.device("cpu"))
    real = sum(each.untyped_storage().nbytes() for place, each in kept.items() if place not in weights)
    logits = 4 * tokens.numel() * module.config.vocab_size
    told = memory_need(module, settings, False, on_cpu=False)
    assert abs(told.activations - 2 * logits - real) < 1000
    shapes = load_module(find_model(str(made / kind)), False, "meta", torch.float32).train()
    assert memory_need(shapes, settings, False, on_cpu=False) == told
    assert memory_need(shapes, settings, True, on_cpu=False).activations < told.activations
