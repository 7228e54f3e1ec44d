"""Every test: the same examples each time, one thread of torch unless it asks for more, logging left as it was; real
processes of one test at a time."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.sim.process import prepare
from tests.support.seconds import Seconds

prepare()
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

_PATIENT = {
    *("test_cli", "test_libp2p", "test_dht", "test_page"),
    *("test_export_real", "test_hf_real", "test_limits_real", "test_pausing_real"),
    *("test_restart_real", "test_user_task_real"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also the tests marked long, which `make sim` runs")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Seconds(), "processor-seconds")


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on real processes run one at a time, also where others run beside them: they would starve each other.

    Those that mostly wait, or that a busy machine cannot fail, are a line of their own: it runs beside the other.
    """
    if not config.option.long:
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    for item in items:
        if item.get_closest_marker("real"):
            waits = item.path.stem in _PATIENT or "conformance" in item.path.parts
            item.add_marker(pytest.mark.xdist_group("real, waiting" if waits else "real"))


def pytest_collection_finish() -> None:
    """The garbage collector need not go through all tests again and again."""
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
