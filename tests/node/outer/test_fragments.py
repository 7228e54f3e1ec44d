"""Fragments of the parameters: what a peer that catches up keeps of its work."""

from __future__ import annotations

import asyncio

import torch

from node.outer.fragments import Fragments
from node.outer.state import OuterSGD, OuterState
from protocols.base import LocalProgress, RoundKey, Vector
from tests.sim.host import SimCompute
from tests.support.inline_trainer import ELEMENTS, STEP, TOKENS, InlineTrainer, LinearLearner
from tests.support.scripted_peers import play


async def train(trainer: InlineTrainer, fragment: int, steps: int) -> LocalProgress:
    cut = asyncio.Event()
    asyncio.get_running_loop().call_later(steps - 0.5, cut.set)
    return await trainer.train(RoundKey(b"r" * 32, "run", bytes(32), fragment, fragment), cut, lambda work: None)


def state(vector: Vector) -> OuterState:
    return OuterState(vector, OuterSGD(0.5, 0.5), SimCompute())


def test_fragments_that_a_missed_round_did_not_change_keep_their_work() -> None:
    async def main() -> None:
        trainer = InlineTrainer(LinearLearner(), inner_steps=4, step_seconds=1.0, fragments=2)
        fragments, anchor = Fragments(trainer, ELEMENTS, 2), torch.ones(ELEMENTS)
        fragments.hear(await train(trainer, 0, 4))
        others = anchor.clone()
        others[fragments.part(0)] = 3.0
        changed = await fragments.changed(state(anchor), state(others))
        assert changed == [fragments.part(0)]
        await fragments.restart(changed, others, following=1)
        local = trainer.local_training.learner.vector
        assert torch.equal(local[fragments.part(0)], others[fragments.part(0)])
        assert torch.equal(local[fragments.part(1)], anchor[fragments.part(1)] - 4 * STEP)
        work = await train(trainer, 1, 2)
        fragments.hear(work)
        assert [fragments.work(index, work).tokens for index in range(2)] == [2 * TOKENS, 6 * TOKENS]
        assert work.carried == 4 * TOKENS
        await fragments.restart(await fragments.changed(state(others), state(others)), others, following=0)
        assert fragments.work(1, work).tokens == 6 * TOKENS, "nothing has changed"

    play(main())
