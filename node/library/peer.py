"""The peer of a script: one of its own, in whose place another is started after an error, or one it attaches to."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from node.library.child import ChildPeer
from node.library.link import Link, LinkLost
from node.library.parameters import SwarmError
from node.library.shown import Messages
from node.runtime.json_file import read_json
from node.runtime.locks import hold

ATTACH = "NODE_ATTACH"  # variable with the state directory of a peer to attach to
_ATTACH_PAUSE_SECONDS = 1.0
_MAX_STARTS = 5


class PeerEnded(Exception):
    """This script has no peer any more. `over`: the run is over, or the peer has left it as it was asked to."""

    def __init__(self, over: bool) -> None:
        super().__init__()
        self.over = over


class ScriptPeer:
    """`arguments` are those of `node join`, and `run` the text of a run file; or `attach` is a state directory."""

    def __init__(
        self,
        arguments: Sequence[str] | None,
        run: str,
        attach: Path | None,
        messages: Messages,
    ) -> None:
        self._arguments, self._run, self._messages = [*(arguments or ())], run, messages
        self._place = Path.cwd()  # the script may change it, and relative paths stay those of the join
        self._attach = self._place / attach.expanduser() if attach else None
        self.child: ChildPeer | None = None
        self._ended: ChildPeer | None = None  # whose end is known
        self._starts, self._next_try = 0, 0.0

    @property
    def state_dir(self) -> Path | None:
        """None before the peer has told it."""
        return self._attach or (self.child.find_state_dir() if self.child else None)

    @property
    def where(self) -> str:
        """Where the lines of a quiet peer are."""
        return f" in {self.child.log}" if self.child and self._messages.quiet else ""

    @property
    def runs(self) -> bool:
        """Whether a peer of the script's own runs."""
        return self.child is not None and self.child.code is None

    def connect(self, has_joined: bool) -> Link | None:
        """Connect to the peer, or start one; None if it is not time to. Each try comes after a pause.

        Raises `LinkLost`, `PeerEnded`, and `SwarmError` for one that fails before the script `has_joined`.
        """
        now = time.monotonic()
        if now < self._next_try:
            return None
        self._next_try = now + _ATTACH_PAUSE_SECONDS
        if self._attach is None and not self.runs:
            self._start(now, has_joined)
        elif directory := self.state_dir:
            return Link.connect(directory)
        else:
            self._next_try = now + _ATTACH_PAUSE_SECONDS / 10
        return None

    def _start(self, now: float, has_joined: bool) -> None:
        """The first one, or after a pause one in place of a peer that ended by an error."""
        if self.child and self.child is not self._ended:
            self._ended = self.child
            self._next_try = now + 2.0 ** (self._starts - 1)
            return self._judge_end(self.child, has_joined)
        self._next_try = now + _ATTACH_PAUSE_SECONDS / 10
        if self._held():
            return
        self._starts += 1
        arguments = self._arguments
        if self.child and (directory := self.child.state_dir) and not given_state_dir(arguments):
            arguments = [*arguments, "--state-dir", str(directory)]
        environment = {name: value for name, value in os.environ.items() if name != ATTACH}
        try:
            self.child = ChildPeer(arguments, environment, self._messages.quiet, self._run, self._place)
        except OSError as error:
            self._next_try = now + 2.0**self._starts
            raise LinkLost(f"a peer cannot be started: {error.strerror or error}") from error

    def _judge_end(self, child: ChildPeer, has_joined: bool) -> None:
        """Whether the run is over, another peer is to be started, or none any more."""
        if child.code == 0:
            raise PeerEnded(over=True)
        what = child.how_it_ended()
        child.end(0)
        if self._starts == 1 and not has_joined:
            raise SwarmError(what)
        if self._starts < _MAX_STARTS:
            return self._messages.say(f"{what}. Another is started")
        self._messages.say(f"{what}. It was started {self._starts} times: this script trains alone from here on")
        raise PeerEnded(over=False)

    def _held(self) -> bool:
        """Whether a peer still runs in the state directory, as that of a killed script does while it leaves."""
        if not (directory := given_state_dir(self._arguments)):
            return False
        with suppress(OSError):
            if (held := hold(self._place / directory)) is not None:
                os.close(held)
                return False
            self._messages.say_once(
                f"a peer runs in {directory} and may be leaving: waiting for its end (attach would use it)"
            )
            return True
        return False

    def finish(self) -> None:
        """Ask the peer to finish its round and leave. It also ends when this script does."""
        if not self.runs or (directory := self.state_dir) is None:
            return
        with suppress(OSError, ValueError, TypeError, KeyError), socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(2.0)
            sock.connect(read_json(directory / "control.json")["socket"])
            sock.sendall(b'{"do": "finish"}\n')
            sock.recv(1 << 12)

    def end(self, seconds: float) -> None:
        """Wait for the end of a peer of the script's own; at the limit, kill it."""
        if self.child:
            self.child.end(seconds)


def given_state_dir(arguments: Sequence[str]) -> Path | None:
    """That of the arguments of `node join`, or of its variable."""
    given = os.environ.get("NODE_STATE_DIR", "")
    for each, following in pairwise([*arguments, ""]):
        if each == "--state-dir":
            given = following
        elif each.startswith("--state-dir="):
            given = each.partition("=")[2]
    return Path(given).expanduser() if given else None


def named(**values: object) -> list[str]:
    """Options of the command line, without those that are empty."""
    return [part for name, value in values.items() if value for part in (f"--{name.replace('_', '-')}", str(value))]


def with_settings(given: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with those that are given. Raises `SwarmError` if they say something else of the same."""
    found = dict(settings)
    for name, value in given.items():
        other = found.get(name)
        if isinstance(value, Mapping):
            value = with_settings(value, other if isinstance(other, Mapping) else {})
        elif other not in (None, value):
            raise SwarmError(f"settings: {name} = {other!r}, where this call has {value!r}: leave it out of settings")
        found[name] = value
    return found


def run_file(settings: Mapping[str, Any]) -> str:
    """The text of a run file. Raises `SwarmError` for what one cannot say."""
    return "".join(f"{key} = {value}\n" for key, value in _lines(settings, ()))


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[tuple[str, str]]:
    lines = []
    for name, value in table.items():
        keys = (*path, str(name))
        if isinstance(value, Mapping):
            lines += _lines(value, keys)
            continue
        try:
            if value is None or (isinstance(value, float) and not math.isfinite(value)):
                raise ValueError(f"{value} is no value")
            text = json.dumps(str(value) if isinstance(value, Path) else value, allow_nan=False, ensure_ascii=False)
            if ("null" in text and any(each is None for each in value)) or ("{" in text and not isinstance(value, str)):
                raise ValueError("a list holds numbers or texts")
        except (TypeError, ValueError) as error:
            raise SwarmError(f"settings: {'.'.join(keys)}: {error}; leave the key out for its default") from None
        lines.append((".".join(json.dumps(each, ensure_ascii=False) for each in keys), text))
    return lines
