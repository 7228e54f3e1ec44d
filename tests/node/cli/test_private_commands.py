"""Tickets that cannot be used: one line each, exit code 2, and nothing is begun."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest

from node.cli import private_runs
from node.cli.app import main
from node.cli.private_runs import given_ticket, require_good
from node.cli.remote import CommandError
from node.membership.invitations import Ticket, read_ticket
from node.runtime.identity import peer_id_of
from node.storage.pass_files import PassFiles
from tests.node.membership.test_admission import ANNA, FOUNDER, RUN, chain

AT = f"/ip4/203.0.113.5/tcp/4001/p2p/{peer_id_of(ANNA.public)}"
SEED = bytes(range(32))
END = datetime(2020, 12, 4, 18, 0)
GOOD = Ticket(RUN, ANNA.public, 4_000_000_000, SEED, addresses=(AT,)).encode()
EXPIRED = Ticket(RUN, ANNA.public, int(END.timestamp()), SEED, addresses=(AT,)).encode()
NOWHERE = Ticket(RUN, ANNA.public, 4_000_000_000, SEED).encode()
UNUSABLE = Ticket(RUN, ANNA.public, 4_000_000_000, SEED, addresses=(AT.replace("tcp/4001", "tcp/0"),)).encode()

MISTYPED = "this ticket is mistyped or incomplete: copy it whole, from starling1 to its end"
ALONE = "a ticket names its run and its addresses: leave --bootstrap and --run-id out"


@pytest.mark.parametrize(
    "arguments, line",
    [
        ([GOOD[:-1]], MISTYPED),
        ([GOOD.replace("starling1", "starling2")], MISTYPED),
        ([""], MISTYPED),
        ([EXPIRED], "this ticket was good until 4 December 18:00: ask the one who sent it for another"),
        ([GOOD, "--bootstrap", AT], ALONE),
        ([GOOD, "--run-id", RUN.hex()], ALONE),
        ([AT], f"{AT[:60]} is an address, not a ticket: give it by --bootstrap"),
        ([NOWHERE], "this ticket holds no address: ask for another, once its maker can be reached"),
        ([UNUSABLE], "this ticket holds an address that cannot be used"),
        ([GOOD, "--ticket-file", "-"], "a ticket is typed, and another one is in --ticket-file: give one of them"),
        (["--ticket-file", "/nowhere"], "--ticket-file /nowhere: No such file or directory: give a file that holds a"),
        ([GOOD, "--private"], "--private cannot be given with a ticket: the swarm decides all settings of the run"),
        ([GOOD, "--protocol", "gossip"], "--protocol cannot be given with a ticket: the swarm decides"),
    ],
)
def test_unusable_ticket_gives_one_line_and_begins_nothing(
    arguments: Sequence[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    assert main(["join", *arguments, "--state-dir", str(state)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"starling: {line}") and said.count("\n") == 1
    assert not state.exists() or not any(state.iterdir())


def test_restart_may_repeat_a_ticket_that_was_redeemed(tmp_path: Path) -> None:
    """As that of a container, whose variable stays."""
    ticket = read_ticket(EXPIRED)
    with pytest.raises(CommandError, match="was good until"):
        require_good(ticket, tmp_path)
    PassFiles(tmp_path).keep_pass(chain(FOUNDER, ANNA))
    require_good(ticket, tmp_path)


def test_ticket_beside_addresses_in_variables_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NODE_BOOTSTRAP", AT)
    assert main(["join", GOOD, "--state-dir", str(tmp_path / "state")]) == 2
    assert capsys.readouterr().err == f"starling: {ALONE}\n" and not (tmp_path / "state").exists()


def test_ticket_comes_from_the_line_a_file_stdin_or_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ticket").write_text(f"{GOOD[:80]}\n{GOOD[80:]}\n")
    monkeypatch.setattr(private_runs.sys, "stdin", io.StringIO(GOOD))  # type: ignore[attr-defined]
    environment = {"STARLING_TICKET": GOOD, "HOME": "/"}
    for typed_in, file, variables in (
        (GOOD, None, {}), (None, tmp_path / "ticket", {}), (None, Path("-"), {}), (None, None, environment),
    ):  # fmt: skip
        found = given_ticket(typed_in, file, variables, [])
        assert found and found.addresses == (AT,)
    assert environment == {"HOME": "/"}, "the peer's own processes do not inherit it"
    assert given_ticket(None, None, {"STARLING_TICKET": " "}, []) is None and "STARLING_TICKET" not in os.environ
