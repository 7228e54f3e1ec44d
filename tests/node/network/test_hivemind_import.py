"""hivemind's parts are there, and what it imports for its trainers is not."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.network.hivemind_import import enter
from tests.support.paths import REPOSITORY

PACKAGE = "straw_package"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that says when its first file is run, with a part that another part imports by its full name."""
    home = tmp_path / PACKAGE
    (home / "deep").mkdir(parents=True)
    (home / "__init__.py").write_text(f"import {PACKAGE}.heavy\nNAME = 'whole'\n")
    (home / "heavy.py").write_text("")
    (home / "light.py").write_text("VALUE = 1\n")
    (home / "deep" / "__init__.py").write_text(f"import {PACKAGE}.deep.low as low\nVALUE = low.VALUE\n")
    (home / "deep" / "low.py").write_text("VALUE = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield PACKAGE
    for name in [each for each in sys.modules if each.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def test_submodule_is_imported_without_the_rest(package: str) -> None:
    enter(package)
    import straw_package.deep
    import straw_package.light

    assert (straw_package.light.VALUE, straw_package.deep.VALUE) == (1, 2)
    assert f"{package}.heavy" not in sys.modules


def test_package_attribute_imports_the_whole_package(package: str) -> None:
    enter(package)
    from straw_package import NAME

    assert NAME == "whole" and f"{package}.heavy" in sys.modules


def test_missing_attribute_raises_attribute_error(package: str) -> None:
    enter(package)
    import straw_package

    for _ in range(2):
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = straw_package.nothing
    assert not hasattr(straw_package, "__wrapped__")


def test_imported_package_is_left_unchanged(package: str) -> None:
    import straw_package

    before = sys.modules[package]
    enter(package)
    assert sys.modules[package] is before is straw_package


def test_missing_package_is_ignored() -> None:
    enter("no_such_straw")
    assert "no_such_straw" not in sys.modules


def test_peer_does_not_load_hivemind_trainers() -> None:
    code = "import sys, node.network.kademlia; print([m for m in ('scipy', 'hivemind.optim') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
