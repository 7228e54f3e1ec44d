"""After a restart: from which checkpoint and with which chain the peer goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from node.config.derived import stream_seed
from node.joining import resume
from node.outer.replicated_loop import ReplicatedOuterLoop
from node.storage.certificate_log import CertificateLog
from node.storage.checkpoint import DataCursor, whole
from node.storage.statedir import StateDir, StateError
from node.training.remote import RemoteTrainer, WorkerError
from protocols.base import Member
from protocols.history.chain import Chain
from protocols.sync.snapshot import Snapshot
from tests.support.checkpoints import state
from tests.support.fake_rounds import RUN, decided
from tests.support.restart_examples import ROSTER, begin, checkpoint, checkpoint_manager, flip_bit, lived, train


@pytest.fixture
def chain() -> Chain:
    """A chain of five rounds."""
    made = Chain(RUN, "run", ROSTER)
    train(made)
    return made


def files(directory: Path) -> dict[str, bytes]:
    return {str(each.relative_to(directory)): each.read_bytes() for each in directory.rglob("*") if each.is_file()}


def test_chain_is_cut_to_newest_matching_checkpoint(tmp_path: Path, chain: Chain) -> None:
    before, after, tip = (checkpoint(tmp_path / str(number), chain, number) for number in (2, 4, 5))
    assert resume.cut_back([tip], chain) == (tip,) and chain.head.key.round == 5
    stranger = replace(after, lineage=b"s" * 32, round=7)
    wrong = replace(after, state_root=b"w" * 32)
    assert resume.cut_back([stranger, wrong, before], chain) == (before,)
    assert chain.head.key.round == 2 and chain.head.key.lineage == before.lineage
    assert resume.cut_back([], chain) == () and chain.head.key.round == 0


def test_incarnation_resumes_at_the_last_checkpoint(here: StateDir) -> None:
    first = resume.load_restart_point(here, begin(here), Member("anna", 1))
    assert first.checkpoints == () and first.data == DataCursor(stream_seed(Member("anna", 1)), 1, 0)
    manifest, made = lived(here)
    again = resume.load_restart_point(here, manifest, Member("anna", 2))
    assert again.checkpoints == (made[1], made[0]) and again.chain.head.key.round == 4
    assert again.data == DataCursor(stream_seed(Member("anna", 1)), 1, 42), "the stream of the first incarnation"
    (made[1].path / "outer.safetensors").write_bytes(b"")
    assert resume.load_restart_point(here, manifest, Member("anna", 3)).checkpoints == (made[0],)


def test_independent_checkpoints_need_no_chain(here: StateDir) -> None:
    manifest, made = lived(here)
    here.certificates.unlink()
    again = resume.load_restart_point(here, manifest, Member("anna", 2), alone=True, shares_anchor=False)
    assert [each.path for each in again.checkpoints] == [each.path for each in made[::-1]]
    assert again.description() == "from the checkpoint before round 5"
    assert again.waiting_reason(Member("anna", 2), 1) == "" and again.chain.head.key.round == 0
    for each in made:
        (each.path / "manifest.json").write_bytes(b'{"format": 2}')
    with pytest.raises(StateError, match="none of the checkpoints"):
        resume.load_restart_point(here, manifest, Member("anna", 3), alone=True, shares_anchor=False)


@pytest.mark.parametrize("damage", ["flipped", "empty", "gone"])
def test_damaged_chain_loses_no_checkpoint(here: StateDir, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    manifest, made = lived(here)
    if damage == "flipped":
        flip_bit(here.certificates, 40)
    elif damage == "empty":
        here.certificates.write_bytes(b"")
    else:
        here.certificates.unlink()
    before = files(here.path)
    with pytest.raises(StateError, match=r"the checkpoint before round 5 and 1 older ones; .* --bootstrap, .* --new"):
        resume.load_restart_point(here, manifest, Member("anna", 2), alone=True)
    assert files(here.path) == before
    again = resume.load_restart_point(here, manifest, Member("anna", 2))
    assert again.checkpoints == () and again.chain.head.key.round == 0
    past = here.path / "past" / f"{manifest.run_id[:16]}-unused"
    assert [each.path.name for each in whole(past, print)] == [made[1].path.name, made[0].path.name]
    kept = {name: data for name, data in before.items() if name.startswith(("checkpoints", "certificates"))}
    assert files(past) == kept and caplog.records[-1].message.endswith(f"moved to {past}")
    assert resume.load_restart_point(here, manifest, Member("anna", 3)).checkpoints == ()
    assert not past.with_name(past.name + "-2").exists(), "there is nothing more"


def test_unusable_checkpoints_do_not_lose_the_chain(here: StateDir) -> None:
    manifest, made = lived(here)
    for each in made:
        (each.path / "manifest.json").write_bytes(b'{"format": 2}')
    before = files(here.path)
    with pytest.raises(StateError, match=r"none of the checkpoints in .*/checkpoints can be used; .* --bootstrap"):
        resume.load_restart_point(here, manifest, Member("anna", 2), alone=True)
    assert files(here.path) == before


def test_truncated_chain_resumes_from_older_checkpoint(here: StateDir) -> None:
    manifest, made = lived(here)
    damaged = flip_bit(here.certificates, here.certificates.stat().st_size * 7 // 10)
    again = resume.load_restart_point(here, manifest, Member("anna", 2), alone=True)
    assert [each.path for each in again.checkpoints] == [made[0].path] and again.chain.head.key.round == 2
    past = here.path / "past" / f"{manifest.run_id[:16]}-unused"
    assert [each.path.name for each in whole(past, print)] == [made[1].path.name]
    assert (past / "certificates.bin").read_bytes() == damaged
    again.chain.switch(again.chain.head.key.lineage, [decided(again.chain.head)])
    assert len(CertificateLog(here.certificates)) == 3, "later certificates are kept in the usual place"


def test_unreadable_checkpoint_directory_does_not_restart_run(here: StateDir) -> None:
    begin(here)
    (here.path / "checkpoints").write_bytes(b"a file")
    with pytest.raises(StateError, match=r"checkpoints cannot be read \(Not a directory\): make it readable"):
        resume.find_resumable(here)


class Stand:
    """An outer loop and a trainer, as far as a checkpoint restores them; `broken`: its inner state is damaged."""

    def __init__(self, broken: bool = False) -> None:
        self.parameters, self.loads, self.broken = torch.zeros(301), list[tuple[Path | None, int, int]](), broken

    async def start_from(self, snapshot: Snapshot) -> None:
        snapshot.copy(self.parameters, torch.zeros(301))

    async def load(self, path: Path | None, position: int, threads: int) -> None:
        self.loads.append((path, position, threads))
        if path and self.broken:
            raise WorkerError("its tensors are not those of this model")


@pytest.mark.parametrize("broken", [False, True])
def test_peer_is_restored_from_its_last_checkpoint(
    tmp_path: Path, chain: Chain, broken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    newer = checkpoint(tmp_path, chain, 4)
    begun = resume.RestartPoint(chain, cast(CertificateLog, None), resume.cut_back([newer], chain), newer.data)
    kept, stand = checkpoint_manager(tmp_path), Stand(broken)
    asyncio.run(resume.restore(begun, cast(ReplicatedOuterLoop, stand), cast(RemoteTrainer, stand), kept))
    assert torch.equal(stand.parameters, state(4).anchor)
    assert stand.loads == [(newer.inner, 42, 3), (None, 42, 3)][: 1 + broken]
    assert [each.round for each in kept.snapshots.held()] == [4]
    assert len(caplog.records) == broken


def test_checkpoint_lost_before_restore_gives_one_line(tmp_path: Path, chain: Chain) -> None:
    newer = checkpoint(tmp_path, chain, 4)
    begun = resume.RestartPoint(chain, cast(CertificateLog, None), resume.cut_back([newer], chain), newer.data)
    (newer.path / "outer.safetensors").unlink()
    kept, stand = checkpoint_manager(tmp_path), Stand()
    with pytest.raises(
        StateError, match=r"^the checkpoint before round 5 cannot be read any more \(No such file"
    ) as caught:
        asyncio.run(resume.restore(begun, cast(ReplicatedOuterLoop, stand), cast(RemoteTrainer, stand), kept))
    assert "\n" not in str(caught.value) and str(tmp_path / "checkpoints") in str(caught.value)


def test_restart_position_and_obstacle_are_reported(tmp_path: Path, chain: Chain) -> None:
    kept = resume.cut_back([checkpoint(tmp_path, chain, number) for number in (2, 4)][::-1], chain)
    begun = resume.RestartPoint(chain, cast(CertificateLog, None), kept, kept[0].data)
    assert begun.description() == "from the checkpoint before round 5"
    assert replace(begun, checkpoints=()).description() == ""
    assert begun.waiting_reason(Member(ROSTER[0].peer, 7), 1) == ""
    line = begun.waiting_reason(Member("zoe", 1), 1)
    assert line.startswith("peer zoe is not a member of the saved state (members: ") and "\n" not in line
    assert all(member.peer in line for member in chain.head.roster) and "identity.key" in line
    first, *others = chain.head.roster
    chain.switch(chain.head.key.lineage, [decided(chain.head, roster=tuple(others))])
    left = begun.waiting_reason(first, 1)
    assert "left the run before its last members" in left and left.endswith("or for most of the peers that left")
    assert begun.waiting_reason(first, 0).endswith("the run forbids forks")
    gone = {each.peer for each in others}
    assert begun.waiting_reason(first, 1, gone.__contains__).endswith("former members continue after a fork")
    assert begun.waiting_reason(first, 1, {others[0].peer}.__contains__) == left
    assert begun.waiting_reason(first, 0, gone.__contains__).endswith("the run forbids forks")
