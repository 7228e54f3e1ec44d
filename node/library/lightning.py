"""A swarm for Lightning: `Trainer(..., callbacks=[LightningSwarm(bootstrap=...)])`. See docs/own-loop.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch

from node.library.adapter import JoinsLater, targets
from node.runtime.program import install

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    try:
        from pytorch_lightning import Callback, LightningModule, Trainer
    except ImportError as error:
        raise ImportError(f"LightningSwarm needs lightning: {install('lightning')}") from error


class LightningSwarm(JoinsLater, Callback):  # type: ignore[misc]
    """Joins a run when the training begins, counts what it trains, and ends it when the run is over.

    `LightningSwarm(bootstrap=...)` takes what `Swarm.join` takes, `LightningSwarm.start(inner_steps=..., rounds=...)`
    what `Swarm.start` takes. Without a swarm it does nothing. A training that resumes from a checkpoint has the
    parameters of the swarm, not those of the checkpoint.

    `count` returns how many tokens, or samples, of a batch are learnt: by default its `labels` other than -100, or its
    samples. All parameters of the module are averaged, of all its optimizers, in manual optimization, too.
    """

    def __init__(self, *, count: Callable[[Any], int | torch.Tensor] = targets, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._targets, self._steps = count, 0

    @classmethod
    def start(cls, *, count: Callable[[Any], int | torch.Tensor] = targets, **arguments: Any) -> Self:
        starting = super().start(**arguments)
        starting._targets = count
        return starting

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        one = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None  # of several, no one's steps are all
        self._steps = trainer.global_step
        self._enter(pl_module, one, self._steps)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.swarm is None or not self.swarm.active:
            return
        self._trained.add(self._targets(batch), self._loss(trainer, pl_module, outputs))
        if trainer.global_step == self._steps:  # gradients are accumulated
            return
        self._steps = trainer.global_step
        result = self._trained.step(self.swarm)
        if result.ended:
            self._show(trainer, pl_module, self.swarm.metrics())
        if result.over:
            trainer.should_stop = True
        elif trainer.global_step == trainer.max_steps:  # the last checkpoint and validation have the last mean
            self.leave()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.leave()

    @staticmethod
    def _loss(trainer: Trainer, module: LightningModule, outputs: Any) -> torch.Tensor | None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, torch.Tensor):
            return None
        return loss * trainer.accumulate_grad_batches if module.automatic_optimization else loss

    @staticmethod
    def _show(trainer: Trainer, module: LightningModule, metrics: dict[str, float]) -> None:
        """To the loggers at once, which else take only every so many steps; and to callbacks and the progress bar."""
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        for name, value in metrics.items():
            module.log(name, value, prog_bar=name in ("swarm/round", "swarm/peers"), logger=False)
