"""A fixed list of members, for tests, benchmarks and processes that are no members."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from protocols.base import Deadline, Member


class StaticMembers:
    """`protocols.base.Members` that always count as live. Only a broken stream shows that a member has died."""

    version = 0

    def __init__(self, members: Iterable[Member]) -> None:
        self._members = tuple(sorted(members))

    def live(self) -> tuple[Member, ...]:
        return self._members

    async def changed(self, since: int, deadline: Deadline) -> int:
        await asyncio.sleep(max(0.0, deadline - asyncio.get_running_loop().time()))
        return self.version
