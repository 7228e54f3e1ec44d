"""The commands of private runs, `invite`, `members` and `revoke`; and the ticket that `join` is given."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Mapping, MutableMapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from node.cli import options
from node.cli.remote import CommandError, ask_peer, ask_swarm, duration
from node.config.multiaddrs import peer_address
from node.config.peer_config import PeerConfig
from node.membership.invitations import MAX_CHARACTERS, MAX_USES, Ticket, TicketError, read_ticket
from node.reporting.status import MAX_NAME, printable, short, to_json
from node.runtime.program import typed
from node.storage.pass_files import PassFiles
from node.storage.statedir import StateError

VARIABLE = "STARLING_TICKET"
VERSIONS_SECONDS = 5.0  # for which `members` waits until the live ones have said their versions
ALONE = "a ticket names its run and its addresses: leave --bootstrap and --run-id out"

app = typer.Typer()


# -- join TICKET ------------------------------------------------------------------------------------------------------


def given_ticket(
    typed_in: str | None, file: Path | None, environment: MutableMapping[str, str], others: Collection[str]
) -> Ticket | None:
    """The ticket that the user gives, if any; `others` are the further options. Raises CommandError.

    The variable is removed from the environment: this peer's own processes shall not inherit it.
    """
    variable = environment.pop(VARIABLE, "")
    if typed_in is not None and file:
        raise CommandError("a ticket is typed, and another one is in --ticket-file: give one of them")
    text = typed_in if typed_in is not None else _read(file) if file else variable
    if typed_in is None and not file and not text.strip():
        return None
    if text.strip().startswith(("/", "@")):
        raise CommandError(f"{printable(text, 60)} is an address, not a ticket: give it by --bootstrap")
    try:
        ticket = read_ticket(text)
        for address in ticket.addresses:
            peer_address(address)
    except TicketError as error:
        raise CommandError(str(error)) from None
    except ValueError as error:
        raise CommandError(f"this ticket holds an address that cannot be used ({error}): ask for another") from None
    if {"bootstrap", "run_id"}.intersection(others):
        raise CommandError(ALONE)
    if not ticket.addresses:
        raise CommandError("this ticket holds no address: ask for another, once its maker can be reached")
    return ticket


def require_good(ticket: Ticket, state_dir: Path) -> None:
    """Refuse a ticket whose time is over, unless the directory's peer has its pass already: a restart may repeat it."""
    if not ticket.not_after or datetime.now().timestamp() <= ticket.not_after:
        return
    try:
        shown = PassFiles(state_dir).shown(ticket.run)
    except StateError as error:
        raise CommandError(str(error)) from None
    if shown is None:
        raise CommandError(f"this ticket was good until {_when(ticket.not_after)}: ask the one who sent it for another")


def require_alone(config: PeerConfig) -> None:
    """Refuse addresses and a run id beside a ticket: they may come from variables, too."""
    if config.bootstrap or config.run_id:
        raise CommandError(ALONE)


def _read(file: Path) -> str:
    try:
        if str(file) == "-":
            return sys.stdin.read(2 * MAX_CHARACTERS)
        with file.open() as opened:
            return opened.read(2 * MAX_CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise CommandError(f"--ticket-file {file}: {why}: give a file that holds a ticket") from None


def _when(seconds: float) -> str:
    at = datetime.fromtimestamp(seconds)
    return f"{at.day} {at:%B %H:%M}"


# -- commands to a running peer ---------------------------------------------------------------------------------------


@app.command()
def invite(
    state_dir: options.RunningPeerOption = None,
    uses: Annotated[
        int, typer.Option(min=1, max=MAX_USES, metavar="N", help="How many people may use the ticket.")
    ] = 1,
    expires: Annotated[str, typer.Option(metavar="TIME", help="How long it may be used, as in 7d or 12h.")] = "7d",
    for_peer: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="WHO",
            help="For the peer with this id only: nothing in the ticket is secret, and this peer may be away when it "
            "is used. A peer that is known here may be named by its nickname, or the end of its id.",
            show_default=False,
        ),
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the ticket as one JSON object.")] = False,
) -> int:
    """Make a ticket, by which others join the private run of a running peer."""
    seconds = duration(expires, "--expires").total_seconds()
    answer = _done(asyncio.run(ask_peer(state_dir, "invite", uses=uses, seconds=seconds, peer=for_peer)))
    ticket = str(answer["ticket"])
    if json:
        print(to_json({name: answer.get(name) for name in ("ticket", "number", "line", "warning")}))
        return 0
    print(ticket, flush=True)
    print(f"{printable(str(answer['line']))} They type: {typed('join')} {ticket[:20]}…", file=sys.stderr)
    if answer.get("warning"):
        print(f"starling: {printable(str(answer['warning']))}", file=sys.stderr)
    return 0


@app.command()
def members(
    state_dir: options.RunningPeerOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print them as one JSON object.")] = False,
) -> int:
    """Show who is in the private run of a running peer, who invited whom, and this peer's tickets."""
    answer = _done(asyncio.run(_ask_members(state_dir)))
    if json:
        print(to_json({name: value for name, value in answer.items() if name != "ok"}))
    else:
        _show(answer)
    return 0


@app.command()
def revoke(
    who: Annotated[str, typer.Argument(metavar="WHO", help="Nickname or id of a peer, or the number of a ticket.")],
    state_dir: options.RunningPeerOption = None,
) -> int:
    """Remove a peer from the private run, and with it whom it invited; or void a ticket."""
    print(printable(str(_done(asyncio.run(ask_peer(state_dir, "revoke", who=who)))["line"])), file=sys.stderr)
    return 0


async def _ask_members(state_dir: Path | None) -> Mapping[str, Any]:
    answer = await ask_peer(state_dir, "members")
    if answer.get("ok") is True and any(each["live"] and not each["version"] for each in answer["members"]):
        await ask_swarm(state_dir, VERSIONS_SECONDS)
        answer = await ask_peer(state_dir, "members")
    return answer


def _done(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    if answer.get("ok") is not True:
        raise CommandError(printable(str(answer.get("line", ""))))
    return answer


def _show(answer: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    names = {each["peer"]: _name(each) for each in answer["members"]}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("name", "invited by", "state", "data", "version"):
        table.add_column(heading)
    for each in answer["members"]:
        inviter = each["invited_by"]
        by = names.get(inviter, short(inviter)) if inviter else "is the founder"
        state = "this peer" if each["me"] else "live" if each["live"] else "away"
        cells = (_name(each), by, state, each["route"] or "–", str(each["version"]).partition("+")[0] or "–")
        table.add_row(*(Text(printable(str(cell), 60)) for cell in cells))
    console = Console(highlight=False)
    console.print(table)
    for each in answer["tickets"]:
        used = ", ".join(names.get(peer, short(peer)) for peer in each["used_by"])
        left = "voided" if each["void"] else f"{each['left']} left until {_when(each['not_after'])}"
        console.print(Text(f"ticket {each['number']}: {left}{f'; used by {used}' if used else ''}"))


def _name(row: Mapping[str, Any]) -> str:
    return f"{printable(str(row['nickname']))[:MAX_NAME]} ({short(str(row['peer']))})".lstrip()
