"""A checkpoint that is asked for at any moment of a round, as before the machine sleeps, is of one whole state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from node.outer.independent_loop import IndependentOuterLoop
from node.outer.replicated_loop import ReplicatedOuterLoop
from node.outer.state import OuterState
from protocols.base import RoundKey
from protocols.sync.snapshot import SnapshotIndex, Snapshots
from tests.sim.host import SimCompute
from tests.support.inline_trainer import ELEMENTS
from tests.support.scripted_peers import Exchange, IndependentPeer, Peer, committed, half, play, skipped

Loop = ReplicatedOuterLoop | IndependentOuterLoop


def replicated() -> tuple[Loop, Callable[[], object]]:
    peer = Peer(committed(), skipped(), committed())
    return peer.outer_loop, lambda: play(peer.rounds())


def independent() -> tuple[Loop, Callable[[], object]]:
    peer = IndependentPeer(Exchange(average=half), Exchange(average=half))
    return peer.outer_loop, lambda: peer.play(2)


@pytest.mark.parametrize("make", (replicated, independent))
def test_state_that_changes_is_not_kept(
    make: Callable[[], tuple[Loop, Callable[[], object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is asked for in the middle of every computation on the vectors."""
    outer_loop, play = make()
    kept: list[int] = []
    asked: set[asyncio.Task[None]] = set()

    class Checkpoints:
        snapshots = Snapshots()

        async def keep(self, state: OuterState, key: RoundKey) -> None:
            index, head = SnapshotIndex.of(state.anchor, state.velocity), outer_loop.chain.head
            assert key == head.key and index == state.index, f"a torn state of round {key.round}"
            assert index.state_root(key.round) == head.state_root
            kept.append(key.round)

    run = SimCompute.run

    async def watched(self: SimCompute, work: Callable[[], Any], cost_bytes: int) -> Any:
        result = await run(self, work, cost_bytes)
        asked.add(asyncio.create_task(outer_loop.keep()))
        await asyncio.sleep(0)
        return result

    monkeypatch.setattr(SimCompute, "run", watched)
    outer_loop._checkpoints = Checkpoints()  # type: ignore[assignment]
    play()
    assert all(each.cancelled() or each.exception() is None for each in asked if each.done())
    assert len(set(kept)) >= 2 and not torch.equal(outer_loop.anchor, torch.ones(ELEMENTS))
