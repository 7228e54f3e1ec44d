"""Real peers of a run with stages: they come in any order, die, restart and leave."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch.nn.functional import cross_entropy

from node.export.trained_model import load_trained
from node.tasks.gpt import Gpt
from node.tasks.gpt_presets import Preset
from node.tasks.gpt_stage import GptStageTask
from node.tasks.partition import Partition
from node.tasks.text import Text
from protocols.pipeline.held_out import spread_order
from tests.support import stage_checkers
from tests.support.real_swarm import RealPeer, RealSwarm, paced, wait

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

RUN = (
    "stages = 2\n[gpt]\nlayers = 2\nwidth = 16\nheads = 2\ncontext = 32\nrows = 1\n"
    "[recipe]\nrounds = 10000\ninner_steps = 3\nbatches = 4\n"
)
PACED = "stages = 2\n" + paced(elements=20_000, inner_steps=3) + "batches = 2\nlookahead = 2\n"
LEAVE_SECONDS = 12.0


class ChoosingSwarm(RealSwarm):
    """Peers get their stages from those that they ask. The invariants of rounds hold within each stage."""

    invariants = staticmethod(stage_checkers.check)


def rounds(peer: RealPeer) -> list[int]:
    """Rounds that the peer trained, and did not only catch up with."""
    return [each["round"] for each in peer.reports() if each["tokens"]]


def kill(peer: RealPeer) -> None:
    peer.strike()
    peer.ends(5.0)


def goes_on(peer: RealPeer, what: str, count: int = 2) -> None:
    before = len(rounds(peer))
    wait(f"{peer.name} trains on, {what}", lambda: len(rounds(peer)) >= before + count, 100)


def test_driver_leaves_in_good_order_while_a_stage_has_nobody(tmp_path: Path) -> None:
    """Also if it was evaluating the model through that stage."""
    with ChoosingSwarm(tmp_path, RUN) as swarm:
        founder = swarm.found("a")
        (other,) = swarm.join("b", via=founder)
        wait("a round", lambda: founder.reports(), 60)
        wait("a loss", lambda: any(each["held_out_loss"] for each in founder.reports()), 60)
        assert founder.reports()[0]["stages"] == 2
        other.strike()
        wait("it says what it waits for", lambda: "stage 1 has no live peer" in str(founder.status()["reason"]), 30)
        founder.strike(number=signal.SIGINT)
        assert founder.ends(LEAVE_SECONDS) == 0
        founder.leaves_nothing()


@pytest.mark.long
def test_peers_keep_their_stage_through_deaths_and_restarts(tmp_path: Path) -> None:
    with ChoosingSwarm(tmp_path, PACED) as swarm:
        founder = swarm.found("a")
        (other,) = swarm.join("b", via=founder)
        kill(other)  # before its first round: nobody else may be the first of stage 1 now
        other.start("--bootstrap", founder.address)
        goes_on(founder, "although the first peer of stage 1 died at once")
        founder.strike("worker")
        other.strike("worker")
        goes_on(founder, "with new workers")
        kill(founder)
        (third,) = swarm.join("c", via=other)  # which asks a peer that is not the founder
        assert third.status()["stage"] == 0, "the stage without live peers"
        founder.start()
        goes_on(founder, "after a restart from its directory")
        goes_on(third, "beside it", 1)
        assert [peer.status()["stage"] for peer in (founder, other, third)] == [0, 1, 0]
        kill(other)
        other.start("--bootstrap", founder.address, "--stage", "0")
        assert other.ends(30.0) == 2 and "holds stage 1 of this run, not 0: leave --stage out" in other.said()


THREE = "stages = 3\n" + paced(elements=20_000, inner_steps=3)
BEGINS_SECONDS = 90.0


@pytest.mark.long
@pytest.mark.parametrize("joining", (0, 2))
def test_run_begins_without_its_founder(tmp_path: Path, joining: int) -> None:
    """Killed while so many joiners ask for a stage. Restarted from its directory, it takes part in any stage."""
    with ChoosingSwarm(tmp_path, THREE) as swarm:
        founder = swarm.found("a")
        (first,) = swarm.join("b", via=founder)
        wait("b is in a stage", lambda: (first.directory / "stage").exists(), 60)
        at = ("--bootstrap", founder.address, "--bootstrap", first.address)
        others = [swarm.peer(name).start(*at) for name in "cd"[:joining]]
        if joining:
            wait("c asks", lambda: (others[0].directory / "manifest.bin").exists(), 60)
        kill(founder)
        others += [swarm.peer(name).start(*at) for name in "cd"[joining:]]
        for peer in (first, *others):
            wait(f"{peer.name} trains", lambda peer=peer: rounds(peer), BEGINS_SECONDS)  # type: ignore[misc]
        assert sorted(peer.status()["stage"] for peer in (first, *others)) == [0, 1, 2]
        founder.start("--bootstrap", first.address)
        goes_on(founder, "in the stage that it was given")


EXACT = "stages = 2\nactivations = 'fp32'\n" + RUN.partition("\n")[2].replace("10000", "3")


@pytest.mark.long
def test_last_loss_is_that_of_the_assembled_model(tmp_path: Path) -> None:
    """On the same samples; it is measured beside the rounds, and the peer waits for the last one."""
    with ChoosingSwarm(tmp_path, EXACT) as swarm:
        founder = swarm.found("a")
        peers = [founder, *swarm.join("b", via=founder)]
        assert [peer.ends(120.0) for peer in peers] == [0, 0]
    lines = [json.loads(line) for line in (founder.directory / "rounds.jsonl").read_text().splitlines()]
    trained, last = load_trained([peer.directory for peer in peers]), lines[-1]
    assert last["evaluated"] == 2 and trained.held_out_loss == last["held_out_loss"]
    gpt, recipe = trained.manifest.config.gpt, trained.manifest.config.recipe
    assert gpt
    sample = torch.frombuffer(bytearray((founder.directory / "held-out.bin").read_bytes()), dtype=torch.uint8)
    preset = Preset(gpt.shape, gpt.rows, recipe)
    task = GptStageTask(preset, Partition((), (0, 1)), 0, 0, Text(torch.zeros(100, dtype=torch.uint8), sample))
    whole = Gpt(gpt.shape)
    whole.load_state_dict(trained.tensors)
    taken = [index for index in spread_order() if index < task.samples][: last["samples"]]
    batches = [batch for index in taken if (batch := task.held_out(index))]
    with torch.no_grad():
        losses = [float(cross_entropy(whole(x).flatten(0, 1), y.flatten())) for x, y in batches]
    assert fmean(losses) == pytest.approx(last["held_out_loss"], abs=1e-4) and len(losses) >= 8
