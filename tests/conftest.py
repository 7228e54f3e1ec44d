"""Every test: the same examples each time, one thread of torch unless it asks for more, logging left as it was."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.sim.process import prepare
from tests.support.seconds import Seconds

_HUGGING_FACE = {Path(__file__).parent / "node" / each for each in ("tasks/hf", "export")}

prepare()
os.environ.setdefault("GOGC", "100")  # Go's default takes a sixth off what it costs to start a p2pd
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


LONG_SECONDS = 180
"""A long test's time on a machine that plays others beside it, if it asks for no other."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also the tests marked long, which `make sim` runs")


@pytest.hookimpl(optionalhook=True)  # the mutants are played without xdist
def pytest_xdist_auto_num_workers() -> int:
    """Tests on real processes mostly wait: four keep two cores busy."""
    return max(4, os.cpu_count() or 1)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Seconds(), "processor-seconds")


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests on real processes of one file run one at a time: many share fixtures, and peers.

    The tests of models of Hugging Face run in one process: its libraries take seconds to load.
    """
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]  # `python -m tests.gpu` runs them
    if not config.option.long:
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if item.get_closest_marker("real"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        elif item.path.parent in _HUGGING_FACE:
            item.add_marker(pytest.mark.xdist_group("hugging-face"))


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """What is loaded so far stays: no search for garbage, of which peers ask for one each round, needs to visit it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """What a command sets up for its process is no other test's."""
    root, names = logging.getLogger(), ("node", "protocols")
    before = root.handlers[:], root.level, [logging.getLogger(name).level for name in names]
    yield
    root.handlers[:], level, levels = before
    root.setLevel(level)
    logging.captureWarnings(False)
    for name, each in zip(names, levels, strict=True):
        logging.getLogger(name).setLevel(each)
