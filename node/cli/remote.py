"""The commands that ask a running peer, from `status` to `set`; and the errors of all commands."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from node.cli import options
from node.config.multiaddrs import FILE_SIGN
from node.config.peer_config import SETTABLE, SETTINGS
from node.config.peer_sources import load_peer
from node.config.sizes import in_unit
from node.page.keys import last_port, read_link
from node.reporting.status import Status, join_command, parse, parse_as, printable, to_json, who_joins
from node.reporting.swarm import SwarmStatus
from node.runtime.program import typed
from node.session.fatal import FatalPeerError, NotInvited
from node.tasks.hf.settings import ModelError
from node.ui.control import ControlUnavailable, ask, home, running

ASK_SECONDS = 5.0
SWARM_SECONDS, SWARM_PAUSE_SECONDS = 20.0, 0.3
MAX_ADDRESSES = 64  # Addresses in one command: all of them are asked at the same time


MAX_DAYS = 365
_DURATION = re.compile(r"(?:(\d{1,5})d)?(?:(\d{1,5})h)?(?:(\d{1,5})m)?(?:(\d{1,6})s)?")

app = typer.Typer()


class CommandError(typer.TyperException):
    """A command that cannot be carried out. The message is one line for the user."""

    exit_code = 2
    found: Mapping[str, object] = {}  # by names of JSON fields: what it had found out by then


class PeerUnreachable(CommandError):
    """No peer answers, or there is nothing to read."""

    exit_code = 1


@app.command()
def status(
    state_dir: options.RunningPeerOption = None,
    bootstrap: Annotated[
        str | None,
        typer.Option(
            metavar="ADDR",
            help="Ask the peer at this address instead; it may run anywhere. For a private run, --state-dir names the "
            "directory of one of its members.",
        ),
    ] = None,
    swarm: Annotated[
        bool, typer.Option("--swarm", help="Show the whole swarm: what each peer does, as it says itself.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the whole status as one JSON object.")] = False,
) -> int:
    """Show what a running peer is doing, and how others can join it."""
    if swarm and bootstrap:
        raise CommandError("--swarm asks the peer on this machine: leave --bootstrap out")
    answer = _ask_remote(bootstrap, state_dir) if bootstrap else asyncio.run(ask_peer(state_dir, "status"))
    try:
        shown = parse(answer)
        peers = parse_as(SwarmStatus, asyncio.run(ask_swarm(state_dir)), "swarm") if swarm else None
    except ValueError as error:
        raise PeerUnreachable(f"the peer's answer cannot be read ({error}): does it run another version?") from None
    if json:
        print(to_json(asdict(shown) | ({"swarm": asdict(peers)} if peers else {})))
    elif peers:
        _show_swarm(peers, shown.stages > 1)
    else:
        _show(shown)
    return 0


@app.command()
def page(state_dir: options.RunningPeerOption = None) -> int:
    """Print the link of a running peer's web page."""
    print(asyncio.run(_page(state_dir)))
    return 0


@app.command()
def finish(state_dir: options.RunningPeerOption = None) -> int:
    """Ask a running peer to finish its round and exit, as its first Ctrl-C does."""
    asyncio.run(ask_peer(state_dir, "finish"))
    print("the peer will finish its current round and then exit", file=sys.stderr)
    return 0


@app.command()
def pause(
    state_dir: options.RunningPeerOption = None,
    length: Annotated[
        str | None,
        typer.Option("--for", metavar="TIME", help="How long, as in 45m, 1h or 1h30m.", show_default=False),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="HH:MM", help="Until that time of day, today or tomorrow.", show_default=False),
    ] = None,
    after_round: Annotated[
        bool, typer.Option("--after-round", help="Finish the present round first, as Folding@home's Finish does.")
    ] = False,
) -> int:
    """Let a running peer pause, until `resume` if no time is given. It stays, and the others do not wait for it."""
    end = end_of_pause(length, until)
    return _say_answer(asyncio.run(ask_peer(state_dir, "pause", until=end, after_round=after_round)))


@app.command()
def resume(state_dir: options.RunningPeerOption = None) -> int:
    """Let a paused peer work again."""
    return _say_answer(asyncio.run(ask_peer(state_dir, "resume")))


@app.command()
def move(
    stage: Annotated[int, typer.Argument(metavar="K", help="Number of the stage, from 0.", min=0)],
    state_dir: options.RunningPeerOption = None,
) -> int:
    """Move a running peer to another stage of its run. It fetches that stage's state first, and trains meanwhile."""
    return _say_answer(asyncio.run(ask_peer(state_dir, "move", stage=stage)))


@app.command(name="set")
def set_setting(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"{' or '.join(SETTABLE)}.")],
    value: Annotated[str, typer.Argument(metavar="VALUE", help="As for the option of join; off for none.")],
    state_dir: options.RunningPeerOption = None,
) -> int:
    """Change a setting of a running peer, also for its later starts."""
    if key := SETTABLE.get(name):
        value = in_unit(value, SETTINGS[key].unit)
    return _say_answer(asyncio.run(ask_peer(state_dir, "set", name=name, value=value)))


def _say_answer(answer: Mapping[str, Any]) -> int:
    line = printable(str(answer.get("line", "")))
    if answer.get("ok") is not True:
        raise CommandError(line)
    print(line, file=sys.stderr)
    return 0


def _show(shown: Status) -> None:
    from rich.console import Console

    from node.ui.terminal import render

    console = Console(highlight=False)
    console.print(render(replace(shown, addresses=()), (), console.width))
    if shown.private:
        print(f"\nThis run is private: others need a ticket ({typed('invite')}).")
    if command := join_command(shown):
        line, where = command
        print(f"\n{who_joins(where)}\n{line}")


