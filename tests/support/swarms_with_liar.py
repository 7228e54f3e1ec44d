"""Small swarms with one liar, for messages that no honest code sends: what the honest peers end with, and blame."""

from __future__ import annotations

import asyncio
import functools
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeAlias

import msgpack
import torch

from protocols import wire
from protocols.base import AveragingResult, Buffer, Header, Member, PeerId, RoundKey
from protocols.consensus.record import coordinators
from protocols.history.chain import genesis
from protocols.moshpit.grid import seeded_order
from protocols.moshpit.peer_tracker import group_key
from protocols.pairwise.gossip import Gossip
from protocols.pairwise.push_sum import PushSum
from protocols.streams.framing import FramedStream
from tests.sim import loop as simloop
from tests.sim.averaging import RUN, ButterflyHarness, flat, head
from tests.sim.network import SimNetwork
from tests.sim.pipe import SimPipe
from tests.support.disguises import Disguise, SpoofedStream
from tests.support.example_vectors import equal_norm_vectors
from tests.support.fake_rounds import RUN as SYNC_RUN
from tests.support.membership_swarm import RUN as MEMBERSHIP_RUN
from tests.support.membership_swarm import MembershipSwarm
from tests.support.moshpit import moshpit_swarm
from tests.support.pairwise import PairwiseSwarm
from tests.support.sync_cluster import SyncCluster
from tests.support.wire_examples import replaced, value_at

Before = Callable[[SimNetwork], None]
"""Called in the running world, before the liar says anything."""


@dataclass
class PlayResult:
    states: list[torch.Tensor]
    outcomes: set[str]
    seconds: float
    blames: dict[PeerId, list[str]]


@dataclass(frozen=True)
class SwarmWithLiar:
    play: Callable[[Before], PlayResult]
    liar: PeerId
    victim: PeerId
    key: RoundKey


def _blames(means: Iterable[AveragingResult]) -> dict[PeerId, list[str]]:
    found: dict[PeerId, list[str]] = {}
    for blame in (blame for mean in means for blame in mean.blamed):
        found.setdefault(blame.peer, []).append(blame.why)
    return found


def _butterfly() -> SwarmWithLiar:
    names = ("p00", "p01", "p02")
    key = genesis(RUN, "run", tuple(map(Member, names)), bytes(32)).key
    liar = coordinators(key.lineage, list(map(Member, names)))[0]

    def play(before: Before) -> PlayResult:
        averaged = ButterflyHarness(
            equal_norm_vectors(3, 64, seed=5), [1000] * 3, [1e7] * 3, chunk_elements=16, before=before
        ).average()
        honest = [index for index, peer in enumerate(names) if peer != liar]
        means = [averaged.means[index] for index in honest]
        states = [averaged.results[index] for index in honest]
        return PlayResult(states, {str(mean.outcome) for mean in means}, averaged.seconds, _blames(means))

    return SwarmWithLiar(play, liar, next(name for name in names if name != liar), key)


def _moshpit() -> SwarmWithLiar:
    key = group_key(RUN, "run", 0, (8,), 0, (0,))
    liar, victim, _ = seeded_order(key.lineage, ["p00", "p01", "p02"])

    def play(before: Before) -> PlayResult:
        swarm = moshpit_swarm(3, elements=64, chunk_elements=8)
        swarm.before = before
        results = [history[0] for peer, history in swarm.average().items() if peer != liar]
        return PlayResult(
            [torch.cat(each.state) for each in results],
            {str(each.mean.outcome) for each in results},
            max(each.seconds for each in results),
            _blames(each.mean for each in results),
        )

    return SwarmWithLiar(play, liar, victim, key)


def _pairwise(protocol: Any) -> SwarmWithLiar:
    def play(before: Before) -> PlayResult:
        whole = PlayResult([], set(), 0.0, {})
        for late in (0, 1):  # it trains for longer, so that the other one asks
            swarm = PairwiseSwarm(2, protocol=protocol)

            async def main(swarm: PairwiseSwarm = swarm, late: int = late) -> None:
                before(swarm.network)
                await asyncio.wait(
                    [swarm.start(index, swarm.round(index, 0, 1.0 + 20 * (index == late))) for index in range(2)]
                )

            swarm.run(main)
            (result,) = swarm.results[0]
            whole.states.append(flat(swarm.states[0]) if swarm.moved(0) else swarm.first[0])
            whole.outcomes.add(str(result.mean.outcome))
            whole.seconds = max(whole.seconds, result.ended - result.asked)
            for peer, whys in _blames([result.mean]).items():
                whole.blames.setdefault(peer, []).extend(whys)
        return whole

    return SwarmWithLiar(play, "p1", "p0", head(0).key)


