"""A peer that has moved to another stage: there it stays if a user has moved it, or goes back if it cannot train it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.session.peer import Peer
from node.session.stage_parts import local_stage
from node.storage.statedir import StateDir, read_stage
from node.training.process import WorkerError


async def test_peer_goes_back_to_a_stage_that_it_can_train(tmp_path: Path) -> None:
    state, tried, said = StateDir.open(tmp_path), list[int](), list[str]()
    for stage in (1, 0):
        state.enter_stage(stage, b'{"stage": %d}' % stage)
    state.switch_stage(1, pinned=True)

    async def enter(run: object, stack: AsyncExitStack) -> str:
        tried.append(read_stage(tmp_path))
        if tried[-1] == 1:
            raise WorkerError("too little memory")
        return "entered"

    async def run(work: Any, cost_bytes: int) -> None:
        work()

    async def begin_again() -> None:
        state.next_incarnation()

    processes = SimpleNamespace(disk=SimpleNamespace(run=run), begin_again=begin_again, has_moved=False)
    peer: Any = SimpleNamespace(_state=state, _join_run=enter, _processes=processes, _say=said.append)
    peer._tracker = SimpleNamespace(moved="")
    async with AsyncExitStack() as stack:
        assert await Peer._arrive(peer, SimpleNamespace(), 0, False, stack) == "entered"  # type: ignore[arg-type, comparison-overlap]
    assert tried == [1, 0] and said == ["not moved to stage 1: too little memory"] and not processes.has_moved
    assert not state.is_pinned, "no user has moved it there"
    assert StateDir.open(tmp_path).incarnation == 3, "each try is an incarnation of its own"


@pytest.mark.parametrize("by_hand", (True, False))
def test_peer_moved_by_hand_stays_after_a_restart(tmp_path: Path, by_hand: bool) -> None:
    state = StateDir.open(tmp_path)
    state.enter_stage(0, b'{"stage": 0}')
    state.prepare_stage(1, b'{"stage": 1}')
    state.switch_stage(1, pinned=by_hand)
    peer: Any = SimpleNamespace(config=SimpleNamespace(stage=None), state=StateDir.open(tmp_path), has_moved=False)
    peer.me = SimpleNamespace(peer="p")
    entrance: Any = SimpleNamespace(line=(), seats=None)
    chain: Any = SimpleNamespace(trained=5)
    stage = local_stage(peer, entrance, chain, lambda: False)
    assert stage.placement.pinned == by_hand and read_stage(tmp_path) == 1
