"""The model of a running swarm with stages, fetched by a process that takes no part in it."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.export.fetching import fetch_state, fetchable
from node.export.trained_model import TrainedModel, load_trained
from node.joining.bootstrap import BootstrapServer, RunInfo
from node.joining.stages import StageAssigner
from node.membership.hello import BOOTSTRAP_METHOD, StageReply, StageSeat, WantStage
from node.membership.seats import Seats, seat_of
from node.reporting.status import PeerStatus, public
from node.tasks.hf.settings import ModelError
from protocols.base import Member, PeerId, Stream, stage_scope
from protocols.consensus.record import Kind
from tests.sim.host import SimSigner
from tests.sim.swarm import SimSwarm
from tests.support.fake_rounds import SEED
from tests.support.simulated import simulated
from tests.support.statedir_fixtures import staged_run
from tests.support.status_examples import STATUS
from tests.support.sync_cluster import SyncCluster, SyncPeer


class StagedSwarm(SimSwarm):
    """Three stages on one network, each with a chain of its own: the founder, b and c. Each peer knows the others."""

    seed = SEED

    def __init__(self, tmp_path: Path) -> None:
        super().__init__()
        run = staged_run(tmp_path / "founder")
        self.run = fetchable(run.envelope)
        self.manifest = self.run.manifest
        self.names = [self.manifest.founder.peer, "b", "c"]
        members = [self.manifest.founder, Member("b"), Member("c")]
        self.stages = [
            SyncCluster(
                [name], sum(self.manifest.elements_of(stage)), scope=stage_scope(stage), run=bytes.fromhex(run.run_id)
            )
            for stage, name in enumerate(self.names)
        ]
        for stage, swarm in enumerate(self.stages):
            swarm.network, swarm.founders = self.network, (members[stage],)
        seats = Seats(self.manifest, SimSigner(self.names[0], SEED))
        self.seats = [seats.make(stage, member) for stage, member in enumerate(members)]

    async def set_up(self) -> None:
        for stage, swarm in enumerate(self.stages):
            await swarm.set_up()
            self.open_entry(stage)

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

        assigner = StageAssigner(me, seats, membership, self.peer(stage).transport, keep=keep, has_begun=lambda: True)
        known = tuple(
            PeerStatus(name, name, True, True, 1, "", number)
            for number, name in enumerate(self.names)
            if number != stage
        )
        shown = dataclasses.asdict(public(replace(STATUS, peers=known, stage=stage, stages=3)))
        run = RunInfo(self.run.sealed, b"")
        BootstrapServer(self.peer(stage).transport, run, lambda: shown, assigner.assign)

    def tell_only(self, stage: int, seat: StageSeat) -> None:
        """From now on the peer of a stage tells strangers this seat and no other, and no status."""

        async def answer(peer: PeerId, stream: Stream) -> None:
            if isinstance(await stream.receive(1 << 16), WantStage):
                await stream.send(StageReply(stage, (seat,)))

        self.peer(stage).transport.node.handlers[BOOTSTRAP_METHOD] = answer

    async def rounds(self, stage: int, count: int) -> None:
        await self.stages[stage].rounds(self.names[stage], count)

    async def fetch(self, directory: Path, *bootstrap: PeerId) -> TrainedModel:
        return load_trained(await fetch_state(self.join(f"stranger-{directory.name}"), self.run, bootstrap, directory))

    async def refused(self, directory: Path, *bootstrap: PeerId) -> str:
        with pytest.raises(ModelError) as caught:
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


@simulated(StagedSwarm)
async def test_stages_are_the_whole_model_of_one_round(swarm: StagedSwarm, tmp_path: Path) -> None:
    """Whichever peer is asked. Stage 0 is further than the others, so an older state of it is taken."""
    for stage, count in enumerate((13, 10, 9)):
        await swarm.rounds(stage, count)
    heads = [swarm.peer(stage).chain.head for stage in range(3)]
    for name in swarm.names:
        found = await swarm.fetch(tmp_path / name[-4:], name)
        assert found.rounds == (8, 8, 8) and found.warning() == ""
        assert list(found.tensors) == list(staged_run(tmp_path / "founder").whole.state_dict())
        assert all(swarm.holds(found, stage, 8) for stage in range(3))
        for stage, checkpoint in enumerate(found.checkpoints):
            kept = seat_of((checkpoint.path.parents[1] / "stage.json").read_bytes())
            assert kept and (kept.stage, kept) == (stage, swarm.seats[stage])
    assert [swarm.peer(stage).chain.head for stage in range(3)] == heads


@simulated(StagedSwarm)
async def test_rounds_that_trained_nothing_do_not_count(swarm: StagedSwarm, tmp_path: Path) -> None:
    """Stage 1 forked four times, so its snapshot before round 12 follows eight rounds of training."""
    for stage in (0, 2):
        await swarm.rounds(stage, 11)
    for _ in range(4):
        await swarm.stages[1].decide("b", roster=[swarm.peer(1).me, Member("d")])
        await swarm.stages[1].decide("b", Kind.FORK)
    await swarm.rounds(1, 5)
    found = await swarm.fetch(tmp_path / "out", "b")
    assert found.rounds == (8, 8, 8) and [each.round for each in found.checkpoints] == [8, 12, 8]
    assert swarm.holds(found, 0, 8) and swarm.holds(found, 1, 12)


@simulated(StagedSwarm)
async def test_newest_of_each_stage_without_a_common_round(swarm: StagedSwarm, tmp_path: Path) -> None:
    for stage, count in enumerate((21, 5, 5)):
        await swarm.rounds(stage, count)
    found = await swarm.fetch(tmp_path / "out", "c")
    assert found.rounds == (20, 4, 4) and found.warning().startswith("warning: the checkpoints are of different")
    assert swarm.holds(found, 0, 20) and swarm.holds(found, 1, 4)


@simulated(StagedSwarm)
async def test_forged_seat_is_refused(swarm: StagedSwarm, tmp_path: Path) -> None:
    for stage in range(3):
        await swarm.rounds(stage, 5)
    swarm.tell_only(1, replace(swarm.seats[1], member=Member("mallory")))
    why = "a seat in stage 1 that neither the founder nor a first member has signed"
    run = f"run {swarm.manifest.run_id[:12]}"
    line = await swarm.refused(tmp_path / "through-c", "c")
    assert line.startswith(f"{run}: no peer of stage 1 can be reached (b: {why}): give the address of one by")
    line = await swarm.refused(tmp_path / "through-b", "b")
    assert line == f"{run}: b: {why}: give the address of another of its peers"


@simulated(StagedSwarm)
async def test_stage_without_peers_gives_one_line(swarm: StagedSwarm, tmp_path: Path) -> None:
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


@simulated(StagedSwarm)
async def test_peers_that_know_no_other_are_given_each_by_its_address(swarm: StagedSwarm, tmp_path: Path) -> None:
    for stage in range(3):
        await swarm.rounds(stage, 5)
        swarm.tell_only(stage, swarm.seats[stage])
    line = await swarm.refused(tmp_path / "one", "b")
    assert "no peer of stages 0 and 2 is known there: wait until one has joined, or give the address" in line
    found = await swarm.fetch(tmp_path / "all", *swarm.names)
    assert found.rounds == (4, 4, 4) and all(swarm.holds(found, stage, 4) for stage in range(3))
