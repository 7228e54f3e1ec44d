"""Whether this peer pauses: who asked for it, why and until when.

Its user's pause is kept on disk, so a paused peer restarts paused. The machine's own wishes (`node.machine.rules`) are
not: after a restart its sensors are read again. A user's pause goes before them, and a user's `resume` overrides them
for an hour, except where the machine itself would suffer.

A short pause is a rest: the peer keeps its worker and its seat. A longer one is an absence: the worker ends, and the
peer leaves the roster at the end of the round (`node.outer.activity`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from node.machine.rules import WORK, Mode, Wish
from node.outer.activity import Activity
from node.reporting.status import printable
from node.runtime.json_file import read_json
from node.storage.statedir import write_atomically
from protocols.base import Clock

log = logging.getLogger(__name__)

FILE = "pause.json"
REST_SECONDS, REST_ROUNDS = 600.0, 3
"""A pause that is to last longer than this, or that has lasted for more rounds, is an absence."""
TICK_SECONDS = 1.0  # The wall clock is read that often: it jumps when the machine sleeps, or when its time is set
MAX_CAUSE = 100
MAX_UNTIL = 1e11
OVERRIDE_SECONDS = 3600.0  # Time for which a user's `resume` goes before the machine's wishes


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause that was asked for. `cause` is user-facing, as in "on battery"; empty if a person asked for it.

    Times are wall clock; `until` None: without an end. `away`: at once, else the peer rests first.
    """

    cause: str = ""
    since: float = 0.0
    until: float | None = None
    away: bool = False

    def line(self) -> str:
        """The pause in words, with times of day of this machine."""
        words = [self.cause, f"since {time_of_day(self.since)}"]
        if self.until is not None:
            words.append(f"until {time_of_day(self.until)}")
        return " ".join(filter(None, words))


