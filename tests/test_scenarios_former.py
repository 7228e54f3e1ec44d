"""Members leave one after the other, the last of them for good: those who left before it go on among themselves."""

from __future__ import annotations

import asyncio

import pytest

from protocols.base import PeerId
from protocols.history.chain import Link
from protocols.vote.record import Kind
from tests.sim.durable import Durable
from tests.sim.parting import LongRounds, Parting

PACE_SECONDS = 0.3
AGAIN_SECONDS = 45.0
"""From the start of the former members to a roster of all of them: patience, a vote, and the next round."""


class Leaving(Durable, Parting):
    """Peers that write a checkpoint when they leave, and may come back."""

    async def leave_in_turn(self, peers: list[PeerId], pause_seconds: float = 0.0) -> None:
        for peer in peers:
            self.leave(peer)
            await self.gone(peer, seconds=60.0)
            await asyncio.sleep(pause_seconds)

    def forks(self, peer: PeerId) -> list[Link]:
        chain = self.chain(peer)
        return [link for link in chain.since(chain.locator()[-1]) if link.record.kind == Kind.FORK]


@pytest.mark.parametrize("pause_seconds", (0.0, 12.0))
@pytest.mark.parametrize("peers", (3, 4, 5, 6))
def test_all_but_the_last_to_leave_go_on(peers: int, pause_seconds: float) -> None:
    """By one FORK of a majority of a roster that several were in; the last one follows it when it is back."""
    stage = Leaving(LongRounds(peers, pace_seconds=PACE_SECONDS))

    async def story() -> None:
        await stage.rounds(2)
        *early, last = stage.peers
        await stage.leave_in_turn([*early, last], pause_seconds)
        for peer in early:
            stage.revive(peer)
        await asyncio.sleep(0.0)
        await stage.until(stage.whole, AGAIN_SECONDS, "a roster of all but the last")
        (fork,) = stage.forks(early[0])
        assert len(fork.record.roster) >= 2
        await stage.rounds(2)
        stage.revive(last)
        await asyncio.sleep(0.0)
        await stage.until(stage.whole, AGAIN_SECONDS, "a roster of all")
        assert {link.lineage for peer in stage.peers for link in stage.forks(peer)} == {fork.lineage}

    stage.play(story)
