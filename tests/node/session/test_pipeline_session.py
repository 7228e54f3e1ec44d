"""What a stage says of its own anchor, which evaluations of stage 0 wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.session import pipeline_session
from node.session.pipeline_session import PipelinePeer, PipelineTrainer
from node.training.remote import NOTHING
from protocols.base import LocalProgress, RoundKey
from tests.sim import loop as simloop
from tests.sim.host import sim_host
from tests.sim.network import SimNetwork
from tests.sim.trace import Trace

KEPT, REACHED = 40, 44
"""Training rounds of the checkpoint from which a stage starts again, and those of the others."""


class Remote:
    """A worker that has nothing to do."""

    layout = SimpleNamespace(sizes=lambda: (4,))
    sizes = SimpleNamespace(activation_bytes=4, target_bytes=4, logit_bytes=0)
    on_lost: Callable[[], None]

    async def begin(self, round_number: int, cut: asyncio.Event) -> LocalProgress:
        return await self.work()

    async def work(self) -> LocalProgress:
        return NOTHING

    async def replace(self, source: Any, anchor: Any, tokens: int, on_replaced: Callable[[], None]) -> None:
        on_replaced()


@pytest.mark.parametrize("is_member", [True, False])
def test_skipped_rounds_do_not_hold_up_evaluations(is_member: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that lost its last rounds skips them. It has then all that these rounds have come to: nothing."""
    chain, said = SimpleNamespace(trained=KEPT), []
    monkeypatch.setattr(pipeline_session, "OuterServer", lambda *given: said.append(given[-1]))

    async def story() -> None:
        network = SimNetwork(Trace())
        host = sim_host(network, network.join("p1"), 0, {})
        me = network.nodes["p1"].member
        membership: Any = SimpleNamespace(stage_of=lambda peer: 1, rounds_of=lambda peer: 0)
        recipe = SimpleNamespace(batches=8)
        manifest: Any = SimpleNamespace(
            stages=(None, None),
            run_id=bytes(32).hex(),
            config=SimpleNamespace(recipe=recipe, codec="fp32"),
            elements_of=lambda stage: (4,),
        )
        peer = PipelinePeer(me, 1, host, membership, lambda: chain.trained, lambda: is_member)
        remote: Any = Remote()
        trainer = PipelineTrainer(remote, peer, manifest)
        (trained,) = said
        assert trained() == KEPT
        chain.trained, over = REACHED, asyncio.Event()
        over.set()
        await trainer.train(RoundKey(bytes(32), "run", bytes(32), REACHED), over, lambda work: None)
        assert trained() == (REACHED if is_member else KEPT), "outside the roster, its anchor may be older"
        await trainer.write(torch.zeros(4))
        assert trained() == REACHED

    simloop.run(story())
