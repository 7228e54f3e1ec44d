"""Playing mutants: the tests that import a mutated module, until the first one fails.

A copy of the repository is mutated, never the repository itself. One process has PyTorch and pytest loaded and forks
for each mutant, which saves seconds each time; nothing of Starling is loaded before the fork.
"""

from __future__ import annotations

import ast
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.mutants.draw import Mutant

LIMIT_SECONDS = 600.0
"""A mutant whose tests take longer is killed: it hangs where the code does not."""
_COPIED = ("node", "protocols", "tests", "benchmarks", "docs", "docker", "pyproject.toml", "README.md")
_POLL_SECONDS = 0.05


def imports_of(tree: ast.AST) -> set[str]:
    """Dotted names of all that a file imports; `from a import b` is both a and a.b."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def importers(root: Path) -> Mapping[str, Mapping[str, int]]:
    """Of each module the test files that import it, with the number of steps over which they do.

    One step is a direct import, by the test itself or by the modules of tests/support that it imports. A test that
    reaches a module in more steps counts, too, if none does in one.
    """
    files = {path: imports_of(ast.parse(path.read_text())) for top in ("node", "protocols", "tests")
             for path in (root / top).rglob("*.py")}  # fmt: skip
    modules = {_module(root, path): path for path in files}
    graph = {path: {modules[name] for name in names if name in modules} for path, names in files.items()}
    if (examples := root / "tests/support/wire_examples.py") in graph:  # it imports all that register messages
        graph[examples] |= {path for path in files if "\nregister(" in path.read_text()}
    found: dict[str, dict[str, int]] = {}
    for test in sorted(path for path in files if path.name.startswith("test_")):
        distance, reached, border = 0, {test}, _with_support(root, graph, {test})
        while border:
            reached |= border
            distance += 1
            nearer = {each for path in border for each in graph[path]} - reached
            for path in nearer:
                found.setdefault(path.relative_to(root).as_posix(), {})[test.relative_to(root).as_posix()] = distance
            border = _with_support(root, graph, nearer) - reached
    return found


def _with_support(root: Path, graph: Mapping[Path, set[Path]], paths: set[Path]) -> set[Path]:
    """These files, and the modules of tests/support that they import, directly or one by another."""
    whole, border = set(paths), set(paths)
    while border:
        border = {each for path in border for each in graph[path] if (root / "tests/support") in each.parents} - whole
        whole |= border
    return whole


def tests_of(file: str, reaching: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    """The tests to play for a mutant of a file, in batches.

    First the tests in the directory that mirrors the file's: they kill most mutants, and soonest. Then all others that
    import it, or, if none does, those that reach it in fewest steps.
    """
    steps = reaching.get(file, {})
    least = min(steps.values(), default=0)
    mirror = f"tests/{Path(file).parent.as_posix()}/"
    batches = (
        sorted(test for test in steps if test.startswith(mirror)),
        sorted(test for test, distance in steps.items() if distance == least and not test.startswith(mirror)),
    )
    return [batch for batch in batches if batch]


class Playground:
    """A copy of the repository in which mutants are played, one at a time."""

    def __init__(self, root: Path, place: Path) -> None:
        self._place = place
        for name in _COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(root / name, place / name)
        self._reaching = importers(place)

    def play(self, mutant: Mutant) -> tuple[str, float, list[str]]:
        """(outcome, seconds, tests): "killed", "survived", "timeout", or "untested" where no test reaches the module.

        Raises:
            ValueError: the mutant was drawn for another text.
        """
        batches, path = tests_of(mutant.file, self._reaching), self._place / mutant.file
        if not batches:
            return "untested", 0.0, []
        whole, began = path.read_text(), time.monotonic()
        path.write_text(mutant.apply(whole))
        outcome = "survived"
        try:
            for batch in batches:
                if (outcome := self._fork(batch)) != "survived":
                    break
        finally:
            path.write_text(whole)
        return outcome, round(time.monotonic() - began, 1), [test for batch in batches for test in batch]

    def _fork(self, tests: list[str]) -> str:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            _run(self._place, tests)
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                _end_group(child)
                return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
            time.sleep(_POLL_SECONDS)
        _end_group(child)
        os.waitpid(child, 0)
        return "timeout"


def _module(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix().removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _end_group(leader: int) -> None:
    """End the processes that a mutant's tests have left."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def _run(place: Path, tests: list[str]) -> None:
    """In the child: forget what was loaded from the repository, and run the tests of the copy."""
    import pytest

    os.chdir(place)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "node", "protocols")]:
        del sys.modules[name]
    sys.path[:] = [str(place), *(each for each in sys.path if Path(each).resolve() != Path(__file__).parents[2])]
    sys.dont_write_bytecode = True
    os.environ["PYTHONPATH"] = str(place)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not real", *tests]
    code = pytest.main(options)
    os._exit(0 if code in (0, 5) else 1)
