"""Scripts with a loop of their own, which `benchmarks.own_loop` measures; and the same model as a task.

python -m benchmarks.own_loop_script bare MODEL           # `turns` without a swarm
python -m benchmarks.own_loop_script swarm MODEL STEPS    # the same in a swarm of two, in rounds of STEPS
python -m benchmarks.own_loop_script partner MODEL STEPS ADDRESS    # the other peer, which only waits
python -m benchmarks.own_loop_script train WAY SEED STREAM ROUNDS STEPS [ADDRESS]     # of two peers
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from node.library import Swarm
from node.tasks.base import Batch, Task, TaskContext
from node.tasks.gpt import GptTask
from node.tasks.gpt_presets import preset
from node.tasks.text import load

RECIPE: dict[str, Any] = {  # a constant rate; the decay of all parameters, as in a plain AdamW
    "learning_rate": 6e-3,
    "warmup_steps": 0,
    "final_fraction": 1.0,
    "outer_learning_rate": 0.9,
    "outer_momentum": 0.5,
    "decay": "all",
    "clip_norm": 1.0,
    "weight_decay": 0.1,
    "inner_optimizer": "adamw",
}
_BUSY_PARTNER_SECONDS, _IDLE_PARTNER_SECONDS = 4.0, 0.05


class _Mlp:
    """A tiny model, whose steps take a fraction of a millisecond."""

    def __init__(self) -> None:
        self.module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        self._inputs, self._labels = torch.randn(16, 64), torch.randint(10, (16,))

    def batch(self, seed: int, position: int) -> Batch:
        return self._inputs, self._labels

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.module(inputs), labels)

    def evaluate(self) -> float:
        return float(self.loss(self._inputs, self._labels))


def model(name: str) -> Task:
    made: Any = _Mlp() if name == "mlp" else GptTask(preset(name), load())
    task: Task = made
    return task


def task(context: TaskContext) -> GptTask:
    """The factory of `--task`: the language model of the scripts of `train`."""
    return GptTask(preset("w64"), load(), seed=context.seed)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=RECIPE["learning_rate"], betas=(0.9, 0.95), weight_decay=0.1)


@dataclass(slots=True)
class Turn:
    """Some steps of a script, in a swarm a whole round."""

    tokens: int = 0
    seconds: float = 0.0
    busy_seconds: float = 0.0  # of this process
    round_seconds: float = 0.0  # of `seconds`, that of the step in which the round ended
    calls: list[float] = field(default_factory=list)  # seconds of each other `swarm.step`


def turn(task: Task, optimizer: torch.optim.Optimizer, swarm: Swarm | None, steps: int) -> Turn:
    """Train for `steps` steps; with a swarm, until the round ends."""
    measured, taken = Turn(), 0
    began, busy, ended = time.perf_counter(), time.process_time(), False
    while not (ended if swarm else taken == steps):
        inputs, targets = task.batch(1, taken)
        loss = task.loss(inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        measured.tokens += targets.numel()
        taken += 1
        if swarm:
            before = time.perf_counter()
            ended = swarm.step(tokens=targets.numel(), loss=value).ended
            seconds = time.perf_counter() - before
            if ended:
                measured.round_seconds = seconds
            else:
                measured.calls.append(seconds)
    measured.seconds, measured.busy_seconds = time.perf_counter() - began, time.process_time() - busy
    return measured


def turns(name: str, steps: int, in_swarm: bool) -> None:
    """Measure a turn for each line of standard input, and print it."""
    task = model(name)
    optimizer = optimizer_of(task.module)
    swarm = None
    if in_swarm:
        run = {"recipe": {**RECIPE, "learning_rate": 1e-3}}
        swarm = Swarm.start(
            task.module, optimizer, inner_steps=steps, rounds=10_000, settings=run, options=["--wait-for", "2"]
        )
    print("up", flush=True)
    for _ in sys.stdin:
        print(json.dumps(asdict(turn(task, optimizer, swarm, steps))), flush=True)
    if swarm:
        swarm.leave()


def partner(name: str, steps: int, address: str) -> None:
    """Complete each round without training, later than the other, which does not wait for it."""
    task = model(name)
    optimizer = optimizer_of(task.module)
    with Swarm.join(task.module, optimizer, bootstrap=address) as swarm:
        taken = 0
        while True:
            optimizer.step()
            time.sleep(_BUSY_PARTNER_SECONDS / steps if taken < steps else _IDLE_PARTNER_SECONDS)
            result = swarm.step(tokens=1)
            taken = 0 if result.ended else taken + 1
            if result.over:
                break


class _Labelled(nn.Module):
    """A language model that returns its loss, as the Trainer's models do."""

    def __init__(self, task: GptTask) -> None:
        super().__init__()
        self.model, self._loss = task.module, task.loss

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self._loss(input_ids, labels)}


