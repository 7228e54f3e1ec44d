"""The page's files: the vendored ones are unchanged, and our own never write HTML."""

from __future__ import annotations

import hashlib
import re

import pytest

from node.page.app import STATIC

VENDORED = dict(re.findall(r"\| (\S+) \| ([0-9a-f]{64}) \|", (STATIC / "vendor" / "VENDORED.md").read_text()))


@pytest.mark.parametrize("name", ["uPlot.iife.min.js", "uPlot.min.css", "LICENSE"])
def test_vendored_file_is_unchanged(name: str) -> None:
    assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == VENDORED[name]


@pytest.mark.parametrize("file", sorted(STATIC.glob("*.js")), ids=lambda file: file.name)
def test_script_sets_text_only(file: object) -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", file.read_text())  # type: ignore[attr-defined]
