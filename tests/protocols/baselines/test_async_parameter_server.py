"""A parameter server without a barrier: no peer waits, each update counts once, and no newcomer takes over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from protocols.base import Outcome, Vector
from protocols.baselines.async_parameter_server import AsyncParameterServer, DelayedNesterov
from tests.sim.averaging import AveragingSwarm, RoundResult, at_message, killing, random_swarm

ELEMENTS = 700


def lower(index: int, number: int, state: list[Vector]) -> None:
    """The work of each round lowers the peer's own element by one."""
    state[0][index] -= 1.0


def with_equal_states(
    count: int, make: Callable[..., AsyncParameterServer] = AsyncParameterServer, **options: Any
) -> AveragingSwarm:
    """Peers that start from the same state."""
    swarm = random_swarm(make, count, ELEMENTS, step=lower, **options)
    swarm.states = [[each.clone() for each in swarm.states[0]] for _ in range(count)]
    return swarm


def lowered(swarm: AveragingSwarm, result: RoundResult, start: Vector) -> list[float]:
    """How much lower each peer's element is than at the start, in units of 1/N."""
    return [round(float(start[index] - result.state[0][index]) * swarm.count, 3) for index in range(swarm.count)]


def test_every_update_counts_once_without_waiting() -> None:
    swarm = with_equal_states(3, train_seconds=(1.0, 2.0, 10.0))
    start = swarm.states[0][0].clone()
    swarm.average(6)
    assert {came.mean.outcome for rounds in swarm.results for came in rounds} == {Outcome.COMMITTED}
    assert lowered(swarm, swarm.results[2][-1], start) == [6.0, 6.0, 6.0]
    assert lowered(swarm, swarm.results[0][-1], start)[0] == 6.0  # long before the slow peer was done
    assert swarm.ended < 75.0
    assert all(came.half_exchanges == 0 for rounds in swarm.results for came in rounds)


def test_momentum_stays_with_its_peer() -> None:
    swarm = with_equal_states(2)
    swarm.states[1][1].fill_(7.0)
    swarm.average()
    assert float(swarm.results[1][0].state[1].min()) == 7.0


def test_death_at_any_message_counts_nothing_twice() -> None:
    """A worker dies; the other workers continue with the server at once."""
    at, lived = 0, False
    while not lived:
        at += 1
        swarm = with_equal_states(3, train_seconds=(1.0, 1.3, 1.6))
        start = swarm.states[0][0].clone()
        swarm.before = killing("p02", at)
        swarm.average(3)
        lived = len(swarm.results[2]) == 3
        assert [came.mean.outcome for came in swarm.results[1]] == [Outcome.COMMITTED] * 3
        # each of three peers' rounds counts a third, or half where two were left
        assert lowered(swarm, swarm.results[1][-1], start)[2] <= 3.0
        assert swarm.ended < 20.0
    assert at > 10


@pytest.mark.parametrize("at", (1, 7, 9, 11, 12, 13, 14, 20, 25, 30))
def test_lost_server_is_replaced(at: int) -> None:
    swarm = with_equal_states(3, train_seconds=(1.0,) * 3)
    swarm.before = killing("p00", at)
    swarm.average(6)
    for index in (1, 2):
        outcomes = [came.mean.outcome for came in swarm.results[index]]
        assert outcomes[-2:] == [Outcome.COMMITTED] * 2
        assert outcomes.count(Outcome.SKIPPED) <= 2
        for came in swarm.results[index]:
            assert came.mean.outcome is Outcome.COMMITTED or [blame.peer for blame in came.mean.blamed] == ["p00"]
    spread = swarm.results[1][-1].state[0] - swarm.results[2][-1].state[0]
    assert float(spread.abs().max()) <= 1.0


def test_newcomer_with_first_id_does_not_take_over() -> None:
    swarm = with_equal_states(3, train_seconds=(1.0,) * 3, joins={0: 3.5})
    start = swarm.states[1][0].clone()
    swarm.states[0][0].fill_(1000.0)
    swarm.average(8)
    assert float((swarm.results[0][0].state[0] - start).abs().max()) < 900.0
    for index in (1, 2):
        assert {came.mean.outcome for came in swarm.results[index]} == {Outcome.COMMITTED}
        assert float((swarm.results[index][-1].state[0] - start).abs().max()) < 10.0


def test_silence_at_any_message_costs_one_round() -> None:
    """If the server may have counted the worker's update, that is a half exchange."""
    halves = 0
    for at in range(1, 20):
        swarm = with_equal_states(2, round_seconds=20.0)
        swarm.before = at_message("p00", at, lambda network: network.block("p00", "p01"))
        swarm.average()
        (came,) = swarm.results[1]
        if came.mean.outcome is Outcome.SKIPPED:
            assert [blame.peer for blame in came.mean.blamed] == ["p00"]
            halves += came.half_exchanges
    assert halves > 2


def test_server_naming_no_server_is_not_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the worker would continue from its own update, which is next to nothing."""
    real = AsyncParameterServer.choose
    monkeypatch.setattr(AsyncParameterServer, "choose", lambda self: "" if self.me.peer == "p00" else real(self))
    swarm = with_equal_states(2)
    start = swarm.states[1][0].clone()
    swarm.average()
    (came,) = swarm.results[1]
    assert came.mean.outcome is Outcome.SKIPPED and [blame.peer for blame in came.mean.blamed] == ["p00"]
    assert float((came.state[0] - start).abs().max()) <= 1.0


# -- arrivals ---------------------------------------------------------------------------------------------------------


def courses(momentum: float, order: Callable[[int], Vector], rounds: int) -> Vector:
    arrivals = DelayedNesterov(torch.zeros(4), momentum)
    for number in range(rounds):
        arrivals.apply(order(number).clone(), 4)
    return arrivals.parameters


def test_delayed_nesterov_matches_nesterov_from_common_point() -> None:
    """By hand, for one gradient each: after N arrivals θ moves by Δ + βm, m = βm + Δ, as PyTorch's SGD(nesterov)."""
    momentum, theta, velocity = 0.9, torch.zeros(4), torch.zeros(4)
    for number in range(3):
        delta = torch.full((4,), float(number + 1))
        velocity = momentum * velocity + delta
        theta = theta - (delta + momentum * velocity)
    found = courses(momentum, lambda number: torch.full((4,), float(number // 4 + 1)), 12)
    torch.testing.assert_close(found, theta)


def test_server_momentum_applies_over_the_network() -> None:
    swarm = with_equal_states(2, partial(AsyncParameterServer, momentum=0.5))
    start = swarm.states[0][0].clone()
    swarm.average(4)
    assert float(start[0] - min(came.state[0][0] for came in swarm.results[0])) > 2.0
