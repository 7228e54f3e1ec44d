"""The state of one attempt at a round, which its session shares with the session's helpers."""

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
        call: the offers, and the latest plan.
        driver: decides the round, and outlives the attempt.
        state: what this member knows about the round; belongs to the driver.
        exchange: the data phase of the latest plan; None before the first.
        changed: notified of every event of the round.
        deadline: the end of the attempt.
    """

    def __init__(
        self, context: ButterflyContext, head: Head, driver: ConsensusDriver, bandwidth: float, deadline: Deadline
    ) -> None:
        self.context, self.head, self.driver, self.deadline = context, head, driver, deadline
        self.state = driver.state
        self.call = RoundCall(context, head, bandwidth, deadline, driver.state.resting)
        self.call.led_by(driver.tally.coordinator(driver.vote.promised))  # an earlier attempt may have moved on
        self.changed = self.call.changed
        self.exchange: AllReduce | None = None
        self._superseded = False
        driver.begin_attempt(head, self.changed)

    def over(self) -> bool:
        """Whether the round is decided, or a better branch replaces it."""
        return self._superseded or self.driver.certificate is not None

    def supersede(self) -> None:
        """End the attempt, because a better branch is known."""
        self._superseded = True
        self.changed.notify()

    def exchange_of(self, plan: bytes) -> AllReduce | None:
        """This member's data phase, if it belongs to the plan with this digest; else None."""
        exchange = self.exchange
        return exchange if exchange and exchange.task.resolved.digest == plan else None

    async def until(self, condition: Callable[[], bool], deadline: Deadline | None = None) -> bool:
        """Wait for a condition; False if the deadline comes first. The default is the deadline of the attempt."""
        return await self.changed.reached(condition, self.deadline if deadline is None else deadline)
