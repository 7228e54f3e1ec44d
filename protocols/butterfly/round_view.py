"""One round at one member, as those see it who lead it, average in it, fetch for it or watch over it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from protocols.aio import Notifier
from protocols.allreduce.all_reduce import AllReduce
from protocols.base import Deadline, Head
from protocols.butterfly.consensus_driver import ConsensusDriver
from protocols.butterfly.round_call import RoundCall


class RoundView(Protocol):
    """Attributes:
    exchange: the data phase, of the plan that was called last.
    notifier: rings for everything that happens to the round.
    deadline: the end of this attempt at it.
    """

    head: Head
    call: RoundCall
    decision: ConsensusDriver
    exchange: AllReduce | None
    notifier: Notifier
    deadline: Deadline

    def over(self) -> bool:
        """Whether it is decided, or superseded."""

    async def until(self, condition: Callable[[], bool], deadline: Deadline | None = None) -> bool:
        """Wait for a condition; False if the deadline, or the round's, comes first."""
