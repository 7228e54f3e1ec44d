"""`LightningSwarm` in the real Trainer of Lightning, with a stand-in for the swarm; and two real peers."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.node.library.stand_in import StandIns

pytestmark = [pytest.mark.xdist_group("lightning"), pytest.mark.long, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def swarms(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    return StandIns(monkeypatch)


def module(by_hand: bool = False, fails_at: int = -1, error: type[BaseException] = RuntimeError) -> Any:
    """A module with one optimizer; by hand, with two, of which one steps at each batch and one at each third."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
            self.automatic_optimization = not by_hand

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            if number == fails_at:
                raise error
            loss = sum(layer(batch["input"]).square().mean() for layer in self.layers) * 0 + batch["labels"].numel()
            if by_hand:
                self.manual_backward(loss)
                for each in self.optimizers()[: 1 if number % 3 else 2]:
                    each.step()
            return loss

        def validation_step(self, batch: Any, number: int) -> None: ...

        def configure_optimizers(self) -> Any:
            made = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in self.layers]
            return made if by_hand else torch.optim.AdamW(self.parameters())

    torch.manual_seed(0)
    return Module()


def loader(batches: int = 5) -> Any:
    """Batches with 10, 20, 30, … labels, of which all but the first are to be learnt."""
    found: Any = []
    for number in range(batches):
        labels = torch.ones(10 * (number + 1), dtype=torch.long)
        labels[0] = -100
        found.append({"input": torch.randn(2, 4), "labels": labels})
    return torch.utils.data.DataLoader(found, batch_size=None)


def trainer(folder: Path, swarm: Any, **settings: Any) -> Any:
    from lightning.pytorch import Trainer

    usual = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    settings = usual | {"enable_model_summary": False, "accelerator": "cpu", "default_root_dir": folder} | settings
    return Trainer(callbacks=[swarm], **settings)


def test_tokens_of_all_microbatches_count_and_of_no_validation(tmp_path: Path, swarms: StandIns) -> None:
    from lightning.pytorch.loggers import CSVLogger

    from node.library.lightning import LightningSwarm

    logger = CSVLogger(tmp_path)
    training = trainer(tmp_path, LightningSwarm(), accumulate_grad_batches=2, val_check_interval=1, logger=logger)
    training.fit(module(), loader(), loader(2))
    assert swarms[0].tokens == [28, 68, 49] * 2 and swarms[0].left
    assert swarms[0].losses == pytest.approx([(90 + 380) / 28, (870 + 1560) / 68, 50] * 2)
    assert training.callback_metrics["swarm/round"] == 3
    logged = csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines())
    assert [(each["step"], each["swarm/round"]) for each in logged] == [("2", "1.0"), ("4", "2.0"), ("6", "3.0")]


def test_each_step_by_hand_counts_with_several_optimizers(tmp_path: Path, swarms: StandIns) -> None:
    from node.library.lightning import LightningSwarm

    trainer(tmp_path, LightningSwarm(count=lambda batch: 7), max_epochs=1).fit(module(by_hand=True), loader())
    assert swarms[0].tokens == [7] * 5 and swarms[0].losses == [10, 20, 30, 40, 50]
    assert swarms[0].optimizer is None


def test_end_of_the_run_ends_the_training(tmp_path: Path, swarms: StandIns) -> None:
    from node.library.lightning import LightningSwarm

    swarms.rounds = 1
    training = trainer(tmp_path, LightningSwarm.start(inner_steps=2, rounds=1))
    training.fit(module(), loader())
    assert training.global_step == 2 and swarms[0].left and swarms[0].arguments == {"inner_steps": 2, "rounds": 1}


@pytest.mark.parametrize("error, raised", [(RuntimeError, RuntimeError), (KeyboardInterrupt, SystemExit)])
def test_exception_leaves_and_the_next_training_goes_on(
    tmp_path: Path, swarms: StandIns, error: type[BaseException], raised: type[BaseException]
) -> None:
    import signal

    from node.library.lightning import LightningSwarm

    swarm, handler = LightningSwarm(), signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(raised):
            trainer(tmp_path, swarm).fit(module(fails_at=3, error=error), loader())
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it after a Ctrl-C
    assert swarms[0].left and len(swarms[0].tokens) == 3
    trainer(tmp_path, swarm, max_steps=4).fit(module(), loader())
    assert swarms[1].arguments == {"state_dir": "there"} and len(swarms[1].tokens) == 4 and swarms[1].left


def test_a_resumed_training_has_the_state_of_the_swarm(
    tmp_path: Path, swarms: StandIns, capsys: pytest.CaptureFixture[str]
) -> None:
    from node.library.lightning import LightningSwarm

    def vector(of: Any) -> torch.Tensor:
        return torch.cat([each.detach().flatten() for each in of.parameters()])

    first, second = module(), module()
    training = trainer(tmp_path, LightningSwarm(), max_steps=2, enable_checkpointing=True)
    training.fit(first, loader())
    trainer(tmp_path, LightningSwarm(), max_steps=3).fit(
        second, loader(), ckpt_path=training.checkpoint_callback.best_model_path
    )
    assert len(swarms[1].tokens) == 1
    # the checkpoint has the last mean of the first training; the second adds 1 at its begin, and at its end
    assert torch.allclose(vector(second), vector(first) + 2, atol=0.02)
    assert capsys.readouterr().err.count("resumes at step 2 with the swarm's parameters") == 1


def test_without_a_swarm_nothing_is_counted(tmp_path: Path, swarms: StandIns) -> None:
    from node.library.lightning import LightningSwarm

    swarms.given = False
    training = trainer(tmp_path, LightningSwarm(), max_epochs=1)
    training.fit(module(), loader())
    assert training.global_step == 5 and not swarms[0].tokens and not training.callback_metrics