def _sync() -> SwarmWithLiar:
    """Cleo is eleven rounds behind, and asks anna and then bert."""
    key = genesis(SYNC_RUN, "run", (Member("anna"),), bytes(32)).key

    def play(before: Before) -> PlayResult:
        world = SyncCluster(("anna", "bert", "cleo"), keep_rounds=4)

        async def main() -> PlayResult:
            await world.rounds("anna bert", 11)
            before(world.network)
            began, cleo = asyncio.get_running_loop().time(), world.peers["cleo"]
            report = await cleo.catch_up()
            assert world.same("bert cleo"), report.blamed
            blames = {peer: [why] for peer, why in report.blamed.items()}
            seconds = asyncio.get_running_loop().time() - began
            return PlayResult([cleo.outer_loop.anchor], {report.outcome}, seconds, blames)

        return world.play(main)

    return SwarmWithLiar(play, "anna", "cleo", key)


def _membership() -> SwarmWithLiar:
    """Three honest peers, and a fourth that greets them and is greeted."""

    def play(before: Before) -> PlayResult:
        swarm, blames = MembershipSwarm(), dict[PeerId, list[str]]()

        async def main() -> PlayResult:
            await swarm.meet("abc")
            for name in "abc":
                swarm.members[name]._refuse = lambda peer, why: blames.setdefault(peer, []).append(why)  # type: ignore[method-assign]
            swarm.start("x")
            before(swarm.network)
            await asyncio.sleep(12.0)
            assert swarm.settled(), swarm.network.bugs
            for name in "abc":
                for peer, why in swarm.network.transports[name].refused:
                    blames.setdefault(peer, []).append(why)
            return PlayResult([], {"met"} if "x" in swarm.sees("a") else {"removed"}, 12.0, blames)

        return simloop.run(main())

    return SwarmWithLiar(play, "x", "a", RoundKey(MEMBERSHIP_RUN, "run", bytes(32), 0))


SWARMS = {
    "butterfly": _butterfly(),
    "moshpit": _moshpit(),
    "gossip": _pairwise(Gossip),
    "push_sum": _pairwise(PushSum),
    "sync": _sync(),
    "membership": _membership(),
}


FOREIGN = b"\xee" * 32
"""A digest of no run, round or state."""
Change: TypeAlias = Mapping[str, Any] | Callable[[Any], Header | bytes]
"""Fields, by dotted names as `offers.0.tokens`, with the packed value of each or a function of the honest one; or what
the liar sends in the place of the whole header."""


def more(honest: int) -> int:
    return honest + 1


@functools.cache
def path_of(kind: Any, field: str) -> tuple[int, ...]:
    path, hint = [], kind
    for name in field.split("."):
        if is_dataclass(hint):
            names = [each for each, _ in wire._specs(typing.cast("type", hint))]
            path.append(names.index(name) + 2 * (hint is kind))
            hint = typing.get_type_hints(hint)[name]
        else:
            path.append(int(name))
            hint = typing.get_args(hint)[0]
    return tuple(path)


def forged(header: Header, change: Change) -> bytes:
    if callable(change):
        false = change(header)
        return false if isinstance(false, bytes) else wire.encode(false)
    values, kind = msgpack.unpackb(wire.encode(header)), typing.cast(type, type(header))
    for field, value in change.items():
        path = path_of(kind, field)
        values = replaced(values, path, value(value_at(values, path)) if callable(value) else value)
    return bytes(msgpack.packb(values))


def forging(kind: type[Any], change: Change) -> Disguise:
    def disguise(method: str, stream: FramedStream, pipe: SimPipe) -> SpoofedStream:
        async def send(stream: FramedStream, header: Header, payload: Buffer) -> None:
            if not isinstance(header, kind):
                return await stream.send(header, payload)
            packed = forged(header, change)
            await pipe.write(len(packed).to_bytes(4, "big") + packed + bytes(payload))

        return SpoofedStream(stream, send)

    return disguise
