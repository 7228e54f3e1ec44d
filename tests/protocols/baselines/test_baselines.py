"""The baselines: the right mean and the same bits for all; a failed round ends in time, with blame and no leaks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from protocols.aio import task_group
from protocols.base import Host, Outcome, PeerId, Settings, Vector
from protocols.baselines.algorithms import ScatterReduce
from protocols.baselines.synchronous import SynchronousAverager, data_parallel, parameter_server, ring
from tests.sim.independent_harness import Came, IndependentHarness
from tests.sim.network import SimNetwork
from tests.support.at_message import killing

MAKERS: dict[str, Callable[[Host, Settings], SynchronousAverager]] = {
    "data_parallel": data_parallel,
    "ring": ring,
    "parameter_server": parameter_server,
}
everyone = pytest.mark.parametrize("name", MAKERS)


def swarm(name: str, count: int, elements: int = 1001, **options: Any) -> IndependentHarness:
    return IndependentHarness(count, MAKERS[name], elements, **options)


def results(played: IndependentHarness) -> list[Came]:
    """The results of the only round."""
    return [came for (came,) in played.came.values()]


def expected(played: IndependentHarness) -> list[torch.Tensor]:
    shares = torch.tensor(played.tokens, dtype=torch.float64) / sum(played.tokens)
    return [(shares[:, None] * torch.stack(each).double()).sum(0) for each in zip(*played.states, strict=True)]


def bits(all_came: list[Came]) -> set[bytes]:
    return {b"".join(each.numpy().tobytes() for each in came.state) for came in all_came}


@everyone
@pytest.mark.parametrize("count, elements", [(2, 1), (3, 7), (5, 1001), (8, 5000)])
def test_all_peers_get_the_same_weighted_mean(name: str, count: int, elements: int) -> None:
    played = swarm(name, count, elements).play()
    for came in results(played):
        assert (came.mean.outcome, came.round) == (Outcome.COMMITTED, 0)
        assert came.mean.peers == tuple(f"p{index:02}" for index in range(count))
        assert not came.mean.blamed
        for got, wanted in zip(came.state, expected(played), strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    assert len(bits(results(played))) == 1


@everyone
@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_lossy_gradient_codec_is_not_applied_to_states(name: str, codec: str) -> None:
    """Eight bits per element of a state would round each step of a thousandth away."""

    def lower(index: int, number: int, state: list[Vector]) -> None:
        state[0].sub_(1e-3)

    played = swarm(name, 3, codec=codec, rounds=5, step=lower)
    start = expected(played)[0]
    for rounds in played.play().came.values():
        torch.testing.assert_close(rounds[-1].state[0].double(), start - 5e-3, rtol=0, atol=1e-5)


@everyone
def test_lossy_codec_gives_identical_bits(name: str) -> None:
    played = swarm(name, 4, codec="fp16").play()
    assert {came.mean.outcome for came in results(played)} == {Outcome.COMMITTED}
    assert len(bits(results(played))) == 1
    wanted = expected(played)[0]
    assert (results(played)[0].state[0].double() - wanted).norm() / wanted.norm() < 0.03


@everyone
def test_uneven_peers_complete_every_round(name: str) -> None:
    """The fast peers wait, and no peer is left behind."""
    played = swarm(name, 3, 300, rounds=4, work_seconds=lambda index: 1.0 + index).play()
    for rounds in played.came.values():
        assert [came.round for came in rounds] == [0, 1, 2, 3]
        assert {came.mean.outcome for came in rounds} == {Outcome.COMMITTED}


@everyone
def test_peer_death_ends_round_with_blame(name: str) -> None:
    """Peers that have all parts already may commit; they all hold the same bits."""
    at, lived = 0, False
    while not lived:
        at += 2
        played = swarm(name, 4, 300).play(killing("p01", at))
        lived = 1 in played.came
        assert played.ended < 10.0
        assert len(bits([came for came in results(played) if came.mean.outcome is Outcome.COMMITTED])) <= 1
        blamed = [came.mean.blamed for came in results(played) if came.mean.outcome is Outcome.SKIPPED]
        assert all(blamed)
        assert not blamed or any(blame.peer == "p01" for each in blamed for blame in each)
    assert at > 10


@everyone
def test_silent_peer_is_blamed_at_the_deadline(name: str) -> None:
    def strike(network: SimNetwork) -> None:
        for other in ("p00", "p02"):
            network.link("p01", other).blocked = True  # without any notice to the peers

    played = swarm(name, 3).play(strike)
    for index in (0, 2):
        (came,) = played.came[index]
        assert came.mean.outcome is Outcome.SKIPPED
        assert "p01" in {blame.peer for blame in came.mean.blamed}
    assert 59.0 < played.ended < 62.0


@everyone
@pytest.mark.parametrize("behind", (54, 1))
def test_lagging_peer_joins_the_others_round(name: str, behind: int) -> None:
    starts = {0: 57, 1: 57, 2: 57 - behind}
    played = swarm(name, 3, 300, starts=starts, rounds=3, work_seconds=lambda index: 1.0).play()
    assert played.came[2][0].mean.outcome is Outcome.SKIPPED
    assert any(re.search("left that round|already|later round", blame.why) for blame in played.came[2][0].mean.blamed)
    assert [came.mean.outcome for came in played.came[2]][1:] == [Outcome.COMMITTED] * 2
    for index in (0, 1):
        assert [came.mean.outcome for came in played.came[index]][:2] == [Outcome.COMMITTED] * 2
    assert {rounds[-1].round for rounds in played.came.values()} <= {58, 59}


def test_bytes_sent_match_the_literature() -> None:
    """All-reduce and ring: 2 (N - 1) / N of the state per peer; a server: (N - 1) states in, and as many out."""
    size, count = 4 * 2 * 20_000, 5
    sent = {}
    for name in MAKERS:
        played = swarm(name, count, 20_000, chunk_elements=4096).play()
        sent[name] = [played.network.nodes[f"p{index:02}"].sent_bytes / size for index in range(count)]
    assert sent["data_parallel"] == pytest.approx([2 * (count - 1) / count] * count, rel=0.05)
    assert sent["ring"] == pytest.approx([2 * (count - 1) / count] * count, rel=0.05)
    assert sent["parameter_server"] == pytest.approx([count - 1.0] + [1.0] * (count - 1), rel=0.05)


@everyone
def test_peers_with_different_views_do_not_mix(name: str) -> None:
    played = swarm(name, 3, deadline_seconds=10.0).play(lambda network: network.contacts.views["p00"].lose("p02"))
    assert len(results(played)) == 3
    assert {came.mean.outcome for came in results(played)} == {Outcome.SKIPPED}
    assert all(came.mean.blamed for came in results(played))


@pytest.mark.parametrize("name", ["data_parallel", "parameter_server"])
def test_sender_of_duplicate_part_is_blamed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    once = ScatterReduce._contribute

    async def twice(self: ScatterReduce, part: int, peer: PeerId) -> None:
        async with task_group() as group:
            for _ in range(1 + (self._current_round.host.me == "p02")):
                group.create_task(once(self, part, peer))

    monkeypatch.setattr(ScatterReduce, "_contribute", twice)
    came = results(swarm(name, 3).play())
    assert {each.mean.outcome for each in came} == {Outcome.SKIPPED}
    assert "p02" in {blame.peer for blame in came[0].mean.blamed}


@everyone
def test_stream_of_non_member_is_rejected(name: str) -> None:
    """Even if it names the same members: it may have come a moment later."""
    averager = swarm(name, 2).play().averagers[0]
    assert isinstance(averager, SynchronousAverager)
    assert (session := averager._session) and (current_round := session.current_round)
    assert session.why_refused("p01", current_round.hello(0)) == ""
    assert "no member" in session.why_refused("p09", current_round.hello(0))
