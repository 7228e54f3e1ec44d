"""The client side of the commands that ask a running peer; and the errors of all commands."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from node.config.peer_config import SETTABLE, SETTINGS
from node.config.sizes import in_unit
from node.reporting.status import Status, join_command, parse, printable, who_joins

ASK_SECONDS = 5.0
MAX_ADDRESSES = 64
"""Addresses in one command: all of them are asked at the same time."""


class CommandError(typer.TyperException):
    """A command that cannot be carried out. The message is one line for the user."""

    exit_code = 2

    def __init__(self, why: str, exit_code: int | None = None) -> None:
        super().__init__(why)
        if exit_code is not None:
            self.exit_code = exit_code


class PeerUnreachable(CommandError):
    """No peer answers, or there is nothing to read."""

    exit_code = 1


def status(state_dir: Path | None, bootstrap: str | None) -> Status:
    """Ask a peer for its status: at the address `bootstrap`, of `state_dir`, or the only one on this machine."""
    answer = _ask_remote(bootstrap) if bootstrap else asyncio.run(_ask(state_dir, "status"))
    try:
        return parse(answer)
    except ValueError as error:
        raise PeerUnreachable(f"the peer's answer cannot be read ({error}): does it run another version?") from None


def finish(state_dir: Path | None) -> None:
    asyncio.run(_ask(state_dir, "finish"))


def page(state_dir: Path | None) -> str:
    """The link of the web page of a peer on this machine."""
    return asyncio.run(_page(state_dir))


async def _page(state_dir: Path | None) -> str:
    from node.page.link import last_port, read_link
    from node.ui.control import ControlUnavailable, ask

    deadline = asyncio.get_running_loop().time() + ASK_SECONDS
    try:
        directory = state_dir or await _only_running(deadline)
        await ask(directory, "status", deadline)
        async with asyncio.timeout_at(deadline):
            _, writer = await asyncio.open_connection("127.0.0.1", last_port(directory) or 0)
        writer.transport.abort()
    except ControlUnavailable as error:
        raise PeerUnreachable(str(error)) from None
    except (OSError, TimeoutError):
        raise PeerUnreachable(f"the peer in {directory} serves no page: start it with --page") from None
    return read_link(directory) or ""


def pause(state_dir: Path | None, until: float | None, after_round: bool) -> str:
    """Ask a peer on this machine to pause `until` a wall-clock time, or until it is asked to resume. Returns its
    answer.
    """
    answer = asyncio.run(_ask(state_dir, "pause", until=until, after_round=after_round))
    if not answer.get("ok"):
        raise CommandError(printable(str(answer.get("line", "it does not pause"))))
    return printable(str(answer.get("line", "")))


def resume(state_dir: Path | None) -> str:
    return printable(str(asyncio.run(_ask(state_dir, "resume")).get("line", "")))


def change(state_dir: Path | None, name: str, value: str) -> str:
    if key := SETTABLE.get(name):
        value = in_unit(value, SETTINGS[key].unit)
    answer = asyncio.run(_ask(state_dir, "set", name=name, value=value))
    line = printable(str(answer.get("line", "")))
    if answer.get("ok") is not True:
        raise CommandError(line)
    return line


def show(shown: Status) -> None:
    from rich.console import Console

    from node.ui.terminal import render

    console = Console(highlight=False)
    console.print(render(replace(shown, addresses=()), (), console.width))
    if command := join_command(shown):
        line, where = command
        print(f"\n{who_joins(where)}\n{line}")


async def _ask(state_dir: Path | None, what: str, **values: object) -> dict[str, Any]:
    from node.ui.control import ControlUnavailable, ask

    deadline = asyncio.get_running_loop().time() + ASK_SECONDS
    try:
        return await ask(state_dir or await _only_running(deadline), what, deadline, **values)
    except (ControlUnavailable, OSError) as error:
        raise PeerUnreachable(str(error)) from None


async def _only_running(deadline: float) -> Path:
    from node.ui.control import home, running

    found = await running(home(), deadline)
    if not found:
        raise PeerUnreachable(f"no peer runs in {home()}: start one with `python -m node join`, or give --state-dir")
    if len(found) > 1:
        raise CommandError(f"{len(found)} peers run here: choose one with --state-dir {' or '.join(map(str, found))}")
    return found[0]


def _ask_remote(address: str) -> dict[str, Any]:
    require_address(address)
    from node.network.daemon import DaemonError
    from node.runtime.identity import IdentityError
    from node.session.fatal import FatalPeerError
    from node.session.visit import remote_status

    try:
        return asyncio.run(remote_status(address))
    except (FatalPeerError, DaemonError, IdentityError, OSError) as error:
        raise PeerUnreachable(str(error)) from None


def fetch(addresses: Sequence[str], directory: Path, base: str | None = None) -> list[Path]:
    """Fetch the model of the run of the peers at these addresses into an empty directory.

    `base` is this machine's copy of the model that a run of the task hf fine-tunes. Returns the state directories: one,
    or one of each stage.
    """
    if len(addresses) > MAX_ADDRESSES:
        raise CommandError(f"{len(addresses)} addresses are too many: give at most {MAX_ADDRESSES} by --bootstrap")
    for address in addresses:
        require_address(address)
    from node.export.trained_model import TrainedError
    from node.network.daemon import DaemonError
    from node.runtime.identity import IdentityError
    from node.session.fatal import FatalPeerError
    from node.session.visit import fetch_model

    try:
        say = lambda line: print(f"warning: {line}", file=sys.stderr)  # noqa: E731
        return asyncio.run(fetch_model(addresses, directory, say, base))
    except (FatalPeerError, TrainedError, DaemonError, IdentityError, OSError) as error:
        raise PeerUnreachable(str(error)) from None


def require_address(address: str) -> None:
    """Raise CommandError unless a --bootstrap is the address of one peer."""
    from node.config.multiaddrs import FILE_SIGN
    from node.config.peer_sources import load_peer
    from node.config.toml import ConfigError

    if address.startswith(FILE_SIGN):
        raise CommandError(f"--bootstrap {address}: files are not read here: give one of the addresses in it")
    try:
        load_peer({"bootstrap": [address]}, {}, None)
    except ConfigError as error:
        raise CommandError(str(error)) from None