class _Batches(IterableDataset[dict[str, torch.Tensor]]):
    def __init__(self, task: GptTask, stream: int, steps: int) -> None:
        self._task, self._stream, self._steps = task, stream, steps

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for position in range(self._steps):
            inputs, targets = self._task.batch(self._stream, position)
            yield {"input_ids": inputs, "labels": targets}


def _plain(task: GptTask, batches: _Batches, enter: str, arguments: dict[str, Any]) -> None:
    optimizer = optimizer_of(task.module)
    with getattr(Swarm, enter)(task.module, optimizer, **arguments) as swarm:
        for batch in batches:
            loss = task.loss(*batch.values())
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(task.module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if swarm.step(tokens=batch["labels"].numel(), loss=loss.item()).over:
                break


def _accelerate(task: GptTask, batches: _Batches, enter: str, arguments: dict[str, Any]) -> None:
    from accelerate import Accelerator

    from node.library.accelerate import AcceleratedSwarm

    accelerator = Accelerator(cpu=True)
    module, optimizer = accelerator.prepare(task.module, optimizer_of(task.module))
    with getattr(AcceleratedSwarm, enter)(accelerator, module, optimizer, **arguments) as swarm:
        for batch in batches:
            loss = task.loss(*batch.values())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if swarm.step(tokens=batch["labels"].numel(), loss=loss).over:
                break


def _transformers(task: GptTask, batches: _Batches, enter: str, arguments: dict[str, Any]) -> None:
    from transformers import Trainer, TrainingArguments

    from node.library.transformers import SwarmCallback

    callback = SwarmCallback.start(**arguments) if enter == "start" else SwarmCallback(**arguments)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            _Labelled(task),
            TrainingArguments(
                folder,
                per_device_train_batch_size=1,  # the batches of the task
                max_steps=10**6,
                lr_scheduler_type="constant",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=batches,
            data_collator=lambda rows: rows[0],
            optimizers=(optimizer_of(task.module), None),
            callbacks=[callback],
        ).train()


def _lightning(task: GptTask, batches: _Batches, enter: str, arguments: dict[str, Any]) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from node.library.lightning import LightningSwarm

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = task.module

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return task.loss(*batch.values())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model)

    callback = LightningSwarm.start(**arguments) if enter == "start" else LightningSwarm(**arguments)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(max_epochs=1, gradient_clip_val=1.0, accelerator="cpu", callbacks=[callback], **off)
    trainer.fit(Module(), DataLoader(batches, batch_size=None))


WAYS = {"plain": _plain, "transformers": _transformers, "accelerate": _accelerate, "lightning": _lightning}


def train(way: str, seed: int, stream: int, rounds: int, steps: int, address: str = "") -> None:
    """One of two peers that train the model of `task`, to the end of the run."""
    trained = GptTask(preset("w64"), load(), seed=seed)
    arguments: dict[str, Any] = {"evaluate": trained.evaluate}
    if address:
        arguments["bootstrap"] = address
    else:
        arguments |= {"inner_steps": steps, "rounds": rounds, "options": ["--wait-for", "2"]}
        arguments["settings"] = {"seed": seed, "recipe": RECIPE}
    batches = _Batches(trained, stream, 10 * rounds * steps)
    WAYS[way](trained, batches, "join" if address else "start", arguments)


def main(role: str, *given: str) -> None:
    torch.set_num_threads(1)
    if role == "train":
        seed, stream, rounds, steps = map(int, given[1:5])
        train(given[0], seed, stream, rounds, steps, *given[5:])
    elif role == "partner":
        partner(given[0], int(given[1]), given[2])
    else:
        turns(given[0], int(given[1]), in_swarm=role == "swarm")


if __name__ == "__main__":
    main(*sys.argv[1:])
