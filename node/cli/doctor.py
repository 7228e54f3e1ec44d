"""The command `doctor`: what is wrong with this machine, its network and its run, and what to do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from node.cli import options
from node.cli.remote import ASK_SECONDS, CommandError, PeerUnreachable, only_running
from node.config.multiaddrs import peer_address
from node.config.peer_config import PeerConfig
from node.config.peer_sources import apply_saved, load_peer
from node.config.toml import ConfigError
from node.reporting.status import printable, to_json
from node.runtime.locks import hold
from node.ui.control import ControlUnavailable, ask, home

if TYPE_CHECKING:
    from node.doctor.findings import Finding

POLL_SECONDS = 1.0
ASKED_SECONDS = 40.0
"""Longest time that a running peer's examination is awaited: the thirty seconds that it may take, and some more."""

app = typer.Typer()


@app.command()
def doctor(
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="ADDRESS",
            help="Address of another peer that may help: it says whether it can dial this one. Default: the peers of "
            "the run, or those that were met before.",
            show_default=False,
        ),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            envvar="NODE_STATE_DIR",
            help="State directory. Default: that of the only peer that runs on this machine, else the first one.",
            parser=options.path,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all at the end, as one JSON object.")] = False,
) -> int:
    """Say what is wrong with this machine, its network and its run, and what to do. Exit code 1: a warning; 2: FAIL."""
    from node.doctor.findings import conclusion, exit_code

    findings: list[Finding] = []

    def tell(finding: Finding) -> None:
        findings.append(finding)
        if not json:
            print(finding, flush=True)

    try:
        _examine("" if address is None else _checked(address), state_dir, tell)
    except ConfigError as error:
        raise CommandError(str(error)) from None
    except CommandError as error:
        error.found = {"findings": [*map(_as_dict, findings)]}
        raise
    code = exit_code(findings)
    if json:
        print(to_json({"code": code, "findings": [*map(_as_dict, findings)]}))
    else:
        print(conclusion(findings))
    return code


def _checked(address: str) -> str:
    try:
        return peer_address(address)
    except ValueError as error:
        raise CommandError(f"ADDRESS: {error}") from None


def _as_dict(finding: Finding) -> dict[str, str]:
    return {name: str(getattr(finding, name)) for name in ("check", "level", "text", "cure")}


def _examine(given: str, state_dir: Path | None, tell: Callable[[Finding], None]) -> None:
    directory = state_dir or asyncio.run(_directory())
    if os.path.lexists(directory) and not os.path.isdir(directory):
        raise CommandError(f"{directory} is no directory: name a peer's state directory by --state-dir")
    if asyncio.run(_ask_peer(directory, given, tell)):
        return
    config, _ = apply_saved(load_peer({"state_dir": directory}, os.environ, None), directory)
    _examine_here(config, directory, given, _is_held(directory), tell)


def _is_held(directory: Path) -> bool:
    """Whether another process holds a state directory. Its lock is released at once, for a peer that would start."""
    try:
        held = hold(directory)
    except OSError:
        return False  # there is none; or the check of the state directory says why it cannot be used
    if held is not None:
        os.close(held)
    return held is None


def _examine_here(
    config: PeerConfig, directory: Path, given: str, is_held: bool, tell: Callable[[Finding], None]
) -> None:
    import uvloop

    from node.doctor.findings import Finding, Level

    try:
        from node.session.examination import ExaminationAlone
    except (ImportError, OSError) as error:  # PyTorch, hivemind or a library that they load
        return tell(Finding("programs", Level.FAIL, f"a part of Starling does not load: {error}", "install it again"))
    # As `asyncio.run`, which would wait at its end for a thread that a dead disk holds. The process ends without it.
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    if runner.run(ExaminationAlone(config, directory, given, is_held).run(tell)):
        runner.close()


async def _directory() -> Path:
    """The state directory of the only peer that runs; if none does, the one that `join` would use."""
    return await only_running(asyncio.get_running_loop().time() + ASK_SECONDS) or home() / "peer-1"


async def _ask_peer(directory: Path, given: str, tell: Callable[[Finding], None]) -> bool:
    """Have the peer that runs there examine itself, and tell its findings as they come; False if no peer answers."""
    from node.doctor.findings import MAX_FINDINGS, parse_finding

    loop = asyncio.get_running_loop()
    try:
        answer = await ask(directory, "doctor", loop.time() + ASK_SECONDS, number=None, address=given)
    except (ControlUnavailable, OSError):
        return False
    told, until = 0, loop.time() + ASKED_SECONDS
    while True:
        if answer.get("ok") is not True:
            raise PeerUnreachable(printable(str(answer.get("line", "the peer does not examine itself"))))
        try:
            findings = [parse_finding(each) for each in list(answer.get("findings", ()))[told:MAX_FINDINGS]]
        except (ValueError, TypeError) as error:
            raise PeerUnreachable(f"the peer's answer cannot be read ({error}): does it run another version?") from None
        for each in findings:
            tell(each)
        told += len(findings)
        if answer.get("over") is True:
            return True
        if loop.time() > until:
            raise PeerUnreachable(f"the peer in {directory} does not end its examination: is it stopped?")
        await asyncio.sleep(POLL_SECONDS)
        answer = await _poll(directory, answer.get("number"))


async def _poll(directory: Path, number: object) -> dict[str, Any]:
    deadline = asyncio.get_running_loop().time() + ASK_SECONDS
    try:
        return await ask(directory, "doctor", deadline, number=number, address="")
    except (ControlUnavailable, OSError) as error:
        raise PeerUnreachable(str(error)) from None
