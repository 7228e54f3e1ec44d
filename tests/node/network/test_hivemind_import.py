"""hivemind's parts can be imported without what it imports for its trainers."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.network.hivemind_import import enter

PACKAGE = "sample_package"


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
    for part in ("deep", "light"):
        importlib.import_module(f"{package}.{part}")
    whole = sys.modules[package]
    assert (whole.light.VALUE, whole.deep.VALUE) == (1, 2)
    assert f"{package}.heavy" not in sys.modules


def test_package_attribute_imports_the_whole_package(package: str) -> None:
    enter(package)
    assert importlib.import_module(package).NAME == "whole" and f"{package}.heavy" in sys.modules


def test_missing_attribute_raises_attribute_error(package: str) -> None:
    enter(package)
    whole = importlib.import_module(package)
    for _ in range(2):
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = whole.nothing
    assert not hasattr(whole, "__wrapped__")


def test_imported_or_missing_package_is_left_unchanged(package: str) -> None:
    before = importlib.import_module(package)
    enter(package)
    assert sys.modules[package] is before
    enter("no_such_package")
    assert "no_such_package" not in sys.modules
