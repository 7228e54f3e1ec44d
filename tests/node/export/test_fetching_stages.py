"""The model of a running swarm with stages, fetched by a process that takes no part in it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.export.fetching import fetch_state, fetchable
from node.export.trained_model import TrainedError, TrainedModel, load_trained
from node.joining.bootstrap import BootstrapServer, RunInfo
from node.joining.stages import Seats, StageAssigner, place_of
from node.membership.hello import ENTRY, StageReply, StageSeat, WantStage
from node.reporting.status import PeerStatus, public
from protocols.base import Member, PeerId, Stream
from protocols.consensus.record import Kind
from protocols.scopes import stage_scope
from tests.sim import loop as simloop
from tests.sim.host import SimSigner, sim_host
from tests.support import sync_cluster
from tests.support.fake_rounds import SEED
from tests.support.statedir_fixtures import StagedRun, staged_run
from tests.support.status_examples import status
from tests.support.sync_cluster import SyncCluster, SyncPeer


class StagedSwarm:
    """Three stages on one network, each with a chain of its own: the founder, b and c. Each peer knows the others.

    Attributes:
        statuses: how often peers were asked for their status.
    """

    def __init__(self, run: StagedRun, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = fetchable(run.envelope)
        self.manifest = self.run.manifest
        monkeypatch.setattr(sync_cluster, "RUN", bytes.fromhex(run.run_id))
        self.names = [self.manifest.founder.peer, "b", "c"]
        founder, *others = (Member(name) for name in self.names)
        members = [self.manifest.founder, *others]
        assert founder.peer == members[0].peer
        self.stages = [
            SyncCluster([name], sum(self.manifest.elements_of(stage)), scope=stage_scope(stage))
            for stage, name in enumerate(self.names)
        ]
        for stage, swarm in enumerate(self.stages):
            swarm.network, swarm.founders = self.stages[0].network, (members[stage],)
        self.network = self.stages[0].network
        seats = Seats(self.manifest, SimSigner(self.names[0], SEED))
        self.seats = [seats.sign(stage, member) for stage, member in enumerate(members)]

    def play(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            for stage, swarm in enumerate(self.stages):
                await swarm.add_founders()
                self.open_entry(stage)
            await main()
            assert not self.network.bugs

        simloop.run(whole())

    def peer(self, stage: int) -> SyncPeer:
        return self.stages[stage].peers[self.names[stage]]

    def open_entry(self, stage: int) -> None:
        """Let strangers ask the peer of a stage, which knows its own seat and those of its contacts."""
        me = self.peer(stage).me
        seats = Seats(self.manifest, SimSigner(me.peer, SEED))
        seats.add([self.seats[stage]])
        contacts = [
            SimpleNamespace(peer=name, hello=SimpleNamespace(seats=(seat,)))
            for name, seat in zip(self.names, self.seats, strict=True)
        ]
        membership: Any = SimpleNamespace(contacts=lambda: contacts, live=lambda: (me,), stage_of=lambda peer: stage)

        async def keep(seats: object) -> None:
            raise AssertionError("nobody gets a seat")

        assigner = StageAssigner(me, self.manifest, seats, membership, self.peer(stage).transport, keep)
        known = tuple(
            PeerStatus(name, name, True, True, 1, "", number)
            for number, name in enumerate(self.names)
            if number != stage
        )
        shown = dataclasses.asdict(public(replace(status(), peers=known, stage=stage, stages=3)))
        run = RunInfo(self.run.sealed, b"")
        BootstrapServer(self.peer(stage).transport, run, lambda: shown, assigner.assign)

    async def rounds(self, stage: int, count: int, kind: Kind = Kind.MEAN) -> None:
        for _ in range(count):
            await self.stages[stage].decide(self.names[stage], kind)

    async def fetch(self, directory: Path, *bootstrap: PeerId) -> TrainedModel:
        stranger = sim_host(self.network, self.network.join(f"stranger-{directory.name}"), SEED, {})
        directory.mkdir()
        return load_trained(await fetch_state(stranger, self.run, bootstrap, directory))

    async def refused(self, directory: Path, *bootstrap: PeerId) -> str:
        with pytest.raises(TrainedError) as caught:
            await self.fetch(directory, *bootstrap)
        line = str(caught.value)
        assert len(line.splitlines()) == 1
        return line

    def holds(self, found: TrainedModel, stage: int, trained_round: int) -> bool:
        """Whether the model has the outer parameters, bit for bit, that the peer of a stage had before a round."""
        of_stage = {name for name, _ in self.run.layouts[stage].fragments[0]}
        flat = torch.cat([tensor.flatten() for name, tensor in found.tensors.items() if name in of_stage])
        (kept,) = [each for each in self.peer(stage).snapshots.held() if each.round == trained_round]
        parameters, velocity = torch.empty_like(flat), torch.empty_like(flat)
        kept.copy(parameters, velocity)
        return torch.equal(flat, parameters)


@pytest.fixture
def swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StagedSwarm:
    return StagedSwarm(staged_run(tmp_path / "founder"), monkeypatch)


def test_stages_are_the_whole_model_of_one_round(swarm: StagedSwarm, tmp_path: Path) -> None:
    """Whichever peer is asked. Stage 0 is further than the others, so an older state of it is taken."""

    async def main() -> None:
        for stage, count in enumerate((13, 10, 9)):
            await swarm.rounds(stage, count)
        heads = [swarm.peer(stage).chain.head for stage in range(3)]
        for name in swarm.names:
            found = await swarm.fetch(tmp_path / name[-4:], name)
            assert found.rounds == (8, 8, 8) and found.warning() == ""
            assert list(found.tensors) == list(staged_run(tmp_path / "founder").whole.state_dict())
            assert all(swarm.holds(found, stage, 8) for stage in range(3))
            for stage, checkpoint in enumerate(found.checkpoints):
                kept = place_of((checkpoint.path.parents[1] / "stage.json").read_bytes())
                assert kept and (kept.stage, kept.seat) == (stage, swarm.seats[stage])
        assert [swarm.peer(stage).chain.head for stage in range(3)] == heads

    swarm.play(main)


def test_rounds_that_trained_nothing_do_not_count(swarm: StagedSwarm, tmp_path: Path) -> None:
    """Stage 1 forked twice, so its snapshots before rounds 8 and 12 follow six and ten rounds of training."""

    async def main() -> None:
        for stage in range(3):
            await swarm.rounds(stage, 3)
        for stage in (0, 2):
            await swarm.rounds(stage, 8)
        for kind in (Kind.FORK, Kind.FORK):
            await fork(swarm, 1, kind)
        await swarm.rounds(1, 9)
        found = await swarm.fetch(tmp_path / "out", "b")
        assert found.rounds == (8, 10, 8) and "of different rounds (stage 0 after 8, stage 1 after 10" in found.warning()
        assert swarm.holds(found, 0, 8) and swarm.holds(found, 1, 12)

    swarm.play(main)


async def fork(swarm: StagedSwarm, stage: int, kind: Kind) -> None:
    await swarm.stages[stage].decide(swarm.names[stage], kind)


def test_newest_of_each_stage_without_a_common_round(swarm: StagedSwarm, tmp_path: Path) -> None:
    async def main() -> None:
        for stage, count in enumerate((21, 5, 5)):
            await swarm.rounds(stage, count)
        found = await swarm.fetch(tmp_path / "out", "c")
        assert found.rounds == (20, 4, 4) and found.warning().startswith("warning: the checkpoints are of different")
        assert swarm.holds(found, 0, 20) and swarm.holds(found, 1, 4)

    swarm.play(main)


def forge(swarm: StagedSwarm, stage: int, seat: StageSeat) -> None:
    """Make the peer of a stage tell this seat to all who ask."""

    async def lie(peer: PeerId, stream: Stream) -> None:
        assert isinstance(await stream.receive(1 << 16), WantStage)
        await stream.send(StageReply(stage, (seat,)))

    swarm.peer(stage).transport._node.handlers[ENTRY] = lie


def test_forged_seat_is_refused(swarm: StagedSwarm, tmp_path: Path) -> None:
    async def main() -> None:
        for stage in range(3):
            await swarm.rounds(stage, 5)
        forge(swarm, 1, replace(swarm.seats[1], member=Member("mallory")))
        why = "a seat in stage 1 that the run's founder has not signed"
        run = f"run {swarm.manifest.run_id[:12]}"
        line = await swarm.refused(tmp_path / "through-c", "c")
        assert line.startswith(f"{run}: no peer of stage 1 can be reached (b: {why}): give the address of one by")
        line = await swarm.refused(tmp_path / "through-b", "b")
        assert line == f"{run}: b: {why}: give the address of another of its peers"

    swarm.play(main)


def test_stage_without_peers_gives_one_line(swarm: StagedSwarm, tmp_path: Path) -> None:
    async def main() -> None:
        for stage in range(3):
            await swarm.rounds(stage, 5)
        swarm.network.kill("b")
        line = await swarm.refused(tmp_path / "one", "c")
        assert "no peer of stage 1 can be reached (b: " in line and "another --bootstrap" in line
        swarm.network.kill("c")
        line = await swarm.refused(tmp_path / "two", swarm.names[0])
        assert "no peer of stages 1 and 2 can be reached (b: " in line
        line = await swarm.refused(tmp_path / "none", "c")
        assert line.endswith(": give the address of another of its peers")

    swarm.play(main)


def test_peers_that_know_no_other_are_given_each_by_its_address(swarm: StagedSwarm, tmp_path: Path) -> None:
    async def main() -> None:
        for stage in range(3):
            await swarm.rounds(stage, 5)
            swarm.peer(stage).transport._node.handlers.pop(ENTRY)
        names, swarm.names = swarm.names, swarm.names[:1]
        swarm.names = names
        for stage in range(3):
            alone(swarm, stage)
        line = await swarm.refused(tmp_path / "one", "b")
        assert "no peer of stages 0 and 2 is known there: wait until one has joined, or give the address" in line
        found = await swarm.fetch(tmp_path / "all", *names)
        assert found.rounds == (4, 4, 4) and all(swarm.holds(found, stage, 4) for stage in range(3))

    swarm.play(main)


def alone(swarm: StagedSwarm, stage: int) -> None:
    """Make the peer of a stage tell its own seat only, and no status."""

    async def answer(peer: PeerId, stream: Stream) -> None:
        if isinstance(await stream.receive(1 << 16), WantStage):
            await stream.send(StageReply(stage, (swarm.seats[stage],)))

    swarm.peer(stage).transport._node.handlers[ENTRY] = answer


def test_damaged_seat_file_is_not_written(swarm: StagedSwarm, tmp_path: Path) -> None:
    async def main() -> None:
        for stage in range(3):
            await swarm.rounds(stage, 5)
        found = await swarm.fetch(tmp_path / "out", "c")
        for stage, checkpoint in enumerate(found.checkpoints):
            assert json.loads((checkpoint.path.parents[1] / "stage.json").read_text())["stage"] == stage

    swarm.play(main)
