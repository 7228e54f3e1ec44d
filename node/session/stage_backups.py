"""The backups that a peer keeps of other stages, so that a stage whose peers and disks are lost can continue.

A backup is what a peer that moves to the stage downloads (`node.joining.stage_entrance`): its chain and an outer state,
in `stages/<k>/`. Which peers have one follows from who is live (`protocols.pipeline.backups`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

from node.storage.statedir import StateError
from protocols.aio import loop_time
from protocols.base import PeerId
from protocols.sync.snapshot_download import StateUnavailable

if TYPE_CHECKING:  # only runs with stages load its code
    from protocols.pipeline.balance import Placements

LOOK_SECONDS = 2.0
AGAIN_SECONDS = 60.0  # until a download that brought nothing is tried again, if no round ends before
COMPLAIN_SECONDS = 300.0  # for which a stage may lack a holder before its members say so


class StageBackups:
    """Holds, renews and drops this peer's backups. `held`: stage -> training rounds in its backup."""

    def __init__(
        self,
        me: PeerId,
        stage: int,
        *,
        sizes: Sequence[int],
        limit_bytes: float,
        view: Callable[[], Placements],
        seat: Callable[[int], Hashable],
        find: Callable[[int], Awaitable[int | None]],
        fetch: Callable[[int, int], Awaitable[int]],
        drop: Callable[[int], Awaitable[None]],
        is_target: Callable[[int], bool],
        announce: Callable[[Mapping[int, int]], None],
        say: Callable[[str], None],
    ) -> None:
        """`sizes` are the bytes of each stage's backup; `view` is what this peer sees now. `seat` identifies the seat
        of a stage that counts, whose state is to be held.

        `find` returns the training rounds in what is on the disk of a stage, None if there is nothing. `fetch`
        downloads a stage's newest state, if more rounds than the given number have trained it, and returns its rounds;
        it raises StateUnavailable, StateError. `drop` deletes a backup; so does `find` with one of another seat than
        the one that counts. Of this peer's own stage `drop` leaves the present directory. `is_target` says whether this
        peer is moving to a stage: what is on its disk of that stage is what it goes on with, and stays. `announce`
        takes what is held.
        """
        self.held: dict[int, int] = {}
        self._me, self._stage, self._sizes, self._limit_bytes = me, stage, sizes, limit_bytes
        self._view, self._seat, self._find, self._fetch, self._drop = view, seat, find, fetch, drop
        self._is_target, self._announce, self._say = is_target, announce, say
        self._uncovered_since: dict[int, float] = {}  # since when too few peers before this one hold a stage
        self._found: dict[int, Hashable] = {}  # the seats whose state was looked for on the disk
        self._tried: dict[int, tuple[int, float]] = {}  # round and time of the latest download
        self._lacking_since: float | None = None
        self._said: set[str] = set()

    def describe(self) -> str:
        """Which backups this peer has, and how many others have one of its own stage; for its user."""
        from protocols.pipeline.backups import has, order

        own = sum(has(each, self._stage) for each in order(self._view(), self._stage))
        held = [f"stage {stage} after {rounds} rounds" for stage, rounds in sorted(self.held.items())]
        return "; ".join(
            [f"stage {self._stage} is at {own} other peers", *(["here: " + ", ".join(held)] if held else [])]
        )

    async def run(self) -> None:
        """Keep the backups for ever."""
        others = [stage for stage in range(len(self._sizes)) if stage != self._stage]
        await self._drop(self._stage)  # the backup from which the stage began again here is in another directory
        while True:
            for stage in others:
                await self._look(stage)
            self._complain()
            await asyncio.sleep(LOOK_SECONDS)

    def _tell(self) -> None:
        self._announce(self.held)

    async def _look(self, stage: int) -> None:
        from protocols.pipeline.backups import ahead, fits, is_covered, is_due, is_old

        if self._is_target(stage):
            return
        if (seat := self._seat(stage)) != self._found.get(stage):
            self._found[stage] = seat
            rounds = await self._find(stage)
            self.held = {key: value for key, value in self.held.items() if key != stage}
            self.held |= {} if rounds is None else {stage: rounds}
            self._tell()
        view, now = self._view(), loop_time()
        if (before := ahead(view, stage, self._me)) is None:
            return
        if is_covered(stage, before):
            self._uncovered_since.pop(stage, None)
            if self.held.pop(stage, None) is not None:
                self._tell()  # first, so that no peer counts on it
                if not self._is_target(stage):
                    await self._drop(stage)
            return
        waited_seconds = now - self._uncovered_since.setdefault(stage, now)
        if stage not in self.held and not is_due(before, waited_seconds):
            return
        has_room = fits(stage, self.held.keys(), self._sizes, self._limit_bytes)
        has_donor = any(each.stage == stage for each in view.peers)
        if (
            view.round
            and has_room
            and has_donor
            and is_old(self.held, stage, view.round)
            and self._may_try(stage, view)
        ):
            await self._renew(stage)

    def _may_try(self, stage: int, view: Placements) -> bool:
        """Whether a round has ended since the latest try, or that was long ago."""
        tried, now = self._tried.get(stage), loop_time()
        if tried and tried[0] == view.round and now < tried[1] + AGAIN_SECONDS:
            return False
        self._tried[stage] = view.round, now
        return True

    async def _renew(self, stage: int) -> None:
        before = self.held.get(stage, -1)
        try:
            rounds = await self._fetch(stage, before)
        except StateUnavailable:
            return  # its peers have just gone, or have no state that a round has certified yet
        except StateError as error:
            return self._once(f"no backup of stage {stage}: {error}")
        if rounds > before:
            self.held[stage] = rounds
            self._tell()

    def _complain(self) -> None:
        """Say once if this peer's stage has lacked a holder for long."""
        from protocols.pipeline.backups import missing

        view, now = self._view(), loop_time()
        if not view.round or not missing(view, self._stage):
            self._lacking_since = None
            return
        self._lacking_since = now if self._lacking_since is None else self._lacking_since
        if now >= self._lacking_since + COMPLAIN_SECONDS:
            self._once(
                f"fewer than two peers of other stages have a backup of stage {self._stage}: its work is lost if "
                "all its peers are lost with their disks; more peers, or a larger --backup-bytes there, would help"
            )

    def _once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)
