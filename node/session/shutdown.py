"""Runs a peer until it is done or a signal asks it to leave, and ends the process by force if it hangs."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any

from node.config.peer_config import PeerConfig
from node.config.run_config import RunConfig
from node.config.toml import ConfigError
from node.joining.addresses_file import require_usable
from node.membership.invitations import Ticket
from node.runtime.cgroup import bounded_spin
from node.runtime.identity import IdentityError
from node.session.fatal import FatalPeerError
from node.storage.statedir import StateDir, StateError

ROUND_SECONDS = 8.5
CLEAN_UP_SECONDS = 1.5
EXIT_SECONDS = 5.0
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP (the terminal was closed)"}


def _heeded() -> list[signal.Signals]:
    """The signals that ask the process to leave. Under nohup, SIGHUP is ignored from the start, and stays so."""
    return [each for each in NAMES if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]


def run_peer(config: PeerConfig, run: RunConfig | None, ticket: Ticket | None = None) -> int:
    """Run a peer to its end and show it in the terminal; returns the process's exit code."""
    state = _state_dir(config)  # what it refuses, it refuses before seconds go by for PyTorch

    os.environ.update(bounded_spin(os.environ))  # OpenMP reads it when PyTorch is loaded
    import uvloop

    from node.runtime.fork_server import ForkServer
    from node.session.fatal import AGAIN
    from node.session.peer import Peer
    from node.ui import logs
    from node.ui.terminal import Terminal

    ForkServer.begin()  # as long as there is no thread
    terminal = Terminal(config.json)
    logs.set_up(config.log_level, terminal.log, terminal.log_style)
    shutdown = GracefulShutdown(lambda: peer.finish(), terminal.say, terminal.close)
    peer = Peer(config, run, state, terminal, shutdown.finish, ticket)
    # Exempt all objects loaded so far from garbage collection. Otherwise each full collection would visit PyTorch's
    # quarter of a million objects, and block the event loop for 0.14 s.
    gc.freeze()
    gc.enable()

    async def run_again() -> int:
        nonlocal peer
        while (code := await peer.run()) == AGAIN:
            peer = Peer(replace(config, new=False), run, _state_dir(config), terminal, shutdown.finish, ticket)
        return code

    async def show_and_run() -> int:
        async with terminal.showing(lambda: peer.status()):
            return await shutdown.run(run_again())

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(show_and_run())
    finally:
        terminal.close()


def _state_dir(config: PeerConfig) -> StateDir:
    assert config.state_dir is not None
    try:
        require_usable(config)
        return StateDir.open(config.state_dir)
    except (StateError, IdentityError, ConfigError) as error:
        raise FatalPeerError(str(error)) from None


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """End the process at once on a signal, until a `GracefulShutdown` handles signals: nothing has begun yet."""
    before = {number: signal.signal(number, _leave_at_once) for number in _heeded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is _leave_at_once:
                signal.signal(number, handler)


def _leave_at_once(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(2, f"{NAMES[signal.Signals(number)]}: exiting\n".encode())
    os._exit(0)  # not by an exception: an import in progress might swallow it


class GracefulShutdown:
    """Two-stage shutdown on SIGINT, SIGTERM or SIGHUP: the first signal lets the peer finish, the second cancels it.

    SIGHUP is never the second: for a terminal that closes, the kernel and the shell each send one, and a logout sends
    it together with SIGTERM.

    Finishing may take 10 s, cancelling 2 s. After that a SIGALRM handler ends the process, even if the event loop is
    blocked or a thread hangs. p2pd and the worker die with this process.
    """

    _task: asyncio.Task[int]

    def __init__(self, finish: Callable[[], None], say: Callable[[str], None], last_words: Callable[[], None]) -> None:
        self._finish, self._say, self._last_words = finish, say, last_words
        self._asked, self._code = 0, 1

    async def run(self, peer: Coroutine[Any, Any, int]) -> int:
        """Run the peer to its end, without a time limit; returns the exit code. The peer's exceptions propagate.

        The code is the peer's own; 1 if it had to be cancelled; 130 after a second Ctrl-C, 143 after a second SIGTERM.
        """
        task = self._task = asyncio.create_task(peer, name="peer")
        with self._listening():
            await asyncio.wait([task])
        if not self._asked:
            signal.setitimer(signal.ITIMER_REAL, EXIT_SECONDS)  # a thread may still hang
        if self._asked < 2 and not task.cancelled():
            self._code = task.result()
        return self._code

    def finish(self, why: str = "asked to finish") -> None:
        """Do what the first signal does. A signal that follows counts as the second."""
        if not self._asked:
            self._asked = 1
            self._set_alarm(signal.SIGTERM)
            self._finish_round(f"{why}: finishing this round, then exiting")

    @contextmanager
    def _listening(self) -> Iterator[None]:
        loop, heeded = asyncio.get_running_loop(), _heeded()

        def on_signal(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGHUP and self._asked:
                return
            self._asked += 1
            if self._asked <= 2:
                self._set_alarm(number)
                loop.call_soon_threadsafe(self._leave, number, self._asked)

        signal.signal(signal.SIGALRM, self._end_by_force)
        for number in heeded:
            signal.signal(number, on_signal)  # not the event loop's handler: this one works even if the loop is blocked
        try:
            yield
        finally:
            for number in heeded:  # a signal now must not interrupt what is being written
                signal.signal(number, signal.SIG_IGN)

    def _set_alarm(self, number: int) -> None:
        if self._asked > 1:
            self._code = 128 + number
            signal.setitimer(signal.ITIMER_REAL, CLEAN_UP_SECONDS)
        else:
            signal.setitimer(signal.ITIMER_REAL, ROUND_SECONDS + CLEAN_UP_SECONDS)

    def _leave(self, number: int, signals: int) -> None:
        name = NAMES[signal.Signals(number)]
        if signals > 1:
            self._say(f"{name} again: exiting now")
            self._task.cancel()
        else:
            again = f" ({name} again to exit now)" if number != signal.SIGHUP else ""
            self._finish_round(f"{name}: finishing this round, then exiting{again}")

    def _finish_round(self, words: str) -> None:
        self._say(words)
        asyncio.get_running_loop().call_later(ROUND_SECONDS, self._give_up)
        self._finish()

    def _give_up(self) -> None:
        if self._asked == 1 and not self._task.done():
            self._say(f"this round did not end within {ROUND_SECONDS:g} s: exiting without it")
            self._task.cancel()

    def _end_by_force(self, number: int, frame: FrameType | None) -> None:
        self._last_words()
        os._exit(self._code)
