"""Commands that are printed are those that the user can type."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from node.reporting.status import join_command
from node.runtime import program
from tests.support.status_examples import STATUS


@pytest.mark.parametrize(
    "argv0, started_as, installed, begins",
    [
        ("/opt/checkout/node/__main__.py", "", False, "python -m node"),
        ("/home/ann/.local/bin/starling", "", False, "starling"),
        ("/opt/checkout/node/__main__.py", "starling", False, "starling"),
        ("/opt/checkout/node/__main__.py", "rm -rf /;", False, "python -m node"),
        ("train.py", "python -m node", True, "starling"),
    ],
    ids=["module", "by name", "child of starling", "odd variable", "from a wheel"],
)
def test_printed_command_is_as_the_program_was_started(
    argv0: str, started_as: str, installed: bool, begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [argv0])
    monkeypatch.setenv(program.STARTED_AS, started_as)
    monkeypatch.setattr(program, "IS_INSTALLED", installed)
    command = join_command(replace(STATUS, addresses=("/ip4/203.0.113.7/tcp/4001",)))
    assert command and command[0].startswith(f"{begins} join --bootstrap /ip4/203.0.113.7")
    assert program.child_environment()[program.STARTED_AS] == begins