class PauseController:
    """The pause of one peer, from what was asked for to what its outer loop does."""

    def __init__(self, state_dir: Path, clock: Clock, say: Callable[[str], None]) -> None:
        """Read the pause that an earlier incarnation was in."""
        self._file, self._clock, self._say = state_dir / FILE, clock, say
        self._pause = _read(self._file)
        self._next: Pause | None = None  # begins when the round under way is over
        self._wish: Wish = WORK
        self._wished: Pause | None = None
        self._override_until = 0.0
        self._rounds = 0
        self._apply: Callable[[Activity], None] = lambda activity: None
        self._alone: Callable[[], bool] = lambda: False
        if self._pause and self._is_over(self._pause):
            self._pause = None
        if self._pause:
            self._say(f"this peer is paused: {self._pause.line()}; `resume` lets it work")

    def attach(self, apply: Callable[[Activity], None], alone: Callable[[], bool]) -> None:
        """Let an outer loop follow the pauses from now on. `alone` returns whether the run waits for this peer."""
        self._apply, self._alone = apply, alone
        self._follow()

    # -- what is asked for --------------------------------------------------------------------------------------------

    def pause(
        self, cause: str = "", until: float | None = None, after_round: bool = False, away: bool | None = None
    ) -> str:
        """Pause now or, with `after_round`, when the round under way is over. Returns one line for the user.

        `until` is wall clock. A rest may last for `REST_ROUNDS` or `REST_SECONDS`, and is an absence then; with `away`,
        the peer is away at once. By default it rests if the pause is to end within that time. Raises ValueError if
        `until` is not in the future.
        """
        now = self._clock.wall()
        if until is not None and not (math.isfinite(until) and now < until < MAX_UNTIL):
            raise ValueError("the end of a pause must be in the future")
        if away is None:
            away = until is None or until - now > REST_SECONDS
        asked = Pause(printable(cause, MAX_CAUSE), now, until, away)
        if after_round and self._pause is None:
            self._next = asked
            return "the peer will pause when its present round is over"
        self._begin(asked)
        return f"paused {asked.line()}"

    def resume(self) -> str:
        """Work again. Returns one line for the user."""
        wish, wished = self._wish, self._wished
        if self._pause is None and self._next is None and wished is None:
            return "the peer is not paused"
        if wished and not wish.is_firm:
            self._override_until = self._clock.wall() + OVERRIDE_SECONDS
        self._begin(None)
        if wished is None:
            return "the peer works again"
        if wish.is_firm:
            return f"the peer stays paused: {wished.line()}"
        return f"the peer works until {time_of_day(self._override_until)}, although: {wish.cause}"

    def wish(self, wish: Wish) -> None:
        before, self._wish, earlier = self._wish, wish, self._wished
        self._wished = None
        if wish.mode is not Mode.WORK:
            goes_on = earlier is not None and before.mode is wish.mode  # the same rest, for another reason
            since = earlier.since if earlier and goes_on else self._clock.wall()
            away = wish.mode is Mode.AWAY or bool(earlier and goes_on and earlier.away)
            self._wished = Pause(wish.cause, since, None, away)
            self._rounds = self._rounds if goes_on else 0
        if self._pause is None and not self._is_overridden():
            again = f"this peer works again; it was paused: {before.cause}"
            self._say(f"this peer pauses: {wish.cause}" if wish.cause else again)
        self._follow()

    def _begin(self, pause: Pause | None) -> None:
        self._pause, self._next, self._rounds = pause, None, 0
        try:
            if pause:
                write_atomically(self._file, json.dumps(asdict(pause)).encode())
            else:
                self._file.unlink(missing_ok=True)
        except OSError as error:
            self._say(f"{self._file} cannot be written ({error.strerror}): after a restart this peer forgets its pause")
        self._follow()

    def _follow(self) -> None:
        activity = Activity.WORK
        if present := self._present():
            activity = Activity.AWAY if present.away else Activity.REST
        self._apply(activity)

    def _present(self) -> Pause | None:
        return self._pause or (None if self._is_overridden() else self._wished)

    def _is_overridden(self) -> bool:
        return not self._wish.is_firm and self._clock.wall() < self._override_until

    # -- what becomes of it -------------------------------------------------------------------------------------------

    @property
    def reason(self) -> str:
        """Why this peer pauses, for its user; empty if it works."""
        present = self._present()
        if present is None:
            return ""
        waits = "; the run waits for you: its roster has no other peer" if self._alone() else ""
        return present.line() + waits

    def round_ended(self) -> None:
        """A round is over: a pause that was to begin then begins, and a long rest becomes an absence."""
        if self._next:
            self._begin(replace(self._next, since=self._clock.wall()))
        elif self._present():
            self._rounds += 1
            self._lengthen()

    async def run(self) -> None:
        """End the pause when its time is over, until cancelled."""
        while True:
            if self._pause and self._is_over(self._pause):
                self._say("the pause is over: this peer works again")
                self._begin(None)
            if 0 < self._override_until <= self._clock.wall():
                self._override_until = 0.0
                self._follow()
            self._lengthen()
            await asyncio.sleep(TICK_SECONDS)

    def _is_over(self, pause: Pause) -> bool:
        return pause.until is not None and self._clock.wall() >= pause.until

    def _lengthen(self) -> None:
        present = self._present()
        if present is None or present.away:
            return
        if self._rounds >= REST_ROUNDS or self._clock.wall() - present.since > REST_SECONDS:
            if self._pause:
                self._pause = replace(present, away=True)
            else:
                self._wished = replace(present, away=True)
            self._follow()


def time_of_day(wall: float) -> str:
    """A time of today as 14:02, any other with its date, in this machine's time zone."""
    there, now = datetime.fromtimestamp(wall), datetime.now()
    return there.strftime("%H:%M" if there.date() == now.date() else "%Y-%m-%d %H:%M")


def _read(file: Path) -> Pause | None:
    try:
        if (values := read_json(file)) is None:
            return None
        cause, since, until, away = (values[name] for name in ("cause", "since", "until", "away"))
        if not (isinstance(cause, str) and isinstance(away, bool) and _is_time(since)):
            raise ValueError("of the wrong kind")
        if until is not None and not _is_time(until):
            raise ValueError("of the wrong kind")
        return Pause(printable(cause, MAX_CAUSE), float(since), until if until is None else float(until), away)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is ignored: %s", file, error)
        return None


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MAX_UNTIL
