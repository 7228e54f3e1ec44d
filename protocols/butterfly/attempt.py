"""One attempt at a round: what its session shares with the session's helpers."""

from __future__ import annotations

from collections.abc import Callable

from protocols.allreduce.all_reduce import AllReduce
from protocols.base import Deadline, Head
from protocols.butterfly.consensus_driver import ConsensusDriver
from protocols.butterfly.context import ButterflyContext
from protocols.butterfly.round_call import RoundCall


class RoundAttempt:
    """One attempt at a round.

    Attributes:
        call: the offers, and the plan that was called last.
        driver: decides the round, and outlives the attempt.
        state: what this member knows of the round; the driver's.
        exchange: the data phase of the plan that was called last; None before the first.
        changed: rings at every event of the round.
        deadline: the end of the attempt.
    """

    def __init__(
        self, context: ButterflyContext, head: Head, driver: ConsensusDriver, bandwidth: float, deadline: Deadline
    ) -> None:
        self.context, self.head, self.driver, self.deadline = context, head, driver, deadline
        self.state = driver.state
        self.call = RoundCall(context, head, bandwidth, deadline)
        self.changed = self.call.changed
        self.exchange: AllReduce | None = None
        self._superseded = False
        driver.begin_attempt(head, self.changed)

    def over(self) -> bool:
        """Whether the round is decided, or a better branch replaces it."""
        return self._superseded or self.driver.certificate is not None

    def supersede(self) -> None:
        """A better branch is known: the attempt ends."""
        self._superseded = True
        self.changed.notify()

    def data_phase_begun(self, exchange: AllReduce) -> None:
        """The data phase of another plan begins."""
        self.exchange = exchange

    def exchange_of(self, plan: bytes) -> AllReduce | None:
        """This member's data phase, if it is of the plan with this digest."""
        exchange = self.exchange
        return exchange if exchange and exchange.task.resolved.digest == plan else None

    async def until(self, condition: Callable[[], bool], deadline: Deadline | None = None) -> bool:
        """Wait for a condition; False if the deadline comes first, which is the attempt's unless one is given."""
        return await self.changed.reached(condition, self.deadline if deadline is None else deadline)
