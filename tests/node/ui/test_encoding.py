"""Tests of output in encodings that lack characters."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from node.ui.encoding import ERRORS
from tests.support.paths import REPOSITORY


@given(st.text(), st.sampled_from(["ascii", "latin-1", "cp1252", "utf-8"]))
def test_any_text_is_written_in_any_encoding(text: str, encoding: str) -> None:
    written = text.encode(encoding, ERRORS)
    known = text.encode(encoding, "ignore")
    assert written == known if text == known.decode(encoding) else len(written) > len(known)


def test_own_characters_have_equivalents_and_others_stay_recognisable() -> None:
    assert "“2 × 3” … – ▁█ →".encode("ascii", ERRORS) == b'"2 x 3" ... - _# ->'
    assert "na\udcffï好".encode("ascii", ERRORS) == b"na\\xff\\xef\\u597d"
    assert "2 × 3 …".encode("cp1252", ERRORS) == "2 × 3 …".encode("cp1252")


def test_message_reaches_a_terminal_without_its_characters() -> None:
    code = "import sys; from node.cli.app import main; sys.exit(main(sys.argv[1:]))"
    directory = b"/nowhere/\xff\xe2\x80\xa6"
    command: list[str | bytes] = [sys.executable, "-X", "utf8=0", "-c", code, "status", "--state-dir", directory]
    environment = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True)
    assert done.returncode == 1
    assert done.stderr.startswith(b"starling: no peer runs in /nowhere/\\xff\\xe2\\x80\\xa6: start one")
