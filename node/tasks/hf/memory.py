"""Estimates how much memory training needs by a forward pass with fake tensors. Only training shows the truth."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call

from node.runtime.cgroup import memory_group, memory_limit_bytes
from node.runtime.metrics import available_memory_bytes
from node.runtime.notes import note, warn
from node.tasks.hf.adapters import adapted_layers, with_adapters
from node.tasks.hf.model import loss_of
from node.tasks.hf.settings import HfSettings, HfValues, ModelError, foreign
from node.tasks.saved_tensors import saved_tensors

PROCESS_BYTES = 720_000_000
"""Of the processes before they hold a model: worker 320 MB, peer 200, p2pd 65, libraries 130."""
TRAINED_BYTES = 34
"""Of a trained parameter: parameter and anchor 8, gradient 4, AdamW's moments 8; in the peer momentum, pseudo-gradient
and mean 12, encoded parts 2."""
_EVALUATION_BYTES = 4  # of a trained parameter: its copy during an evaluation
HEAP_BLOCK_BYTES, _HEAP_FACTOR = 32 << 20, 2
"""glibc takes smaller blocks from a heap that never shrinks. Its holes grow to the size of what a step uses; without
the heap, a step takes a third more processor time."""
_SHORT_CONTEXT = 128  # tokens; a shorter row is not advised
_MOST_CHANGES = 8
_WORTHWHILE = 0.98  # a change of settings is advised if it leaves less than this share of the need
_COMPUTE_BYTES = 4  # of a trained parameter that computes in bfloat16: its copy and its gradient


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    frozen: int  # of the parameters that are not trained
    trained: int  # of those that are, with everything that belongs to them
    activations: int  # kept for the backward pass, and the logits; or the copy for an evaluation

    @property
    def total(self) -> int:
        return PROCESS_BYTES + self.frozen + self.trained + self.activations

    def line(self, available: int, advice: str = "") -> str:
        told = (
            f"training needs about {self.total / 1e9:.1f} GB ({self.trained / 1e9:.1f} for what is trained, "
            f"{self.frozen / 1e9:.1f} for the rest of the model, {self.activations / 1e9:.1f} for a batch)"
        )
        if self.total <= available:
            return f"{told}, {available / 1e9:.1f} GB are free"
        return f"{told}, but only {available / 1e9:.1f} GB are free: {advice}"


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """A way to train a model, whose need can be estimated. The module's shapes are enough."""

    module: Any
    settings: HfSettings
    checkpointing: bool
    on_cpu: bool

    def need(self) -> MemoryNeed:
        return memory_need(self.module, self.settings, self.checkpointing, self.on_cpu)

    def changes(self) -> Iterator[tuple[str, TrainingPlan]]:
        """What could be set otherwise, and the plan with it: first this machine's options, then the run's values."""
        settings = self.settings
        if not self.checkpointing:
            yield "--checkpointing", replace(self, checkpointing=True)
        if next(self.module.parameters()).dtype == torch.float32:
            yield "--precision bfloat16", replace(self, module=_in_bfloat16(self.module))
        if settings.train == "full":
            with suppress(ModelError):  # without peft, or of a model that takes no adapters
                plan, shapes = self._with(train="lora"), copy.deepcopy(self.module)
                adapted = with_adapters(shapes, plan.settings, adapted_layers(shapes, settings.lora_targets))
                yield "hf.train = lora", replace(plan, module=adapted.train())
        if settings.rows > 1:
            yield f"hf.rows = {settings.rows // 2}", self._with(rows=settings.rows // 2)
        if settings.context >= 2 * _SHORT_CONTEXT:
            yield f"hf.context = {settings.context // 2}", self._with(context=settings.context // 2)

    def _with(self, **changes: Any) -> TrainingPlan:
        return replace(self, settings=replace(self.settings, **changes))


def _in_bfloat16(module: Any) -> Any:
    """A copy that computes in bfloat16, as `--precision` has it: beside a frozen model, adapters stay in float32."""
    other = copy.deepcopy(module)
    parameters = list(other.parameters())
    for each in [each for each in parameters if not each.requires_grad] or parameters:
        each.data = each.data.to(torch.bfloat16)
    return other


def advice(plan: TrainingPlan, available: int, is_ours: bool) -> str:
    """What to change so that training fits, with what it needs then. `is_ours`: the user sets the run's values, too."""
    size, done = plan.need().total, dict[str, str]()  # what is set -> its last value
    alone = [(words, each.need().total) for words, each in plan.changes()]
    if fitting := [each for each in alone if each[1] <= available and each[1] < _WORTHWHILE * size]:
        return "try " + " or ".join(f"{_listed([words], is_ours)} ({less / 1e9:.1f} GB)" for words, less in fitting)
    for _ in range(_MOST_CHANGES):
        lower = ((words, each, each.need().total) for words, each in plan.changes())
        found = next((each for each in lower if each[2] < _WORTHWHILE * size), None)
        if found is None or size <= available:
            break
        words, plan, size = found
        done[words.partition(" = ")[0]] = words
    if size <= available:
        return f"try {_listed(done.values(), is_ours)}, all together ({size / 1e9:.1f} GB)"
    least = f"even {_listed(done.values(), is_ours)} need {size / 1e9:.1f} GB" if done else "no setting lowers that"
    return f"{least}: take a smaller model, or a machine with more memory"


def _listed(changes: Iterable[str], is_ours: bool) -> str:
    ordered = sorted(changes, key=lambda each: not each.startswith("--"))
    run = next((each for each in ordered if not each.startswith("--")), "")
    return ", ".join(f"a run with {each}" if each == run and not is_ours else each for each in ordered)


def memory_need(module: Any, settings: HfSettings, checkpointing: bool, on_cpu: bool = True) -> MemoryNeed:
    """Estimate what training this model, in train mode, needs. Its shapes are enough."""
    trained = frozen = copied = 0
    for parameter in module.parameters():
        if parameter.requires_grad:
            half = parameter.dtype != torch.float32
            trained += parameter.numel() * (TRAINED_BYTES + (_COMPUTE_BYTES if half else 0))
            copied += parameter.numel() * _EVALUATION_BYTES
        else:
            frozen += parameter.numel() * parameter.element_size()
    return MemoryNeed(frozen, trained, activation_bytes(module, settings, checkpointing, on_cpu, copied))


def activation_bytes(module: Any, settings: HfSettings, checkpointing: bool, on_cpu: bool, copied: int = 0) -> int:
    """Kept for the backward pass, and the logits; or, if that is more, `copied` and the logits for an evaluation."""
    logits = 4 * settings.rows * settings.context * int(module.config.vocab_size)
    saved = saved_bytes(module, settings)
    small, large = _in_blocks(saved.layers)
    if checkpointing and saved.inputs:  # they are kept, and one layer, which is computed again
        inputs_small, inputs_large = _in_blocks(saved.inputs)
        small, large = inputs_small + small // len(saved.inputs), inputs_large + large // len(saved.inputs)
    # In the backward pass, the gradients that the loss and the softmax return.
    rest_small, rest_large = _in_blocks([*saved.rest, logits, logits])
    heap = (_HEAP_FACTOR if on_cpu else 1) * (small + rest_small)
    _, evaluation = _in_blocks([copied, logits, logits])
    return heap + max(large + rest_large, evaluation)


def _in_blocks(sizes: Iterable[int]) -> tuple[int, int]:
    """Bytes in small blocks, which are in the heap, and in large ones, which are not."""
    sizes = list(sizes)
    small = sum(each for each in sizes if each < HEAP_BLOCK_BYTES)
    return small, sum(sizes) - small


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """Sizes of the tensors that autograd keeps of one forward pass."""

    layers: list[int] = field(default_factory=list)
    rest: list[int] = field(default_factory=list)  # embeddings, the last norm, logits
    inputs: list[int] = field(default_factory=list)  # one of each layer, which is what checkpointing keeps


def saved_bytes(module: Any, settings: HfSettings) -> SavedBytes:
    """Count what autograd keeps of the forward pass of a batch, besides the parameters: a pass with fake tensors."""
    with FakeTensorMode(), _experts_of_any_dtype():
        fakes = {
            name: torch.empty(each.shape, dtype=each.dtype, device="cpu", requires_grad=each.requires_grad)
            for name, each in (*module.named_parameters(), *module.named_buffers())
        }
        return _saved_bytes(module, fakes, settings)


@contextmanager
def _experts_of_any_dtype() -> Iterator[None]:
    """Have transformers multiply fused experts by its own operation: torch's has no shapes in float32."""
    try:
        from transformers.integrations import moe

        usual = moe._can_use_grouped_mm
    except (ImportError, AttributeError):  # an older version
        yield
        return
    moe._can_use_grouped_mm = lambda *_: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = usual


def _saved_bytes(module: Any, fakes: dict[str, torch.Tensor], settings: HfSettings) -> SavedBytes:
    from transformers.modeling_layers import GradientCheckpointingLayer

    found, inside = SavedBytes(), [False]

    def keep(size: int) -> None:
        (found.layers if inside[0] else found.rest).append(size)

    def enter(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        inside[0], hidden = True, (*arguments, *named.values())[0]
        found.inputs.append(hidden.untyped_storage().nbytes())

    def leave(*_: Any) -> None:
        inside[0] = False

    layers = [each for each in module.modules() if isinstance(each, GradientCheckpointingLayer)]
    hooks = [each.register_forward_pre_hook(enter, with_kwargs=True) for each in layers]
    hooks += [each.register_forward_hook(leave) for each in layers]
    shape = (settings.rows, settings.context)
    tokens = torch.zeros(shape, dtype=torch.long)
    positions = torch.arange(settings.context).expand(shape) % max(1, settings.context // 2)  # two texts in each row
    try:
        with saved_tensors(fakes.values(), keep):
            call = lambda **inputs: functional_call(module, fakes, (), inputs)  # noqa: E731
            loss_of(call, (tokens, positions, tokens), torch.device("cpu"))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def tell_memory(values: HfValues, device: str, checkpointing: bool, module: Any) -> None:
    plan = TrainingPlan(module.train(), values.settings, checkpointing, device == "cpu")
    try:
        with foreign("it is not known how much memory training needs"):
            need, available = plan.need(), available_bytes(torch.device(device))
            enough = need.total <= available
            line = need.line(available, "" if enough else advice(plan, available, values.pins is None))
        (note if enough else warn)(line)
    except ModelError as error:
        note(str(error))


def available_bytes(device: torch.device) -> int:
    """Memory of the device that training may take: what is free, and what this process has already."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) + int(torch.cuda.memory_reserved(device))
    limit = memory_limit_bytes(memory_group())
    return min(available_memory_bytes(), limit) if limit else available_memory_bytes()
