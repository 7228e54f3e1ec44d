"""States in a stage's directory: a newer one replaces them, own ones stay, and a lost stage begins again from one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from node.export.fetching import fetchable
from node.joining.state_download import begin_again, clear, kept_state
from node.membership.hello import SeatBase, StageSeat
from node.storage.checkpoint import INNER, OUTER, DataCursor
from protocols.base import Member
from tests.support.statedir_fixtures import keep_checkpoint, staged_run


def home(tmp_path: Path, *names: str) -> Path:
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / OUTER).touch()
    return tmp_path


def test_newer_state_replaces_downloads_but_not_own_checkpoints(tmp_path: Path) -> None:
    directory = home(tmp_path, "000005-aa", "000010-bb", "000015-cc", ".000015-cc", ".000020-dd")
    (directory / "000005-aa" / INNER).touch()
    clear(directory, "000015-cc", also_whole=False)
    assert not (directory / ".000020-dd").exists() and len(list(directory.iterdir())) == 4
    clear(directory, "000015-cc")
    assert sorted(each.name for each in directory.iterdir()) == [".000015-cc", "000005-aa", "000015-cc"]
    clear(directory)
    assert [each.name for each in directory.iterdir()] == ["000005-aa"]


def test_stage_without_a_directory_has_nothing_to_delete(tmp_path: Path) -> None:
    clear(tmp_path / "checkpoints")


def test_backup_becomes_the_state_from_which_its_stage_begins_again(tmp_path: Path) -> None:
    run = staged_run(tmp_path / "founder")
    manifest, member = fetchable(run.envelope).manifest, Member("a", 2)
    backup = keep_checkpoint(tmp_path / "backup", run.run_id, run.modules[1], 5)
    base = SeatBase(12, 10, backup.index.parameters_root, backup.index.velocity_root)
    seat, again = StageSeat(1, member, 1, b"", b"", b"", (base,)), tmp_path / "again"
    begin_again(manifest, seat, backup, again, DataCursor(1, 2, 0))
    found = kept_state(manifest, seat, again)
    assert found and (found[0], found[1].round) == (12, 0), "its training rounds are those of the run"
    assert [*map(float, found[1].parameters()[0])] == [*map(float, backup.parameters()[0])]
    for other in (replace(seat, number=2), replace(seat, base=(replace(base, parameters_root=bytes(32)),))):
        assert kept_state(manifest, other, again) is None, "another chain, or another state"
