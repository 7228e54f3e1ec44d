"""After a restart: which run the peer resumes, and whether it asks other peers first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from node.config.manifest import ManifestError, unseal
from node.config.peer_config import PeerConfig
from node.config.run_config import RunConfig
from node.joining import resume
from node.joining.bootstrap import BootstrapClient, RunInfo
from node.joining.run_selector import RunSelector
from node.runtime.identity import verify
from node.session.stage_entrance import StageEntrance
from node.storage.statedir import StateDir, StateError
from protocols.base import Member
from protocols.registry import REPLICATED_PROTOCOLS
from tests.support.checkpoints import Disk
from tests.support.restart_examples import SAMPLE, begin, flip_bit, sealed
from tests.support.session_cluster import View
from tests.support.statedir_fixtures import staged_run

ADDRESS = "/ip4/192.0.2.1/tcp/1/p2p/12D3KooWAWN22BfV8SENcdL3qSe3xVZZXSdGCeBHqscxPgyn4CFR"


def test_joiner_resumes_alone_only_from_a_checkpoint(here: StateDir, tmp_path: Path) -> None:
    begin(here, StateDir.open(tmp_path / "founder"))
    held = resume.find_resumable(here)
    assert held and not held.has_state
    for name, has_state in ((".000005-050505050505", False), ("000005-050505050505", True)):
        (here.path / "checkpoints" / name).mkdir(parents=True, exist_ok=True)  # with a dot: an interrupted download
        assert cast(resume.ResumableRun, resume.find_resumable(here)).has_state == has_state


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
    choice = RunSelector(PeerConfig(state_dir=here.path), here, REPLICATED_PROTOCOLS, print)
    assert choice.held(None) is None and not caplog.records
    with pytest.raises(StateError, match="cannot be resumed"):
        resume.require_none(here)
    asking = RunSelector(PeerConfig(state_dir=here.path, bootstrap=(ADDRESS,)), here, REPLICATED_PROTOCOLS, print)
    assert asking.held(None) is None and len(caplog.records) == 1


@pytest.mark.parametrize("left", ["damaged manifest", "no manifest", "chain", "checkpoints", "over"])
def test_leftovers_of_a_run_block_a_new_one(here: StateDir, left: str) -> None:
    resume.require_none(here)
    begin(here)
    here.certificates.touch()
    resume.require_none(here)  # a founder may be killed before it keeps anything
    words = r"cannot be resumed.*: --bootstrap joins it again, --new starts another"
    if left == "damaged manifest":
        manifest = here.path / "manifest.bin"
        flip_bit(manifest, manifest.read_bytes().index(b'"min_peers":') + len(b'"min_peers":'))
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
        return RunSelector(PeerConfig(state_dir=here.path, **given), here, REPLICATED_PROTOCOLS, print).over(wanted)

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
    choice = RunSelector(PeerConfig(bootstrap=(ADDRESS,)), here, REPLICATED_PROTOCOLS, print)
    assert choice.is_over(RunInfo(here.manifest(), SAMPLE)) == line
    assert choice.is_over(RunInfo(sealed(here, b"")[1], b"")) == ""


def test_founder_that_lost_its_stage_rejoins_its_run(here: StateDir) -> None:
    """It has met peers, but decided no round: nothing was saved after one."""
    run = staged_run(here.path)
    here.begin(run.run_id, "", run.envelope, b"")
    entrance = StageEntrance(unseal(run.envelope, verify), here, Disk(), here.identity)

    async def lose_the_stage() -> None:
        await entrance.found(Member(here.identity.peer_id, 1))
        where, _, peer = ADDRESS.rpartition("/p2p/")
        await entrance.leave({peer: (where,)})

    asyncio.run(lose_the_stage())
    choice = RunSelector(PeerConfig(state_dir=here.path), here, REPLICATED_PROTOCOLS, print)
    held = choice.held(run.config)
    assert held and held.manifest.run_id == run.run_id and not held.has_state
    assert choice.addresses() == (ADDRESS,)


def test_sample_must_match_the_manifest(here: StateDir) -> None:
    choice = RunSelector(PeerConfig(state_dir=here.path), here, REPLICATED_PROTOCOLS, print)
    (_, named), (_, without) = sealed(here), sealed(here, b"")
    choice.judge(RunInfo(named, SAMPLE))
    choice.judge(RunInfo(without, b""))
    for data, sample in ((named, b"another"), (named, b""), (without, SAMPLE)):
        with pytest.raises(ManifestError, match="the evaluation sample is not the one that the manifest names"):
            choice.judge(RunInfo(data, sample))


class FakeBootstrapClient:
    """A bootstrap client that finds nothing, or what it is given."""

    def __init__(self, answer: RunInfo | Exception | None = None) -> None:
        self.answer, self.asked, self.stopped = answer, list[str](), False
        self.named: dict[str, tuple[str, ...]] = {}
        self.on_named: Callable[[Sequence[str]], None] = lambda addresses: None
        self.on_find: Callable[[], None] = lambda: None

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


def ask(here: StateDir, entry: FakeBootstrapClient, **given: Any) -> tuple[RunInfo, View]:
    """Which run a restarted peer goes on with."""
    view = View()
    choice = RunSelector(PeerConfig(state_dir=here.path, **given), here, REPLICATED_PROTOCOLS, view.say)

    async def main() -> RunInfo:
        addresses = choice.addresses()
        async with asyncio.timeout(2):
            return await choice.ask(cast(BootstrapClient, entry), addresses, resume.find_resumable(here))

    return asyncio.run(main()), view


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "ANSWER_SECONDS", 0.05)


def test_unanswered_bootstrap_resumes_the_held_run(here: StateDir) -> None:
    manifest, entry = begin(here), FakeBootstrapClient()
    by_run_id = ask(here, FakeBootstrapClient(), bootstrap=(ADDRESS,), run_id=manifest.run_id[:12])[0]
    assert by_run_id.sealed == here.manifest()
    here.remember({ADDRESS.rpartition("/p2p/")[2]: ["/ip4/192.0.2.1/tcp/1"]})
    run, view = ask(here, entry, bootstrap=(ADDRESS,))
    assert run.sealed == here.manifest() and entry.stopped
    assert entry.asked == [ADDRESS], "its run may be another"
    assert view.said == [
        f"no peer answers: resuming run {manifest.run_id[:12]} from the state directory; --new starts another"
    ]


def test_answering_peer_takes_precedence_over_held_run(here: StateDir, tmp_path: Path) -> None:
    begin(here)
    _, sealed_there = sealed(StateDir.open(tmp_path / "other"))
    run, view = ask(here, FakeBootstrapClient(RunInfo(sealed_there, SAMPLE)), bootstrap=(ADDRESS,))
    assert run.sealed == sealed_there and view.said == []
    with pytest.raises(ManifestError, match="another run"):
        ask(here, FakeBootstrapClient(ManifestError("another run")), bootstrap=(ADDRESS,))


def test_peers_now_in_another_run_count_as_unanswered(here: StateDir) -> None:
    manifest = begin(here)
    run, view = ask(here, FakeBootstrapClient(ManifestError(f"{ADDRESS}: this is run abab")))
    assert run.sealed == here.manifest()
    assert view.said[1:] == [
        f"{ADDRESS}: this is run abab",
        f"no peer answers: resuming run {manifest.run_id[:12]} from the state directory; --new starts another",
    ]


@pytest.mark.parametrize("why", ["another run is meant", "an address of an unknown peer", "no state"])
def test_unrelated_bootstrap_is_tried_without_time_limit(here: StateDir, tmp_path: Path, why: str) -> None:
    if why == "no state":
        begin(here, StateDir.open(tmp_path / "founder"))
    else:
        begin(here)
    meant: dict[str, Any] = {"run_id": "ab" * 32} if why == "another run is meant" else {}
    with pytest.raises(TimeoutError):
        ask(here, FakeBootstrapClient(), bootstrap=(ADDRESS,), **meant)


def test_address_file_counts_by_the_peers_it_names(here: StateDir) -> None:
    begin(here)
    here.remember({ADDRESS.rpartition("/p2p/")[2]: ["/ip4/192.0.2.1/tcp/1"]})
    entry = FakeBootstrapClient()
    with pytest.raises(TimeoutError):  # the file is missing: it may come to name unknown peers
        ask(here, entry, bootstrap=("@/nowhere/file",))
    assert entry.asked == ["@/nowhere/file"] and not entry.stopped
    entry.named["@/nowhere/file"] = (ADDRESS,)
    entry.on_find = lambda: entry.on_named((ADDRESS,))
    assert ask(here, entry, bootstrap=("@/nowhere/file",))[0].sealed == here.manifest() and entry.stopped
    ask(here, answered := FakeBootstrapClient(RunInfo(here.manifest(), SAMPLE)), bootstrap=("@/nowhere/file",))
    answered.named = entry.named
    answered.on_named((ADDRESS,))  # the file is read on after a peer answered
