"""A peer's directories of a stage that begins again: the new one is complete, and the old backup goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from node.config.derived import chain_of
from node.config.manifest import unseal
from node.membership.hello import Endorsement, SeatBase, StageSeat
from node.runtime.identity import verify
from node.session.stage_backups import StageBackups
from node.session.stage_entrance import StageEntrance, home_name
from node.storage.checkpoint import INNER
from node.storage.statedir import StateDir
from protocols.base import Member
from protocols.history.round_log import ListArchive
from protocols.pipeline.balance import Placements
from tests.support.simulated import on_virtual_time
from tests.support.statedir_fixtures import keep_checkpoint, staged_run

STAGE = 1


class Disk:
    async def run(self, function: Callable[[], Any], size: int) -> Any:
        return function()


def backups_of(entrance: StageEntrance) -> StageBackups:
    nothing: Any = lambda *_: None  # noqa: E731
    return StageBackups(
        "me",
        entrance.seat.stage,
        sizes=(1, 1, 1),
        limit_bytes=10.0,
        view=lambda: Placements(bytes(32), 0, (1.0,) * 3, []),
        seat=lambda stage: entrance.seats.digest(entrance.seats.known[stage]) if stage == STAGE else None,
        find=entrance.backed_up,
        fetch=nothing,
        drop=entrance.drop,
        is_target=lambda stage: False,
        announce=nothing,
        say=nothing,
    )


async def _look(entrance: StageEntrance) -> StageBackups:
    backups = backups_of(entrance)
    running = asyncio.ensure_future(backups.run())
    await asyncio.sleep(1.0)
    running.cancel()
    return backups


def endorsed(entrance: StageEntrance, me: Member, base: SeatBase, number: int) -> StageSeat:
    seat = entrance.seats.make_again(STAGE, me, base, number)
    return replace(seat, endorsed=(Endorsement(me.peer, entrance.seats.endorse(seat)),))


@on_virtual_time
async def test_backup_goes_once_its_stage_has_begun_again_here(tmp_path: Path) -> None:
    """It stays until the peer is there, so that the move may fail. What the peer had trained there itself stays."""
    state = StateDir.open(tmp_path / "peer")
    run, me = staged_run(state.path), Member(state.identity.peer_id, 1)
    manifest = unseal(run.envelope, verify)
    disk: Any = Disk()
    entrance = StageEntrance(manifest, state, disk, state.identity)
    await entrance.found(me)
    first = entrance.seats.make(STAGE, me)
    entrance.seats.add([first])
    old = state.prepare_stage(home_name(first), b"")
    start = chain_of(manifest, first, ListArchive()).head.key
    keep_checkpoint(old, run.run_id, run.modules[STAGE], 0, start.lineage)

    base = await entrance.base(STAGE, 3)
    assert base is not None and (await _look(entrance)).held == {STAGE: 0}
    seat = endorsed(entrance, me, base, 1)
    await entrance.begin_again(seat)
    assert old.exists(), "the peer is not there yet"

    state.switch_stage(entrance.prepared[STAGE])
    again = StageEntrance(manifest, state, disk, state.identity)
    assert again.kept(None) and again.seat == seat
    await _look(again)
    assert [each.name for each in (state.path / "stages").iterdir() if each.name != "0"] == [home_name(seat)]
    newer = await again.base(STAGE, 4)
    assert newer and newer.parameters_root == base.parameters_root, "and the new one is whole"

    (next((state.home / "checkpoints").iterdir()) / INNER).touch()
    later = endorsed(again, me, newer, 2)
    await again.begin_again(later)
    state.switch_stage(again.prepared[STAGE])
    last = StageEntrance(manifest, state, disk, state.identity)
    assert last.kept(None)
    await _look(last)
    assert len(state.stage_homes(STAGE)) == 2
