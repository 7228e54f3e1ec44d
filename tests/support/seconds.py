"""Where the processor seconds of the tests went: a table at the end, and a budget for each folder.

The budget (`tests/budget.toml`) is in shares of the whole, since machines differ: a run of all tests in which a folder
takes more than twice its share fails.
"""

from __future__ import annotations

import resource
import time
import tomllib
from collections import defaultdict
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.paths import REPOSITORY

BUDGET = REPOSITORY / "tests" / "budget.toml"
LEAST_SHARE = 0.02
"""A folder with a smaller share may take up to twice this one: what a process loads is counted for the test that needs
it first, seconds here and there."""
_KEY, _SHOWN, _LEAST_SECONDS = "processor_seconds", 10, 30.0


def used() -> float:
    """Processor seconds so far, of this process and of all that it has started and that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime + warm.children_seconds()


def over_budget(seconds: Mapping[str, float], budget: Mapping[str, float]) -> list[str]:
    """A line for each folder that takes more than twice its share, or without one more than twice the least share."""
    whole, planned, lines = sum(seconds.values()), sum(budget.values()), []
    for folder, taken in sorted(seconds.items()):
        share = max(LEAST_SHARE, budget.get(folder, 0.0) / planned)
        if taken / whole > 2 * share:
            lines.append(f"{folder} takes {taken / whole:.1%} of the processor seconds, over twice its {share:.1%}")
    return lines


class Seconds:
    """A pytest plugin that adds up what each test has used, in the processes of xdist, too."""

    def __init__(self) -> None:
        self._before = used()
        self.by_file: defaultdict[str, float] = defaultdict(float)

    def pytest_collection_finish(self) -> None:
        """What it took to collect is no test's."""
        self._before = used()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: Any
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = used()
        report.user_properties = [*report.user_properties, (_KEY, now - self._before)]
        self._before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        spent = [value for key, value in report.user_properties if key == _KEY]
        self.by_file[file] += sum(value for value in spent if isinstance(value, float))

    def by_folder(self) -> defaultdict[str, float]:
        found: defaultdict[str, float] = defaultdict(float)
        for file, taken in self.by_file.items():
            found["/".join(Path(file).parent.parts[1:3]) or "."] += taken
        return found

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        whole = sum(self.by_file.values())
        if whole < _LEAST_SECONDS:
            return  # of a few tests this says nothing
        terminalreporter.section(f"{whole:.0f} processor seconds")
        for name, groups in (("folder", self.by_folder()), ("file", self.by_file)):
            for group, taken in sorted(groups.items(), key=lambda each: -each[1])[:_SHOWN]:
                terminalreporter.write_line(f"{taken:8.1f} s {taken / whole:6.1%}  {name} {group}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        budget, seconds = tomllib.loads(BUDGET.read_text())["seconds"], self.by_folder()
        if (
            not budget
            or session.config.option.markexpr
            or session.config.option.long
            or hasattr(session.config, "workerinput")
            or {*budget} - {*seconds}
        ):
            return  # not a run of all tests
        for line in over_budget(seconds, budget):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            print(f"\nBUDGET (tests/budget.toml): {line}")
