"""What all rounds of one averager work with, and what the parts of one round see of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from protocols.base import Deadline, Head, Host, Member, Settings
from protocols.calling import Call
from protocols.codec import Codec
from protocols.deciding import Decision
from protocols.exchange import Exchange
from protocols.post import Ledger, Post
from protocols.shelf import Shelf
from protocols.tasks import Bell


@dataclass(frozen=True, slots=True)
class Desk:
    """What stays from round to round."""

    host: Host
    settings: Settings
    codec: Codec
    me: Member
    ledger: Ledger
    post: Post
    shelf: Shelf


class Seat(Protocol):
    """One round at one member, as those see it who lead it, fetch for it or watch over it.

    Attributes:
        exchange: the data phase, of the plan that was called last.
        bell: rings for everything that happens to the round.
        deadline: the end of this attempt at it.
    """

    head: Head
    call: Call
    decision: Decision
    exchange: Exchange | None
    bell: Bell
    deadline: Deadline

    def over(self) -> bool:
        """Whether it is decided, or superseded."""

    async def until(self, condition: Callable[[], bool], deadline: Deadline | None = None) -> bool:
        """Wait for a condition; False if the deadline, or the round's, comes first."""