def _show_swarm(peers: SwarmStatus, staged: bool) -> None:
    from rich.console import Console

    from node.ui.terminal import render_swarm

    console = Console(highlight=False)
    console.print(render_swarm(peers, console.width, staged))


# -- times ------------------------------------------------------------------------------------------------------------


def end_of_pause(length: str | None, until: str | None, now: datetime | None = None) -> float | None:
    """When a pause ends, in seconds since 1970, from `1h30m` or `18:00` in this machine's time zone; None: never."""
    if length is not None and until is not None:
        raise CommandError("--for and --until both say when the pause ends: give one of them")
    now = now or datetime.now()
    if length is not None:
        return now.timestamp() + duration(length).total_seconds()  # the local time may jump meanwhile
    return None if until is None else _time_of_day(until, now).timestamp()


def duration(text: str, option: str = "--for") -> timedelta:
    found = _DURATION.fullmatch(text.strip().lower())
    days, hours, minutes, seconds = (int(each or 0) for each in found.groups()) if found else (0, 0, 0, 0)
    length = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if not timedelta(0) < length <= timedelta(days=MAX_DAYS):
        raise CommandError(f"{option} {text!r} is not a duration; try 45m, 1h or 1h30m, at most {MAX_DAYS}d")
    return length


def _time_of_day(text: str, now: datetime) -> datetime:
    try:
        time = datetime.strptime(text.strip(), "%H:%M")
    except ValueError:
        raise CommandError(f"--until {text!r} is not a time; try 18:00") from None
    end = now.replace(hour=time.hour, minute=time.minute, second=0, microsecond=0)
    return end if end > now else end + timedelta(days=1)


# -- asking peers -----------------------------------------------------------------------------------------------------


async def _page(state_dir: Path | None) -> str:
    deadline = asyncio.get_running_loop().time() + ASK_SECONDS
    directory = state_dir or await _only_running(deadline)
    await ask_peer(directory, "status")
    try:
        async with asyncio.timeout_at(deadline):
            _, writer = await asyncio.open_connection("127.0.0.1", last_port(directory) or 0)
        writer.transport.abort()
    except (OSError, TimeoutError):
        raise PeerUnreachable(f"the peer in {directory} serves no page: start it with --page") from None
    return read_link(directory) or ""


async def ask_peer(state_dir: Path | None, what: str, **values: object) -> dict[str, Any]:
    deadline = asyncio.get_running_loop().time() + ASK_SECONDS
    try:
        return await ask(state_dir or await _only_running(deadline), what, deadline, **values)
    except (ControlUnavailable, OSError) as error:
        raise PeerUnreachable(str(error)) from None


async def ask_swarm(state_dir: Path | None, seconds: float = SWARM_SECONDS) -> dict[str, Any]:
    """What the peer knows of the swarm once it has asked all live peers, or after some seconds."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while True:
        answer = await ask_peer(state_dir, "swarm")
        if answer.get("asked") is not False or loop.time() >= until:
            return answer
        await asyncio.sleep(SWARM_PAUSE_SECONDS)


async def _only_running(deadline: float) -> Path:
    if found := await only_running(deadline):
        return found
    raise PeerUnreachable(f"no peer runs in {home()}: start one with `{typed('join')}`, or give --state-dir")


async def only_running(deadline: float) -> Path | None:
    """State directory of the only peer that runs on this machine; None if none does."""
    found = await running(home(), deadline)
    if len(found) > 1:
        raise CommandError(
            f"{len(found)} peers run on this machine: choose one with --state-dir {' or '.join(map(str, found))}"
        )
    return found[0] if found else None


def _ask_remote(address: str, state_dir: Path | None) -> dict[str, Any]:
    require_address(address)
    with _reaching():
        from node.session.remote_queries import remote_status

        return asyncio.run(remote_status(address, member_of(state_dir)))


def member_of(state_dir: Path | None) -> Path | None:
    """The state directory, if its peer is a member of a private run, which it may visit."""
    if state_dir is None:
        return None
    from node.session.private_run import is_private

    return state_dir if is_private(state_dir) else None


@contextmanager
def _reaching() -> Iterator[None]:
    from node.network.daemon import DaemonError
    from node.runtime.identity import IdentityError

    try:
        yield
    except NotInvited as error:
        raise CommandError(str(error)) from None
    except (FatalPeerError, ModelError, DaemonError, IdentityError, OSError) as error:
        raise PeerUnreachable(str(error)) from None


def fetch(addresses: Sequence[str], directory: Path, base: str | None = None, member: Path | None = None) -> list[Path]:
    """Fetch the model of the run of the peers at these addresses into an empty directory.

    `base` is this machine's copy of the model that a run of the task hf fine-tunes. `member` is the state directory of
    a member, if the run is private. Returns the state directories: one,
    or one of each stage.
    """
    if len(addresses) > MAX_ADDRESSES:
        raise CommandError(f"{len(addresses)} addresses are too many: give at most {MAX_ADDRESSES} by --bootstrap")
    for address in addresses:
        require_address(address)
    with _reaching():
        from node.session.remote_queries import fetch_model

        say = lambda line: print(f"warning: {line}", file=sys.stderr)  # noqa: E731
        return asyncio.run(fetch_model(addresses, directory, say, base, member))


def require_address(address: str) -> None:
    """Refuse a --bootstrap that is not the address of one peer."""
    if address.startswith(FILE_SIGN):
        raise CommandError(f"--bootstrap {address}: give one of the addresses in the file instead")
    load_peer({"bootstrap": [address]}, {}, None)
