"""`SwarmCallback` in the real Trainer, with a stand-in for the swarm; and two real peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.node.library.stand_in import StandIns
from tests.support.small_models import WORDS, shape

pytestmark = [pytest.mark.xdist_group("hugging-face"), pytest.mark.filterwarnings("ignore")]
STEPS = 5


@pytest.fixture
def swarms(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    return StandIns(monkeypatch)


def rows(count: int = 24) -> list[dict[str, torch.Tensor]]:
    """Rows of which different numbers of labels are to be learnt."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        ids = torch.randint(0, WORDS, (10,), generator=generator)
        labels = torch.where(torch.arange(10) < number % 5, -100, ids)
        found.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones(10, dtype=torch.long)})
    return found


def trainer(folder: Path, callbacks: list[Any], data: Any = None, **settings: Any) -> Any:
    import transformers

    class Noting(transformers.Trainer):
        """It keeps by how many targets it divides the loss of each step."""

        divisors: list[int]

        def get_batch_samples(self, *arguments: Any) -> Any:
            samples, count = super().get_batch_samples(*arguments)
            self.divisors.append(int(count))
            return samples, count

    usual = {"max_steps": STEPS, "logging_steps": 1, "per_device_train_batch_size": 2, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, **(usual | settings)
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(shape("qwen3"))
    data = rows() if data is None else data
    made = Noting(model=model, args=arguments, train_dataset=data, eval_dataset=rows(4), callbacks=callbacks)
    made.divisors = []
    return made


def vector(model: Any) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


EVALUATING = {"eval_strategy": "steps", "eval_steps": 1}


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 5},  # the last step of an epoch has fewer microbatches
        {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, **EVALUATING},
        {"bf16": True, "torch_compile": True, "torch_compile_backend": "eager"},
    ],
)
def test_tokens_and_loss_are_those_of_the_trainer(tmp_path: Path, swarms: StandIns, settings: dict[str, Any]) -> None:
    from node.library.transformers import SwarmCallback

    training = trainer(tmp_path, [SwarmCallback()], **settings)
    training.train()
    logs = [each for each in training.state.log_history if "loss" in each]
    assert swarms[0].tokens == training.divisors and len(swarms[0].tokens) == STEPS
    assert swarms[0].losses == pytest.approx([each["loss"] for each in logs], rel=1e-2)
    assert [each["swarm/round"] for each in logs] == [0, 1, 1, 2, 2]
    assert swarms[0].left and not training.model._forward_hooks


def test_inputs_without_labels_are_counted_and_said(
    tmp_path: Path, swarms: StandIns, capsys: pytest.CaptureFixture[str]
) -> None:
    from node.library.transformers import SwarmCallback

    trainer(tmp_path, [SwarmCallback()], label_smoothing_factor=0.1).train()
    assert swarms[0].tokens == [20] * STEPS
    assert capsys.readouterr().err.count("gets no labels") == 1


def test_end_of_the_run_ends_the_training(tmp_path: Path, swarms: StandIns) -> None:
    from node.library.transformers import SwarmCallback

    swarms.rounds = 1
    training = trainer(tmp_path, [SwarmCallback.start(inner_steps=2, rounds=1)])
    training.train()
    assert training.state.global_step == 2 and swarms[0].left
    assert swarms[0].arguments == {"inner_steps": 2, "rounds": 1}


def test_a_resumed_training_has_the_state_of_the_swarm(
    tmp_path: Path, swarms: StandIns, capsys: pytest.CaptureFixture[str]
) -> None:
    from node.library.transformers import SwarmCallback

    first = trainer(tmp_path, [], save_strategy="steps", save_steps=2, max_steps=2)
    first.callback_handler.callbacks.insert(0, SwarmCallback())  # before the reporters, which then get its metrics
    first.train()
    second = trainer(tmp_path, [SwarmCallback()], max_steps=3, learning_rate=0.0)
    second.train(resume_from_checkpoint=True)
    assert swarms[1].tokens == second.divisors and len(second.divisors) == 1
    # the checkpoint of the last step has the last mean; the second training adds 1 at its begin, and at its end
    assert torch.allclose(vector(second.model), vector(first.model) + 2, atol=1e-3)
    assert capsys.readouterr().err.count("resumes at step 2 with the swarm's parameters") == 1


@pytest.mark.parametrize("patience", [0, 1])
def test_best_model_is_not_part_of_the_swarm(tmp_path: Path, swarms: StandIns, patience: int) -> None:
    """It is loaded after this peer has left, whatever ends the training: neither changes the other."""
    import transformers
    from safetensors.torch import load_file

    from node.library.transformers import SwarmCallback

    stopping = [transformers.EarlyStoppingCallback(patience)] if patience else []
    training = trainer(
        tmp_path, [SwarmCallback(), *stopping], load_best_model_at_end=True, save_strategy="steps", save_steps=1,
        learning_rate=1.0, **EVALUATING,
    )  # fmt: skip
    training.train()
    best = load_file(Path(training.state.best_model_checkpoint) / "model.safetensors")
    present = training.model.state_dict()
    assert all(torch.equal(present[name], value) for name, value in best.items())
    assert swarms[0].left and (training.state.global_step < STEPS) == bool(patience)


class Failing(list[Any]):
    """Rows of which the eighth raises the first time."""

    failed = False

    def __getitem__(self, place: Any) -> Any:
        if place == 7 and not self.failed:
            self.failed = True
            raise KeyboardInterrupt
        return super().__getitem__(place)


def test_training_again_after_an_exception_goes_on_in_the_run(tmp_path: Path, swarms: StandIns) -> None:
    from node.library.transformers import SwarmCallback

    with SwarmCallback(bootstrap="there") as callback:
        training = trainer(tmp_path, [callback], Failing(rows()), max_steps=-1, num_train_epochs=1)
        with pytest.raises(KeyboardInterrupt):
            training.train()
        assert not swarms[0].left
        training.divisors.clear()
        training.train()
    assert swarms[0].left and swarms[1].left
    assert swarms[1].arguments == {"bootstrap": "there", "state_dir": "there"}
    assert swarms[1].tokens == training.divisors and len(training.divisors) == 12


def test_without_a_swarm_the_training_is_the_usual_one(tmp_path: Path, swarms: StandIns) -> None:
    from node.library.transformers import SwarmCallback

    swarms.given = False
    plain, mine = trainer(tmp_path, []), trainer(tmp_path, [SwarmCallback()])
    plain.train()
    mine.train()
    assert torch.equal(vector(plain.model), vector(mine.model))
    assert [[*each] for each in plain.state.log_history] == [[*each] for each in mine.state.log_history]


def test_misspelt_option_is_refused_at_once() -> None:
    from node.library.transformers import SwarmCallback

    with pytest.raises(TypeError, match="bootsrap"):
        SwarmCallback(bootsrap="there")
    with pytest.raises(TypeError, match="rounds"):
        SwarmCallback.start(inner_steps=3)
