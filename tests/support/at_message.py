"""Faults that strike when a peer sends or receives its message of a given number."""

from __future__ import annotations

from collections.abc import Callable

from protocols.base import PeerId
from tests.sim.network import SimNetwork


def at_message(peer: PeerId, number: int, fault: Callable[[SimNetwork], None]) -> Callable[[SimNetwork], None]:
    """Set up a network so that the fault strikes at this message of the peer, counted from 1."""

    def set_up(network: SimNetwork) -> None:
        def watch(mover: PeerId, message: int, way: str, other: PeerId) -> None:
            if (mover, message) == (peer, number):
                fault(network)

        network.watch = watch

    return set_up


def killing(peer: PeerId, number: int) -> Callable[[SimNetwork], None]:
    return at_message(peer, number, lambda network: network.kill(peer))
