"""Training real models of Hugging Face in small shapes: exact gradients, packing, memory switches, refusals."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tokenizers.processors import TemplateProcessing
from torch import nn

from node.tasks.hf import model as model_module
from node.tasks.hf import source
from node.tasks.hf.adapters import adapted_layers, with_adapters
from node.tasks.hf.model import load_model, packs
from node.tasks.hf.rows import MASKED
from node.tasks.hf.settings import HfMachine, HfSettings, HfValues, ModelError, ModelPins
from node.tasks.hf.source import ModelFolder, find_model, tokenizer_digest, weights_digest
from node.tasks.recipe import Recipe
from node.tasks.spec import WorkerSpec
from node.training.build import Job, build
from node.training.task_learner import TaskLearner
from tests.support.refusals import one_line
from tests.support.small_models import (
    CHAT_WITH_MARKS,
    empty_model,
    saved_model,
    saved_tokenizer,
    write_model,
    write_tokenizer,
)

RECIPE: dict[str, Any] = {"learning_rate": 3e-3, "outer_learning_rate": 0.9, "outer_momentum": 0.5, "warmup_steps": 0}


def job(
    made: Path,
    kind: str,
    batches: int = 1,
    machine: dict[str, Any] | None = None,
    checkpointing: bool = False,
    **settings: Any,
) -> Job:
    """A job of a founder on one of the small models."""
    data = made / ("chat.jsonl" if settings.get("format") == "chat" else "story.txt")
    values = HfValues(HfSettings(context=64, **settings), HfMachine(str(made / kind), **(machine or {})))
    recipe = Recipe(10, 4, batches=batches, mean="token", decay="matrices", **RECIPE)
    spec = WorkerSpec(values, recipe, 3, data=data, device="cpu", checkpointing=checkpointing)
    assert WorkerSpec.from_json(spec.to_json()) == spec
    with torch.random.fork_rng():
        return build(spec, torch.empty, False)


def learner_of(made: Path, kind: str, **more: Any) -> TaskLearner:
    learner = job(made, kind, **more).learner
    assert isinstance(learner, TaskLearner)
    return learner


def gradient(learner: TaskLearner) -> tuple[torch.Tensor, int]:
    """The mean gradient over the targets of the first step, and their number."""
    learner._task.module.train()
    learner._optimizer.clear()
    counts = [each.count for each in learner._accumulate()]
    return learner._flat.gradient / sum(counts), sum(counts)


@pytest.mark.parametrize("train", ["lora", "full"])
def test_any_split_gives_the_same_gradient(made: Path, train: str) -> None:
    whole, targets = gradient(learner_of(made, "qwen3", train=train, format="chat", rows=8))
    for batches in (2, 8):
        learner = learner_of(made, "qwen3", train=train, format="chat", rows=8 // batches, batches=batches)
        parts, count = gradient(learner)
        assert count == targets and float((whole - parts).norm() / whole.norm()) < 1e-6
    batch = learner_of(made, "qwen3", train=train, format="chat", rows=8)._task.batch(3, 0)
    assert targets == int((batch[-1] != MASKED).sum()) < batch[-1].numel() / 2


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_models_learn_and_generate(made: Path, kind: str) -> None:
    for train in ("lora", "full"):
        found = job(made, kind, train=train, lora_rank=4)
        module = found.learner._task.module  # type: ignore[attr-defined]
        trained = sum(each.numel() for each in module.parameters() if each.requires_grad)
        everything = sum(each.numel() for each in module.parameters())
        assert found.learner.layout.sizes() == (trained,) and (trained == everything) == (train == "full")
        before = found.learner.evaluate()
        for step in range(12):
            assert found.learner.step(0, step).tokens > 200
        assert found.learner.evaluate() < before - 0.05 and found.held_out.startswith(b'{"text"')
        assert found.generate and found.generate(b"Ann has", 8, 0.0, 0)
        held = [json.loads(line)["text"] for line in found.held_out.splitlines()]
        assert held[0].startswith(found.generate(b"", 1, 0.0, 0).decode()[:12]), (
            "of its own, it continues held-out text"
        )


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_packed_rows_equal_single_rows(made: Path, kind: str) -> None:
    learner = learner_of(made, kind, train="full", rows=4, format="chat")
    module = learner._task.module.eval()
    tokens, positions, _ = learner._task.batch(3, 0)
    with torch.no_grad():
        together = module(input_ids=tokens, position_ids=positions, use_cache=False).logits
        worst, seen = 0.0, 0
        for row in range(len(tokens)):
            starts = [*(positions[row] == 0).nonzero().flatten().tolist(), tokens.shape[1]]
            for low, high in pairwise(starts):
                alone = module(input_ids=tokens[row : row + 1, low:high], use_cache=False).logits[0]
                worst, seen = max(worst, float((alone - together[row, low:high]).abs().max())), seen + 1
    assert seen > len(tokens) and worst < 1e-5


def test_model_that_mixes_packed_texts_is_noticed(made: Path) -> None:
    module: Any = learner_of(made, "llama", train="full")._task.module
    assert packs(module)
    forward = module.forward
    module.forward = lambda input_ids, position_ids, use_cache: forward(
        input_ids=input_ids, position_ids=torch.arange(input_ids.shape[1])[None], use_cache=False
    )
    assert not packs(module)


@pytest.mark.parametrize("train", ["lora", "full"])
def test_checkpointing_changes_no_bit(made: Path, train: str) -> None:
    plain = gradient(learner_of(made, "qwen3", train=train))[0]
    learner = learner_of(made, "qwen3", train=train, checkpointing=True)
    calls: list[int] = []
    for each in learner._task.module.modules():
        if type(each).__name__ == "Qwen3MLP":
            each.register_forward_pre_hook(lambda *_: calls.append(1))
    assert torch.equal(plain, gradient(learner)[0]) and len(calls) == 4, "two layers, each computed twice"


@pytest.mark.parametrize(
    "precision, train, frozen",
    [("bfloat16", "full", set()), ("float16", "full", set()), ("float16", "lora", {torch.float16})],
)
def test_reduced_model_trains_float32_parameters(made: Path, precision: str, train: Any, frozen: object) -> None:
    values = HfValues(HfSettings(context=64, train=train), HfMachine(str(made / "qwen3")))
    recipe = Recipe(10, 4, mean="token", decay="matrices", **RECIPE)
    spec = WorkerSpec(values, recipe, 3, data=made / "story.txt", device="cpu", precision=precision)
    with torch.random.fork_rng():
        learner: Any = build(spec, torch.empty, False).learner
    assert {each.dtype for each in learner._task.module.parameters() if not each.requires_grad} == frozen
    before = learner.evaluate()
    for step in range(12):
        learner.step(0, step)
    assert learner.vector.dtype == torch.float32 and learner.evaluate() < before - 0.05


# -- the same model ----------------------------------------------------------------------------------------------------


def pinned(folder: Path, **settings: Any) -> ModelPins:
    chosen = HfSettings(context=64, **{"format": "chat", **settings})
    return load_model(str(folder), chosen, None, "cpu", torch.float32).pins


def spoil_weights(folder: Path) -> None:
    write_model(folder, "qwen3", seed=1)


def spoil_config(folder: Path) -> None:
    change_json(folder / "config.json", rms_norm_eps=1e-5)


def spoil_tokenizer(folder: Path) -> None:
    write_tokenizer(folder, vocabulary=380)


def spoil_template(folder: Path) -> None:
    write_tokenizer(folder, template=CHAT_WITH_MARKS)


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "spoil, words",
    [
        (spoil_weights, "has other weights than the run's model (weights "),
        (spoil_config, "has another configuration than"),
        (spoil_tokenizer, "has another tokenizer, or its library reads it in another way than"),
        (spoil_template, "has another chat template than"),
    ],
)
def test_another_model_is_refused(made: Path, tmp_path: Path, spoil: Callable[[Path], None], words: str) -> None:
    pins = pinned(made / "qwen3")
    other = Path(shutil.copytree(made / "qwen3", tmp_path / "other"))
    spoil(other)
    with pytest.raises(ModelError) as caught, torch.random.fork_rng():
        load_model(str(other), HfSettings(context=64, format="chat"), pins, "cpu", torch.float32)
    line = str(caught.value)
    assert words in line and line.endswith("that the founder calls qwen3 by --model") and "\n" not in line


def test_model_names_neither_its_place_nor_its_kernels(made: Path, tmp_path: Path) -> None:
    pins = pinned(made / "qwen3")
    other = Path(shutil.copytree(made / "qwen3", tmp_path / "other"))
    place = {"_name_or_path": "elsewhere", "transformers_version": "9", "use_cache": False}
    kernels = {"attn_implementation": "org/kernel", "_experts_implementation": "org/kernel"}
    change_json(other / "config.json", **place, **kernels)
    loaded = load_model(str(other), HfSettings(context=64, format="chat"), pins, "cpu", torch.float32)
    assert loaded.pins == replace(pins, base="other") and loaded.module.config._attn_implementation == "sdpa"


def test_joiner_takes_the_runs_commit(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pins, asked = replace(pinned(made / "qwen3"), base=f"org/tiny@{'0' * 40}"), []

    def find(model: str, weights: bool) -> ModelFolder:
        asked.append(model)
        return find_model(str(made / "qwen3"), weights)

    monkeypatch.setattr(model_module, "find_model", find)
    for named in ("org/tiny", "org/tiny@main", "org/other"):
        load_model(named, HfSettings(context=64, format="chat"), pins, "cpu", torch.float32)
    assert asked == [pins.base, "org/tiny@main", "org/other"]


def test_joiner_of_a_full_run_needs_no_weights(made: Path, tmp_path: Path) -> None:
    pins = pinned(made / "qwen3", train="full")
    other = Path(shutil.copytree(made / "qwen3", tmp_path / "other"))
    (other / "model.safetensors").unlink()
    settings = HfSettings(context=64, format="chat", train="full")
    module: nn.Module = load_model(str(other), settings, pins, "cpu", torch.float32).module
    assert sum(each.numel() for each in module.parameters()) > 30_000


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda folder: (folder / "config.json").unlink(), "cannot be read (No such file"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
        (lambda folder: change_json(folder / "config.json", auto_map={"AutoModel": "evil.py"}), "(auto_map), which is"),
        (lambda folder: change_json(folder / "tokenizer_config.json", auto_map={"A": "evil.py"}), "(auto_map)"),
        (lambda folder: change_json(folder / "config.json", model_type="clip"), "of type 'clip': known are"),
        (lambda folder: change_json(folder / "config.json", quantization_config={"bits": 4}), "is quantised"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "contains no safetensors (only pickles, which are never read)",
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x80\x04K\x01."), "is damaged"),
        (lambda folder: write_header(folder, 10**30), "is damaged"),
        (lambda folder: write_header(folder, -1), "is damaged"),
        (lambda folder: spoil_index(folder, []), "is damaged"),
        (lambda folder: spoil_index(folder, {"a": "../../secret.safetensors"}), "not safetensors beside it"),
        (lambda folder: append(folder / "model.safetensors", b"x"), "cannot be loaded: SafetensorError"),
        (lambda folder: drop(folder / "model.safetensors", "model.norm.weight"), "lacks 1 tensors, such as model.norm"),
        (lambda folder: poison(folder, math.nan), "the tensor model.layers.1.mlp.up_proj.weight holds"),
        (lambda folder: poison(folder, -math.inf, torch.bfloat16), "the tensor model.layers.1.mlp.up_proj.weight"),
        (
            lambda folder: poison(folder, math.inf, torch.float16, "50KB"),
            "the tensor model.layers.1.mlp.up_proj.weight",
        ),
        (
            lambda folder: change_json(folder / "config.json", rms_norm_eps=math.nan),
            "the model computes NaN or infinity",
        ),
        (lambda folder: change_json(folder / "config.json", hidden_size="x"), "cannot be loaded: StrictDataclass"),
        (lambda folder: change_json(folder / "config.json", num_attention_heads=0), "cannot be loaded: ZeroDivision"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "its tokenizer cannot be loaded"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "has an adapter beside the model"),
        (
            lambda folder: change_json(folder / "config.json", transformers_weights="a.safetensors"),
            "other files of weig",
        ),
        (lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"), "is an adapter: give"),
        (lambda folder: shutil.rmtree(folder), "there is no folder"),
    ],
)
def test_unusable_model_is_refused_in_one_line(
    made: Path, tmp_path: Path, spoil: Callable[[Path], object], words: str
) -> None:
    folder = Path(shutil.copytree(made / "qwen3", tmp_path / "model"))
    spoil(folder)
    assert words in one_line(ModelError, load_model, str(folder), HfSettings(context=64), None, "cpu", torch.float32)


def write_header(folder: Path, first: int) -> None:
    fields = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [first, first + 4]}}
    header = json.dumps(fields).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def spoil_index(folder: Path, content: object) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": content}))


def drop(path: Path, name: str) -> None:
    tensors = safetensors.torch.load_file(path)
    del tensors[name]
    safetensors.torch.save_file(tensors, path, {"format": "pt"})


def poison(folder: Path, value: float, dtype: torch.dtype = torch.float32, shard: str = "1GB") -> None:
    """Write the model with one value of its last layer changed."""
    module = saved_model(folder, dtype=dtype)
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight[3, 5] = value
    (folder / "model.safetensors").unlink()
    module.save_pretrained(folder, max_shard_size=shard)


def append(path: Path, content: bytes) -> None:
    path.write_bytes(path.read_bytes() + content)


def test_needed_memory_is_told_before_weights_take_any(made: Path, tmp_path: Path, capfd: Any) -> None:
    folder = Path(shutil.copytree(made / "qwen3", tmp_path / "qwen3"))
    shutil.copy(made / "story.txt", tmp_path)
    drop(folder / "model.safetensors", "model.norm.weight")
    with pytest.raises(ModelError, match="lacks 1 tensors"):
        job(tmp_path, "qwen3")
    assert "training needs about" in capfd.readouterr().err


def test_experts_are_trained_or_named_as_frozen(made: Path, capfd: Any) -> None:
    job(made, "olmoe")
    said = "the experts have no adapters and stay as they are: experts.down_proj and experts.gate_up_proj, 0.05 of the"
    assert said in capfd.readouterr().err
    learner = learner_of(made, "olmoe", lora_targets=("experts.down_proj", "experts.gate_up_proj"))
    assert "the experts have no adapters" not in capfd.readouterr().err
    before = learner.evaluate()
    for step in range(6):
        learner.step(0, step)
    assert learner.evaluate() < before - 0.01
    assert all(bool(each.ne(0).any()) for name, each in learner._task.module.named_parameters() if "lora_B" in name)


def test_adapters_that_peft_would_put_elsewhere_are_refused(made: Path) -> None:
    from transformers import Qwen3MoeConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    config = Qwen3MoeConfig(**sizes, num_attention_heads=4, num_experts=4, vocab_size=64, mlp_only_layers=[0])
    module = empty_model(config)
    targets = adapted_layers(module, ("all-linear",))
    with pytest.raises(ModelError, match=r'set hf.lora_targets = \["k_proj", "o_proj", "q_proj", "v_proj"\]$'):
        with_adapters(module, HfSettings(), targets)


def test_tokenizer_that_begins_texts_is_another(made: Path) -> None:
    tokenizer = saved_tokenizer(made / "qwen3")
    plain = tokenizer_digest(made / "qwen3", tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", 4)]
    )
    begun = tokenizer_digest(made / "qwen3", tokenizer)
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.add_tokens(["<tool>"])
    assert len({plain, begun, tokenizer_digest(made / "qwen3", tokenizer)}) == 3


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"context": 256}, "hf.context is 256, and the model reads at most 128 tokens"),
        ({"lora_targets": ("q_proj", "qq")}, "hf.lora_targets: the model has no linear layer qq: it has down_proj"),
        (
            {"lora_targets": ("lm_head",)},
            "hf.lora_targets: lm_head shares its weights with the embedding",
        ),
    ],
)
def test_unfitting_settings_are_refused(made: Path, settings: dict[str, Any], words: str) -> None:
    given = HfSettings(**{"context": 64, **settings})
    assert words in one_line(ModelError, load_model, str(made / "qwen3"), given, None, "cpu", torch.float32)


def test_weights_digest_ignores_sharding(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = weights_digest(made / "llama")
    saved_model(made / "llama").save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 and weights_digest(tmp_path) == whole
    (tmp_path / "model.safetensors").symlink_to(made / "qwen3" / "model.safetensors")
    assert weights_digest(tmp_path) == weights_digest(made / "qwen3"), "where both are, transformers reads this one"
    monkeypatch.setattr(source, "_entries", lambda path: pytest.fail("the digest is cached"))
    assert weights_digest(made / "llama") == whole


def test_digest_follows_weights_of_the_same_size_and_time(made: Path, tmp_path: Path) -> None:
    file = Path(shutil.copytree(made / "qwen3", tmp_path / "other")) / "model.safetensors"
    before, kept = weights_digest(file.parent), file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    assert weights_digest(file.parent) != before
