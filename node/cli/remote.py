"""Asking a running peer how it is doing, or to finish; where that cannot be done, the one line that people get."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from node.reporting.status import Status, join_command, parse, who_joins

ASK_SECONDS = 5.0


class CommandError(typer.TyperException):
    """What was asked for cannot be done: one line for whoever asked."""

    exit_code = 2

    def __init__(self, why: str, exit_code: int | None = None) -> None:
        super().__init__(why)
        if exit_code is not None:
            self.exit_code = exit_code


class PeerUnreachable(CommandError):
    """Nobody is there to do it."""

    exit_code = 1


def status(state_dir: Path | None, bootstrap: str | None) -> Status:
    """What the peer of a directory, the one here, or the one at an address says of itself.

    Raises:
        Mistake: nobody can be asked so.
        Unavailable: it does not answer, or not as peers do.
    """
    answer = _ask_remote(bootstrap) if bootstrap else asyncio.run(_ask(state_dir, "status"))
    try:
        return parse(answer)
    except ValueError as error:
        raise PeerUnreachable(f"the peer's answer cannot be read ({error}): is it of another version?") from None


def finish(state_dir: Path | None) -> None:
    """Have it end its round and leave.

    Raises:
        Mistake, Unavailable: as `status` does.
    """
    asyncio.run(_ask(state_dir, "finish"))


def show(shown: Status) -> None:
    """For a person."""
    from rich.console import Console

    from node.ui.terminal import render

    console = Console(highlight=False)
    console.print(render(replace(shown, addresses=()), (), console.width))
    if command := join_command(shown):
        line, where = command
        print(f"\n{who_joins(where)}\n{line}")


async def _ask(state_dir: Path | None, what: str) -> dict[str, Any]:
    from node.ui.control import ControlUnavailable, ask

    deadline = asyncio.get_running_loop().time() + ASK_SECONDS
    try:
        return await ask(state_dir or await _the_one_here(deadline), what, deadline)
    except (ControlUnavailable, OSError) as error:
        raise PeerUnreachable(str(error)) from None


async def _the_one_here(deadline: float) -> Path:
    from node.ui.control import home, running

    found = await running(home(), deadline)
    if not found:
        raise PeerUnreachable(f"no peer runs in {home()}: start one with `python -m node join`, or give --state-dir")
    if len(found) > 1:
        raise CommandError(f"{len(found)} peers run here: choose one by --state-dir {' or '.join(map(str, found))}")
    return found[0]


def _ask_remote(address: str) -> dict[str, Any]:
    from node.config.peer_config import FILE_SIGN, load_peer
    from node.config.toml import ConfigError
    from node.network.daemon import DaemonError
    from node.runtime.identity import IdentityError

    if address.startswith(FILE_SIGN):
        raise CommandError(f"--bootstrap {address}: one peer is asked: give one of the addresses in that file")
    try:
        load_peer({"bootstrap": [address]}, {}, None)
    except ConfigError as error:
        raise CommandError(str(error)) from None
    from node.session.peer import FatalPeerError, remote_status

    try:
        return asyncio.run(remote_status(address))
    except (FatalPeerError, DaemonError, IdentityError, OSError) as error:
        raise PeerUnreachable(str(error)) from None
