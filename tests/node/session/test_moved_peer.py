"""A peer that has moved to a stage which its machine cannot train."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from node.session.peer import Peer
from node.storage.statedir import StateDir, read_stage
from node.training.process import WorkerError


async def test_peer_goes_back_to_a_stage_that_it_can_train(tmp_path: Path) -> None:
    state, tried, said = StateDir.open(tmp_path), list[int](), list[str]()
    for stage in (1, 0):
        state.enter_stage(stage, b'{"stage": %d}' % stage)
    state.switch_stage(1)

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
        assert await Peer._arrive(peer, SimpleNamespace(), 0, stack) == "entered"  # type: ignore[arg-type, comparison-overlap]
    assert tried == [1, 0] and said == ["not moved to stage 1: too little memory"] and not processes.has_moved
    assert StateDir.open(tmp_path).incarnation == 3, "each try is an incarnation of its own"
