"""Moshpit swarms over given states, and what their rounds came to."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial

import pytest
import torch

from protocols.base import Host, PeerId, Settings, Vector
from protocols.moshpit.averager import Moshpit
from protocols.moshpit.group_allreduce import GroupAllReduce
from tests.sim.averaging import AveragingSwarm, RoundResult, killing


def moshpit_swarm(
    count: int,
    most: int = 8,
    elements: int = 1001,
    announce_limit: int = 64,
    codec: str = "fp32",
    chunk_elements: int = 1 << 10,
    robust: str = "mean",
    dress: Callable[[Host], Host] = lambda host: host,
    **attributes: object,
) -> AveragingSwarm:
    """Peers whose states are a run's: near each other, and each with a momentum."""
    generator = torch.Generator().manual_seed(count)
    common = torch.randn(elements, generator=generator)
    states = [
        [common + 0.1 * torch.randn(elements, generator=generator), torch.randn(elements, generator=generator)]
        for _ in range(count)
    ]
    rng = random.Random(count)
    swarm = AveragingSwarm(
        partial(Moshpit, most=most, announce_limit=announce_limit),
        states,
        tokens=[rng.randrange(1000, 5000) for _ in range(count)],
        settings=Settings(codec, (), chunk_elements, robust=robust),
        dress=dress,
    )
    vars(swarm).update(attributes)
    return swarm


def mean_of(swarm: AveragingSwarm) -> torch.Tensor:
    """The mean of the present states by tokens, in float64."""
    whole = [torch.cat(state).double() for state in swarm.states]
    total = sum(tokens * state for tokens, state in zip(swarm.tokens, whole, strict=True))
    assert isinstance(total, torch.Tensor)
    return total / sum(swarm.tokens)


def distance(state: Sequence[Vector], mean: torch.Tensor) -> float:
    return float((torch.cat(list(state)).double() - mean).norm() / mean.norm())


def spread(swarm: AveragingSwarm) -> float:
    mean = mean_of(swarm)
    return max(distance(state, mean) for state in swarm.states)


def assert_groups_hold_same_bits(histories: dict[PeerId, list[RoundResult]]) -> None:
    held: dict[str, bytes] = {}
    for result in (result for history in histories.values() for result in history if result.group):
        bits = torch.cat(result.state).numpy().tobytes()
        assert held.setdefault(result.group, bits) == bits


def outcomes(history: Sequence[RoundResult]) -> list[str]:
    return [str(result.mean.outcome) for result in history]


def blames_of(histories: dict[PeerId, list[RoundResult]], peer: PeerId) -> list[str]:
    results = [result for other, history in histories.items() if other != peer for result in history]
    return [blame.why for result in results for blame in result.mean.blamed if blame.peer == peer]


def message_count(swarm: AveragingSwarm, victim: PeerId) -> int:
    swarm.average()
    return swarm.network.nodes[victim].messages


def both_ways(call: Callable[[PeerId, PeerId], None], peer: PeerId, others: Iterable[PeerId]) -> None:
    for other in others:
        call(peer, other)
        call(other, peer)


@cache
def part_from_another_member() -> tuple[int, PeerId, PeerId]:
    """A message of p01 at which its death lets one other peer hand p01's part to another: (number, giver, receiver)."""
    givers: list[PeerId] = []
    obtain = GroupAllReduce._fetch_part

    async def watched(data_phase: GroupAllReduce, part: int) -> bool:
        found = await obtain(data_phase, part)
        givers.extend({"p00", "p02"} - {data_phase._moshpit.me.peer} if found else ())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupAllReduce, "_fetch_part", watched)
        for number in range(45, message_count(moshpit_swarm(3, elements=60), "p01") + 1):
            swarm = moshpit_swarm(3, elements=60)
            swarm.before = killing("p01", number)
            swarm.average()
            if givers:
                return number, givers[0], "p02" if givers[0] == "p00" else "p00"
    pytest.fail("no part came from another member")
