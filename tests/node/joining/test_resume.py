"""After a restart: which run is gone on with, whether others are asked, and from which state."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from node.config.derived import stream_seed
from node.config.manifest import Manifest, ManifestError, layout_digest, seal
from node.config.peer_config import PeerConfig
from node.config.run_config import RunConfig, load_run
from node.joining import resume
from node.joining.bootstrap import BootstrapClient, RunInfo
from node.joining.run_selector import RunSelector
from node.outer.replicated_loop import ReplicatedOuterLoop
from node.storage.certificate_log import CertificateLog
from node.storage.checkpoint import Checkpoint, DataCursor, whole
from node.storage.checkpoint_manager import CheckpointManager, CheckpointStorage
from node.storage.statedir import StateDir, StateError
from node.training.remote import RemoteTrainer, WorkerError
from protocols import REPLICATED_PROTOCOLS
from protocols.base import Layout, Member
from protocols.consensus.record import Kind
from protocols.history.chain import Chain
from protocols.sync.snapshot import Snapshot
from tests.node.storage.test_checkpoint import Disk, Worker, like, state
from tests.protocols.history.test_fork_choice import ROSTER
from tests.support.fake_rounds import RUN, decided
from tests.support.session_cluster import View

SAMPLE = b"what everybody evaluates on"
ADDRESS = "/ip4/192.0.2.1/tcp/1/p2p/12D3KooWAWN22BfV8SENcdL3qSe3xVZZXSdGCeBHqscxPgyn4CFR"


@pytest.fixture
def here(tmp_path: Path) -> StateDir:
    return StateDir.open(tmp_path / "peer")


def sealed(here: StateDir, held_out: bytes = SAMPLE) -> tuple[Manifest, bytes]:
    """A run that this peer founded."""
    config = load_run(None, {"task": "paced"}, REPLICATED_PROTOCOLS)
    manifest = Manifest(
        config=config,
        founder=Member(here.identity.peer_id, 1),
        elements=(config.elements,),
        state_root=b"r" * 32,
        held_out=hashlib.sha256(held_out).digest() if held_out else bytes(32),
        created=0.0,
        layout=layout_digest(Layout(((("paced", (config.elements,)),),))),
    )
    return manifest, seal(manifest, here.identity)


def begin(here: StateDir, other: StateDir | None = None) -> Manifest:
    """The directory is of a run that this peer founded, or another one."""
    manifest, data = sealed(other or here)
    here.begin(manifest.run_id, "", data, SAMPLE)
    here.remember({"12D3KooWPeer": ["/ip4/192.0.2.2/tcp/1"]})
    return manifest


# -- which run --------------------------------------------------------------------------------------------------------


def test_founder_resumes_with_or_without_checkpoint(here: StateDir) -> None:
    assert resume.find_resumable(here) is None
    manifest = begin(here)
    held = resume.find_resumable(here)
    assert held and held.manifest == manifest and held.has_state and held.run == RunInfo(here.manifest(), SAMPLE)


def test_joiner_resumes_alone_only_from_a_checkpoint(here: StateDir, tmp_path: Path) -> None:
    begin(here, StateDir.open(tmp_path / "founder"))
    held = resume.find_resumable(here)
    assert held and not held.has_state
    (here.path / "checkpoints" / ".000005-050505050505").mkdir(parents=True)  # a download that was broken off
    assert not cast(resume.ResumableRun, resume.find_resumable(here)).has_state
    (here.path / "checkpoints" / "000005-050505050505").mkdir()
    assert cast(resume.ResumableRun, resume.find_resumable(here)).has_state


@pytest.mark.parametrize("damage", ["manifest", "sample", "over"])
def test_finished_or_damaged_run_is_not_resumed(here: StateDir, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    begin(here)
    if damage == "manifest":
        (here.path / "manifest.bin").write_bytes(here.manifest()[:-1])
    elif damage == "sample":
        here.sample.write_bytes(b"another")
    else:
        here.forget()
    assert resume.find_resumable(here) is None and len(caplog.records) == (damage != "over")


def test_damaged_manifest_is_reported_once(here: StateDir, caplog: pytest.LogCaptureFixture) -> None:
    begin(here)
    (here.path / "manifest.bin").write_bytes(here.manifest()[:-1])
    choice = RunSelector(PeerConfig(state_dir=here.path), REPLICATED_PROTOCOLS, print)
    assert choice.held(here, None) is None and not caplog.records
    with pytest.raises(StateError, match="cannot be resumed"):
        resume.require_none(here)
    asking = RunSelector(PeerConfig(state_dir=here.path, bootstrap=(ADDRESS,)), REPLICATED_PROTOCOLS, print)
    assert asking.held(here, None) is None and len(caplog.records) == 1


@pytest.mark.parametrize("left", ["damaged manifest", "no manifest", "chain", "checkpoints", "over"])
def test_leftovers_of_a_run_block_a_new_one(here: StateDir, left: str) -> None:
    resume.require_none(here)
    begin(here)
    here.certificates.touch()
    resume.require_none(here)  # of a founder that was killed before there was anything to keep
    words = r"cannot be resumed.*: --bootstrap joins it again, --new starts another"
    if left == "damaged manifest":
        flip(here.path / "manifest.bin", 300)
        words = r"cannot be resumed \(the manifest is not signed by its founder.*--bootstrap .*--new"
    elif left == "over":
        here.forget()
        words = r"the run in .* is over: --new starts another run, and moves what is here to past/$"
    else:
        (here.path / "manifest.bin").unlink()
        words = words if left == "chain" else r"manifest.bin is missing"
        here.certificates.write_bytes(b"" if left == "checkpoints" else b"some")
        (here.path / "checkpoints").mkdir()
        if left == "chain":
            here.begin("", "", sealed(here)[1], b"")
    with pytest.raises(StateError, match=words) as caught:
        resume.require_none(here)
    assert "\n" not in str(caught.value)


def test_finished_run_is_reported_when_requested_again(here: StateDir) -> None:
    manifest = begin(here)

    def over(wanted: RunConfig | None = None, **given: Any) -> str:
        return RunSelector(PeerConfig(state_dir=here.path, **given), REPLICATED_PROTOCOLS, print).over(here, wanted)

    other = replace(manifest.config, name="another")
    assert not over() and not over(other)
    here.forget()
    line = f"the run {manifest.run_id[:12]} in {here.path} is over: {resume.ANOTHER}"
    for said in (over(), over(manifest.config), over(bootstrap=(ADDRESS,), run_id=manifest.run_id[:12])):
        assert said == line
    assert not over(new=True) and not over(other, new=True)
    assert not over(bootstrap=(ADDRESS,)), "which may lead into another"
    with pytest.raises(StateError, match=r"holds another run, which is over: --new"):
        over(other)
    with pytest.raises(StateError, match=r"holds another run, .*: --bootstrap joins run 0123456789ab"):
        over(run_id="0123456789ab")
    choice = RunSelector(PeerConfig(bootstrap=(ADDRESS,)), REPLICATED_PROTOCOLS, print)
    assert choice.is_over(here, RunInfo(here.manifest(), SAMPLE)) == line
    assert choice.is_over(here, RunInfo(sealed(here, b"")[1], b"")) == ""


def test_sample_must_match_the_manifest(here: StateDir) -> None:
    choice = RunSelector(PeerConfig(state_dir=here.path), REPLICATED_PROTOCOLS, print)
    (_, named), (_, without) = sealed(here), sealed(here, b"")
    choice.judge(RunInfo(named, SAMPLE))
    choice.judge(RunInfo(without, b""))
    for data, sample in ((named, b"another"), (named, b""), (without, SAMPLE)):
        with pytest.raises(ManifestError, match="the evaluation sample is not the one that the manifest names"):
            choice.judge(RunInfo(data, sample))


class Nobody:
    """An entry that leads nowhere, or to what it is told."""

    def __init__(self, answer: RunInfo | Exception | None = None) -> None:
        self.answer, self.asked, self.stopped = answer, list[str](), False
        self.named: dict[str, tuple[str, ...]] = {}
        self.on_named: Callable[[Sequence[str]], None] = lambda addresses: None
        self.on_find: Callable[[], None] = lambda: None

    def set_listener(self, on_named: Callable[[Sequence[str]], None]) -> None:
        self.on_named = on_named

    async def find(self, addresses: tuple[str, ...], remembered: Sequence[str]) -> RunInfo:
        self.asked += addresses
        self.on_find()
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer:
            return self.answer
        await asyncio.Event().wait()
        raise AssertionError

    def stop(self) -> None:
        self.stopped = True


def ask(here: StateDir, entry: Nobody, **given: Any) -> tuple[RunInfo, View]:
    """Which run a restarted peer goes on with."""
    view = View()
    choice = RunSelector(PeerConfig(state_dir=here.path, **given), REPLICATED_PROTOCOLS, view.say)

    async def main() -> RunInfo:
        addresses = choice.addresses(here)
        async with asyncio.timeout(2):
            return await choice.ask(cast(BootstrapClient, entry), here, addresses, resume.find_resumable(here))

    return asyncio.run(main()), view


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "ANSWER_SECONDS", 0.05)


def test_unanswered_bootstrap_resumes_the_held_run(here: StateDir) -> None:
    manifest, entry = begin(here), Nobody()
    here.remember({ADDRESS.rpartition("/p2p/")[2]: ["/ip4/192.0.2.1/tcp/1"]})
    run, view = ask(here, entry, bootstrap=(ADDRESS,))
    assert run.sealed == here.manifest() and entry.stopped
    assert entry.asked == [ADDRESS], "of a run that may be another"
    assert view.said == [
        f"no peer answers: resuming run {manifest.run_id[:12]} from the state directory; --new starts another"
    ]


def test_answering_peer_takes_precedence_over_held_run(here: StateDir, tmp_path: Path) -> None:
    begin(here)
    _, sealed_there = sealed(StateDir.open(tmp_path / "other"))
    run, view = ask(here, Nobody(RunInfo(sealed_there, SAMPLE)), bootstrap=(ADDRESS,))
    assert run.sealed == sealed_there and view.said == []
    with pytest.raises(ManifestError, match="another run"):
        ask(here, Nobody(ManifestError("another run")), bootstrap=(ADDRESS,))


def test_peers_now_in_another_run_count_as_unanswered(here: StateDir) -> None:
    manifest = begin(here)
    run, view = ask(here, Nobody(ManifestError(f"{ADDRESS}: this is run abab")))
    assert run.sealed == here.manifest()
    assert view.said[1:] == [
        f"{ADDRESS}: this is run abab",
        f"no peer answers: resuming run {manifest.run_id[:12]} from the state directory; --new starts another",
    ]


def test_bootstrap_by_run_id_times_out_too(here: StateDir) -> None:
    manifest = begin(here)
    assert ask(here, Nobody(), bootstrap=(ADDRESS,), run_id=manifest.run_id[:12])[0].sealed == here.manifest()


@pytest.mark.parametrize("why", ["another run is meant", "an address of nobody met", "no state"])
def test_unrelated_bootstrap_is_tried_without_time_limit(here: StateDir, tmp_path: Path, why: str) -> None:
    if why == "no state":
        begin(here, StateDir.open(tmp_path / "founder"))
    else:
        begin(here)
    meant: dict[str, Any] = {"run_id": "ab" * 32} if why == "another run is meant" else {}
    with pytest.raises(TimeoutError):
        ask(here, Nobody(), bootstrap=(ADDRESS,), **meant)


def test_address_file_counts_by_the_peers_it_names(here: StateDir) -> None:
    begin(here)
    here.remember({ADDRESS.rpartition("/p2p/")[2]: ["/ip4/192.0.2.1/tcp/1"]})
    entry = Nobody()
    with pytest.raises(TimeoutError):  # the file is missing: whom it will name, nobody knows
        ask(here, entry, bootstrap=("@/nowhere/file",))
    assert entry.asked == ["@/nowhere/file"] and not entry.stopped
    entry.named["@/nowhere/file"] = (ADDRESS,)
    entry.on_find = lambda: entry.on_named((ADDRESS,))
    assert ask(here, entry, bootstrap=("@/nowhere/file",))[0].sealed == here.manifest() and entry.stopped
    ask(here, answered := Nobody(RunInfo(here.manifest(), SAMPLE)), bootstrap=("@/nowhere/file",))
    answered.named = entry.named
    answered.on_named((ADDRESS,))  # the file is read on, after the way in was found


# -- from which state -------------------------------------------------------------------------------------------------


def checkpoint(path: Path, chain: Chain, round_number: int, first: Checkpoint | None = None) -> Checkpoint:
    """One of the state before a round of this chain."""
    head = chain.at(chain.locator()[-1 - round_number])
    assert head and head.key.round == round_number

    async def main() -> None:
        async with checkpoints(path, first) as made:
            for each in newest_first(path):
                made.holds(each)
            await made.keep(state(round_number), head.key)

    asyncio.run(main())
    return newest_first(path)[0]


def newest_first(path: Path) -> tuple[Checkpoint, ...]:
    return tuple(whole(path, lambda line: None))


def checkpoints(path: Path, first: Checkpoint | None = None) -> CheckpointManager:
    return CheckpointManager(
        CheckpointStorage(path, 1, 1 << 30, Disk()), first or replace(like(path), run=RUN.hex()), Worker()
    )


@pytest.fixture
def chain() -> Chain:
    """Five rounds, the state before round n being `state(n)`."""
    made = Chain(RUN, "run", ROSTER[:3])
    for number in range(5):
        made.switch(made.head.key.lineage, [decided(made.head, root=state(number).root(number))])
    return made


def test_chain_is_cut_to_newest_matching_checkpoint(tmp_path: Path, chain: Chain) -> None:
    before, after = (checkpoint(tmp_path / str(number), chain, number) for number in (2, 4))
    stranger = replace(after, lineage=b"s" * 32, round=7)
    wrong = replace(after, state_root=b"w" * 32)
    assert resume.cut_back([stranger, wrong, before], chain) == (before,)
    assert chain.head.key.round == 2 and chain.head.key.lineage == before.lineage


def test_checkpoint_at_the_tip_is_accepted(tmp_path: Path, chain: Chain) -> None:
    tip = checkpoint(tmp_path, chain, 5)
    assert resume.cut_back([tip], chain) == (tip,) and chain.head.key.round == 5


def test_chain_without_checkpoint_begins_again(chain: Chain) -> None:
    assert resume.cut_back([], chain) == () and chain.head.key.round == 0


def test_incarnation_resumes_at_the_last_checkpoint(here: StateDir) -> None:
    manifest = begin(here)
    first = resume.load_restart_point(here, manifest, Member("anna", 1))
    assert first.checkpoints == () and first.data == DataCursor(stream_seed(Member("anna", 1)), 1, 0)
    for number in range(5):
        link = decided(first.chain.head, root=state(number).root(number))
        first.chain.switch(first.chain.head.key.lineage, [link])
    run = manifest.run_id
    made = [checkpoint(here.path, first.chain, number, first.like(run, like(here.path).layout)) for number in (2, 4)]
    again = resume.load_restart_point(here, manifest, Member("anna", 2))
    assert again.checkpoints == (made[1], made[0]) and again.chain.head.key.round == 4
    assert again.data == DataCursor(stream_seed(Member("anna", 1)), 1, 42), "the stream of the first life"
    (made[1].path / "outer.safetensors").write_bytes(b"")
    assert resume.load_restart_point(here, manifest, Member("anna", 3)).checkpoints == (made[0],)


def test_independent_checkpoints_need_no_chain(here: StateDir) -> None:
    manifest, paths = lived(here)
    here.certificates.unlink()
    again = resume.load_restart_point(here, manifest, Member("anna", 2), alone=True, shares_anchor=False)
    assert [each.path for each in again.checkpoints] == paths[::-1]
    assert again.description() == "from the checkpoint before round 5"
    assert again.waiting_reason(Member("anna", 2), 1) == "" and again.chain.head.key.round == 0
    for path in paths:
        (path / "manifest.json").write_bytes(b'{"format": 2}')
    with pytest.raises(StateError, match="none of the checkpoints"):
        resume.load_restart_point(here, manifest, Member("anna", 3), alone=True, shares_anchor=False)


def lived(here: StateDir) -> tuple[Manifest, list[Path]]:
    """A former life: five rounds, and checkpoints before the third and the fifth."""
    manifest = begin(here)
    first = resume.load_restart_point(here, manifest, Member("anna", 1))
    for number in range(5):
        link = decided(first.chain.head, root=state(number).root(number))
        first.chain.switch(first.chain.head.key.lineage, [link])
    common = first.like(manifest.run_id, like(here.path).layout)
    return manifest, [checkpoint(here.path, first.chain, number, common).path for number in (2, 4)]


def flip(file: Path, at: int) -> bytes:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    return bytes(data)


def files(directory: Path) -> dict[str, bytes]:
    return {str(each.relative_to(directory)): each.read_bytes() for each in directory.rglob("*") if each.is_file()}


@pytest.mark.parametrize("damage", ["flipped", "empty", "gone"])
def test_damaged_chain_loses_no_checkpoint(here: StateDir, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    manifest, made = lived(here)
    if damage == "flipped":
        flip(here.certificates, 40)
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
    assert [each.path.name for each in whole(past, print)] == [made[1].name, made[0].name]
    kept = {name: data for name, data in before.items() if name.startswith(("checkpoints", "certificates"))}
    assert files(past) == kept and caplog.records[-1].message.endswith(f"moved to {past}")
    assert resume.load_restart_point(here, manifest, Member("anna", 3)).checkpoints == ()
    assert not past.with_name(past.name + "-2").exists(), "there is nothing more"


def test_unusable_checkpoints_do_not_lose_the_chain(here: StateDir) -> None:
    manifest, made = lived(here)
    for path in made:
        (path / "manifest.json").write_bytes(b'{"format": 2}')
    before = files(here.path)
    with pytest.raises(StateError, match=r"none of the checkpoints in .*/checkpoints can be used; .* --bootstrap"):
        resume.load_restart_point(here, manifest, Member("anna", 2), alone=True)
    assert files(here.path) == before


def test_truncated_chain_resumes_from_older_checkpoint(here: StateDir) -> None:
    manifest, made = lived(here)
    damaged = flip(here.certificates, here.certificates.stat().st_size * 7 // 10)
    again = resume.load_restart_point(here, manifest, Member("anna", 2), alone=True)
    assert [each.path for each in again.checkpoints] == made[:1] and again.chain.head.key.round == 2
    past = here.path / "past" / f"{manifest.run_id[:16]}-unused"
    assert [each.path.name for each in whole(past, print)] == [made[1].name]
    assert (past / "certificates.bin").read_bytes() == damaged
    again.chain.switch(again.chain.head.key.lineage, [decided(again.chain.head)])
    assert len(CertificateLog(here.certificates)) == 3, "what comes is kept where it belongs"


def test_unreadable_checkpoint_directory_does_not_restart_run(here: StateDir) -> None:
    begin(here)
    (here.path / "checkpoints").write_bytes(b"a file")
    with pytest.raises(StateError, match=r"checkpoints cannot be read \(Not a directory\): make it readable"):
        resume.find_resumable(here)


class Stand:
    """A replica and a trainer, as far as they are put where a checkpoint was made; `broken`: the inner state."""

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
    kept, stand = checkpoints(tmp_path), Stand(broken)
    asyncio.run(resume.restore(begun, cast(ReplicatedOuterLoop, stand), cast(RemoteTrainer, stand), kept))
    assert torch.equal(stand.parameters, state(4).anchor)
    assert stand.loads == [(newer.inner, 42, 3), (None, 42, 3)][: 1 + broken]
    assert [each.round for each in kept.snapshots.held()] == [4]
    assert len(caplog.records) == broken


def test_checkpoint_lost_before_restore_gives_one_line(tmp_path: Path, chain: Chain) -> None:
    newer = checkpoint(tmp_path, chain, 4)
    begun = resume.RestartPoint(chain, cast(CertificateLog, None), resume.cut_back([newer], chain), newer.data)
    (newer.path / "outer.safetensors").unlink()
    kept, stand = checkpoints(tmp_path), Stand()
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


def test_fork_without_mean_does_not_count_as_trained(chain: Chain) -> None:
    assert chain.trained == 5
    chain.switch(chain.head.key.lineage, [decided(chain.head, Kind.FORK)])
    assert (chain.head.key.round, chain.trained) == (6, 5)
    copy = chain.copy()
    copy.switch(chain.head.key.lineage, [decided(chain.head, Kind.FORK)])
    copy.switch(copy.head.key.lineage, [decided(copy.head)])
    assert (copy.trained, chain.trained) == (6, 5)
    chain.switch(chain.locator()[-1], ())
    assert chain.trained == 0
