"""What a stage says of its own outer parameters, and when it waits for a backup instead of training on from them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from node.session.pipeline_session import BACKUP_SECONDS, PipelineSession, settled_rounds
from protocols.aio import loop_time
from protocols.history.chain import UNSETTLED
from tests.support.simulated import on_virtual_time


@pytest.mark.parametrize(
    ("root", "lacks_state", "rounds"),
    [(b"r" * 32, False, 7), (UNSETTLED, False, 6), (b"r" * 32, True, 0)],
    ids=["all are in it", "its outer step is under way", "it has yet to fetch the state"],
)
def test_parameters_have_the_result_of_all_rounds_that_are_settled(root: bytes, lacks_state: bool, rounds: int) -> None:
    """Skipped rounds, too: a replica that skipped the last ones must not hold up an evaluation."""
    chain: Any = SimpleNamespace(trained=7, head=SimpleNamespace(state_root=root), lacks_state=lacks_state)
    assert settled_rounds(chain) == rounds


@pytest.mark.parametrize(("held", "here", "waits"), [(26, True, True), (25, True, False), (26, False, False)])
@on_virtual_time
async def test_stage_awaits_a_backup_that_is_much_newer(held: int, here: bool, waits: bool) -> None:
    """A refill loses up to five rounds. It may never come, so the wait ends."""
    contacts = [SimpleNamespace(here=True, backups={0: 90}), SimpleNamespace(here=here, backups={1: held})]
    session: Any = SimpleNamespace(
        stage=1,
        _membership=SimpleNamespace(contacts=lambda: contacts),
        _chain=SimpleNamespace(trained=20),
        _began_at=loop_time(),
    )
    assert PipelineSession.awaits_backup(session) == waits
    await asyncio.sleep(BACKUP_SECONDS)
    assert not PipelineSession.awaits_backup(session)
