"""`AcceleratedSwarm` with the real accelerate, with a stand-in for the swarm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.node.library.stand_in import StandIns

pytestmark = [pytest.mark.xdist_group("hugging-face"), pytest.mark.filterwarnings("ignore")]
TOKENS: Any = [3, 5, 7, 2, 4]


def test_tokens_of_all_microbatches_count_except_of_skipped_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step of an epoch has fewer microbatches; in its second epoch, one has an infinite gradient."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    from node.library.accelerate import AcceleratedSwarm

    swarms = StandIns(monkeypatch)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(nn.Linear(2, 1), torch.utils.data.DataLoader(TOKENS, batch_size=1))
    scaler = torch.amp.GradScaler("cpu")
    plain = torch.optim.AdamW(model.parameters())
    optimizer: Any = AcceleratedOptimizer(plain, device_placement=False, scaler=scaler)
    ended = []
    with AcceleratedSwarm.start(accelerator, model, optimizer, inner_steps=2, rounds=3) as swarm:
        for epoch in range(2):
            for tokens in loader:
                with accelerator.accumulate(model):
                    loss = model(torch.ones(2)).sum() * (float("inf") if epoch and tokens == 7 else 1)
                    accelerator.backward(scaler.scale(loss))
                    optimizer.step()
                    optimizer.zero_grad()
                    ended.append(swarm.step(tokens, loss=float(tokens)).ended)
        assert swarm.metrics() == {"swarm/round": 2.0}
    mine = swarms[0]
    assert mine.optimizer is plain and mine.model is model and mine.arguments == {"inner_steps": 2, "rounds": 3}
    assert mine.tokens == [8, 9, 4, 8, 4]
    assert mine.losses == pytest.approx([(9 + 25) / 8, (49 + 4) / 9, 4, (9 + 25) / 8, 4])
    assert [number for number, each in enumerate(ended) if each] == [3, 6] and mine.left
