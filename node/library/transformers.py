"""A swarm for transformers' Trainer: `Trainer(..., callbacks=[SwarmCallback(bootstrap=...)])`. See docs/own-loop.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from node.library import SwarmError
from node.library.adapter import IGNORED, JoinsLater, targets
from node.runtime.program import install

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
except ImportError as error:
    raise ImportError(f"SwarmCallback needs transformers: {install('hf')}") from error


class SwarmCallback(JoinsLater, TrainerCallback):  # type: ignore[misc]
    """Joins a run when the Trainer begins, counts what it trains, and ends it when the run is over.

    `SwarmCallback(bootstrap=...)` takes what `Swarm.join` takes, `SwarmCallback.start(inner_steps=..., rounds=...)`
    what `Swarm.start` takes. Without a swarm it does nothing. A training that resumes from a checkpoint has the
    parameters of the swarm, not those of the checkpoint.

    The model gets the swarm's last mean before the last evaluation and checkpoint, where the number of steps ends the
    training; else, after them. A best model that is loaded at the end is none of the swarm's business.
    """

    _handle: Any = None
    _shifts = False
    _labelled = True

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, *, model: Any, optimizer: Any, **_: Any
    ) -> None:
        if args.n_gpu > 1:
            raise SwarmError(f"{args.n_gpu} GPUs in one process: start it with torchrun, or set CUDA_VISIBLE_DEVICES=0")
        if self._enter(model, optimizer, state.global_step).active:
            self._shifts = _shifts_labels(model)
            count = torch.compiler.disable(self._count)  # type: ignore[no-untyped-call]
            self._handle = model.register_forward_hook(count, with_kwargs=True)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._handle is None or self.swarm is None:
            return
        control.should_training_stop |= self._trained.step(self.swarm).over
        if control.should_training_stop or state.global_step >= state.max_steps:
            self.leave()

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        if logs is None or self.swarm is None:
            return
        if "train_loss" in logs:  # the training has ended, and a best model may be loaded next
            self.leave()
        metrics = self.swarm.metrics()
        logs.update(metrics)
        if state.log_history:
            state.log_history[-1].update(metrics)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.leave()

    def leave(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        super().leave()

    def _count(self, model: nn.Module, _: Any, inputs: dict[str, Any], outputs: Any) -> None:
        """After each forward pass of the model."""
        if model.training and torch.is_grad_enabled():
            tokens = self._targets(inputs)
            self._trained.add(tokens, _mean_loss(inputs, outputs, tokens) if self._labelled else None)

    def _targets(self, inputs: Mapping[str, Any]) -> int | torch.Tensor:
        if isinstance(labels := inputs.get("shift_labels", inputs.get("labels")), torch.Tensor):
            shifts = self._shifts and inputs.get("shift_labels") is None
            return (labels[..., 1:] if shifts else labels).ne(IGNORED).sum()
        if self._labelled:
            self._labelled = False
            self._say("the model gets no labels: tokens of its input are counted, without padding")
        if isinstance(mask := inputs.get("attention_mask"), torch.Tensor):
            return mask.ne(0).sum()
        ids = inputs.get("input_ids")
        return ids.numel() if isinstance(ids, torch.Tensor) else targets(inputs)


def _shifts_labels(model: Any) -> bool:
    """Whether the first label of a row is none to learn, by the Trainer's own rule."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    shifts = LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss
    return shifts and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def _mean_loss(inputs: Mapping[str, Any], outputs: Any, tokens: int | torch.Tensor) -> Any:
    """Mean loss of a microbatch. The Trainer may have had its sum divided by the targets of the whole step."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0] if isinstance(outputs, tuple) else None
    if loss is None or (of_step := inputs.get("num_items_in_batch")) is None:
        return loss
    return loss.detach() * of_step / (tokens.clamp(min=1) if isinstance(tokens, torch.Tensor) else max(1, tokens))
