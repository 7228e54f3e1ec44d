"""What its user asks of a running peer, through the control socket or the web page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeAlias

_UNKNOWN = 'ask {"do": …} with "status", "finish", "pause", "resume" or "set"'


Command: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, object]]]
"""Carries out a request, and returns the answer; see `PeerCommands.carry_out`."""


class Pauses(Protocol):
    """What the commands ask of `node.session.pausing.PauseController`."""

    def pause(self, cause: str = "", until: float | None = None, after_round: bool = False) -> str: ...

    def resume(self) -> str: ...


class PeerCommands:
    """Carries out requests. A request is a JSON object that names the command by `do`, and so is the answer.

    `change` changes a setting, given its name and value. It returns a line for the user, or raises ValueError with one.
    """

    def __init__(
        self,
        finish: Callable[[], None],
        pauses: Pauses | None = None,
        change: Callable[[str, str], Awaitable[str]] | None = None,
    ) -> None:
        self._finish, self._pauses, self._change = finish, pauses, change

    async def carry_out(self, request: Mapping[str, Any]) -> Mapping[str, object]:
        """Carry out a request. The answer has `ok` and, with it, a `line` for the user; or `error` if it is unknown."""
        pauses = self._pauses
        try:
            match request:
                case {"do": "finish"}:
                    self._finish()
                    return {"ok": True}
                case {"do": "pause", "until": None | int() | float() as until, "after_round": bool(after)} if pauses:
                    return {"ok": True, "line": pauses.pause("", until, after)}
                case {"do": "resume"} if pauses:
                    return {"ok": True, "line": pauses.resume()}
                case {"do": "set", "name": str(name), "value": str(value)} if self._change:
                    return {"ok": True, "line": await self._change(name, value)}
        except ValueError as error:
            return {"ok": False, "line": str(error)}
        except OverflowError:  # an integer that is too large for a float
            return {"ok": False, "line": "a number of the request is far too large: give a smaller one"}
        return {"error": _UNKNOWN}
