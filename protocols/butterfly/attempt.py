"""What the parts of an attempt at a round share: what it is about, how far it has come, and its events."""

from __future__ import annotations

from collections.abc import Callable

from protocols.aio import Notifier, loop_time
from protocols.allreduce.all_reduce import AllReduce
from protocols.base import Deadline, Head, PeerId
from protocols.butterfly.vote import RoundVote
from protocols.streams.endpoint import ControlChannel, ProtocolEndpoint


class Attempt:
    def __init__(
        self, endpoint: ProtocolEndpoint, post: ControlChannel, head: Head, vote: RoundVote, deadline: Deadline
    ) -> None:
        """`vote` outlives the attempt."""
        self.host, self.me, self.accounting = endpoint.host, endpoint.me, endpoint.accounting
        self.settings, self.post = endpoint.settings, post
        self.head, self.vote, self.deadline = head, vote, deadline
        self.elements = endpoint.settings.elements[head.key.fragment]
        self.changed = Notifier()  # notified of every event of the attempt
        self.exchange: AllReduce | None = None  # the data phase of the latest plan
        self.superseded = False

    def over(self) -> bool:
        return self.superseded or self.vote.certificate is not None

    def exchange_of(self, plan: bytes) -> AllReduce | None:
        """The data phase of the plan with this digest, if that is the latest one."""
        exchange = self.exchange
        return exchange if exchange and exchange.task.resolved.digest == plan else None

    async def until(self, condition: Callable[[], bool], deadline: Deadline | None = None) -> bool:
        """Wait for a condition; False if the deadline comes first, by default that of the attempt."""
        return await self.changed.reached(condition, self.deadline if deadline is None else deadline)

    def within(self, seconds: float) -> Deadline:
        return min(self.deadline, loop_time() + seconds)

    def live_peers(self) -> set[PeerId]:
        return {member.peer for member in self.host.members.live()}
