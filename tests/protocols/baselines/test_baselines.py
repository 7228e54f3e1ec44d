"""The baselines: the right mean and the same bits for all; a failed round ends in time, with blame and no leaks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from protocols.aio import task_group
from protocols.base import Host, Outcome, PeerId, Settings, Vector
from protocols.baselines.algorithms import ScatterReduce, data_parallel, parameter_server, ring
from protocols.baselines.synchronous import SynchronousAverager
from tests.sim.averaging import FP32, AveragingSwarm, RoundResult, flat, killing, random_swarm
from tests.sim.network import SimNetwork

MAKERS: dict[str, Callable[[Host, Settings], SynchronousAverager]] = {
    "data_parallel": data_parallel,
    "ring": ring,
    "parameter_server": parameter_server,
}
everyone = pytest.mark.parametrize("name", MAKERS)


def played(name: str, count: int, elements: int = 1001, rounds: int = 1, **options: Any) -> AveragingSwarm:
    swarm = random_swarm(MAKERS[name], count, elements, **options)
    swarm.average(rounds)
    return swarm


def results(swarm: AveragingSwarm) -> list[RoundResult]:
    """The results of the only round."""
    return [result for (result,) in filter(None, swarm.results)]


def expected(swarm: AveragingSwarm) -> list[torch.Tensor]:
    shares = torch.tensor(swarm.tokens, dtype=torch.float64) / sum(swarm.tokens)
    return [*(shares[:, None] * torch.stack(swarm.first)).sum(0).chunk(2)]


def bits(found: list[RoundResult]) -> set[bytes]:
    return {flat(each.state).numpy().tobytes() for each in found}


@everyone
@pytest.mark.parametrize("count, elements", [(2, 1), (3, 7), (5, 1001), (8, 5000)])
def test_all_peers_get_the_same_weighted_mean(name: str, count: int, elements: int) -> None:
    swarm = played(name, count, elements)
    for came in results(swarm):
        assert (came.mean.outcome, came.round) == (Outcome.COMMITTED, 0)
        assert came.mean.peers == tuple(f"p{index:02}" for index in range(count))
        assert not came.mean.blamed
        for got, wanted in zip(came.state, expected(swarm), strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    assert len(bits(results(swarm))) == 1


@everyone
@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_lossy_gradient_codec_is_not_applied_to_states(name: str, codec: str) -> None:
    """Eight bits per element of a state would round each step of a thousandth away."""

    def lower(index: int, number: int, state: list[Vector]) -> None:
        state[0].sub_(1e-3)

    swarm = played(name, 3, rounds=5, step=lower, settings=replace(FP32, codec=codec))
    start = expected(swarm)[0]
    for rounds in swarm.results:
        torch.testing.assert_close(rounds[-1].state[0].double(), start - 5e-3, rtol=0, atol=1e-5)


@everyone
def test_lossy_codec_gives_identical_bits(name: str) -> None:
    swarm = played(name, 4, settings=replace(FP32, codec="fp16"))
    assert {came.mean.outcome for came in results(swarm)} == {Outcome.COMMITTED}
    assert len(bits(results(swarm))) == 1
    wanted = expected(swarm)[0]
    assert (results(swarm)[0].state[0].double() - wanted).norm() / wanted.norm() < 0.03


@everyone
def test_uneven_peers_complete_every_round(name: str) -> None:
    """The fast peers wait, and no peer is left behind."""
    swarm = played(name, 3, 300, rounds=4, train_seconds=(1.0, 2.0, 3.0))
    for rounds in swarm.results:
        assert [came.round for came in rounds] == [0, 1, 2, 3]
        assert {came.mean.outcome for came in rounds} == {Outcome.COMMITTED}


@everyone
def test_peer_death_ends_round_with_blame(name: str) -> None:
    """Peers that have all parts already may commit; they all hold the same bits."""
    at, lived = 0, False
    while not lived:
        at += 2
        swarm = played(name, 4, 300, before=killing("p01", at))
        lived = bool(swarm.results[1])
        assert swarm.ended < 10.0
        assert len(bits([came for came in results(swarm) if came.mean.outcome is Outcome.COMMITTED])) <= 1
        blamed = [came.mean.blamed for came in results(swarm) if came.mean.outcome is Outcome.SKIPPED]
        assert all(blamed)
        assert not blamed or any(blame.peer == "p01" for each in blamed for blame in each)
    assert at > 10


@everyone
def test_silent_peer_is_blamed_at_the_deadline(name: str) -> None:
    def strike(network: SimNetwork) -> None:
        for other in ("p00", "p02"):
            network.link("p01", other).blocked = True  # without any notice to the peers

    swarm = played(name, 3, before=strike)
    for index in (0, 2):
        (came,) = swarm.results[index]
        assert came.mean.outcome is Outcome.SKIPPED
        assert "p01" in {blame.peer for blame in came.mean.blamed}
    assert 59.0 < swarm.ended < 62.0


@everyone
@pytest.mark.parametrize("behind", (54, 1))
def test_lagging_peer_joins_the_others_round(name: str, behind: int) -> None:
    swarm = played(name, 3, 300, starts=(57, 57, 57 - behind), rounds=60, train_seconds=[1.0] * 3)
    assert swarm.results[2][0].mean.outcome is Outcome.SKIPPED
    assert any(re.search("left that round|already|later round", blame.why) for blame in swarm.results[2][0].mean.blamed)
    assert {came.mean.outcome for came in swarm.results[2][1:]} == {Outcome.COMMITTED}
    for index in (0, 1):
        assert [came.mean.outcome for came in swarm.results[index]][:2] == [Outcome.COMMITTED] * 2
    assert {rounds[-1].round for rounds in swarm.results} == {59}


def test_bytes_sent_match_the_literature() -> None:
    """All-reduce and ring: 2 (N - 1) / N of the state per peer; a server: (N - 1) states in, and as many out."""
    size, count = 4 * 2 * 20_000, 5
    sent = {}
    for name in MAKERS:
        swarm = played(name, count, 20_000, settings=replace(FP32, chunk_elements=4096))
        sent[name] = [swarm.network.nodes[f"p{index:02}"].sent_bytes / size for index in range(count)]
    assert sent["data_parallel"] == pytest.approx([2 * (count - 1) / count] * count, rel=0.05)
    assert sent["ring"] == pytest.approx([2 * (count - 1) / count] * count, rel=0.05)
    assert sent["parameter_server"] == pytest.approx([count - 1.0] + [1.0] * (count - 1), rel=0.05)


@everyone
def test_peers_with_different_views_do_not_mix(name: str) -> None:
    swarm = played(name, 3, round_seconds=10.0, before=lambda network: network.contacts.views["p00"].lose("p02"))
    assert len(results(swarm)) == 3
    assert {came.mean.outcome for came in results(swarm)} == {Outcome.SKIPPED}
    assert all(came.mean.blamed for came in results(swarm))


@pytest.mark.parametrize("name", ["data_parallel", "parameter_server"])
def test_sender_of_duplicate_part_is_blamed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    once = ScatterReduce._contribute

    async def twice(self: ScatterReduce, part: int, peer: PeerId) -> None:
        async with task_group() as group:
            for _ in range(1 + (self._current_round.host.me == "p02")):
                group.create_task(once(self, part, peer))

    monkeypatch.setattr(ScatterReduce, "_contribute", twice)
    came = results(played(name, 3))
    assert {each.mean.outcome for each in came} == {Outcome.SKIPPED}
    assert "p02" in {blame.peer for blame in came[0].mean.blamed}


@everyone
def test_stream_of_non_member_is_rejected(name: str) -> None:
    """Even if it names the same members: it may have come a moment later."""
    averager = played(name, 2).averagers["p00"]
    assert isinstance(averager, SynchronousAverager)
    assert (current_round := averager._session)
    assert current_round.why_refused("p01", current_round.hello(0)) == ""
    assert "no member" in current_round.why_refused("p09", current_round.hello(0))
