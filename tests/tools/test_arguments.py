"""The command lines of the simulator and of the fault harness: a wrong argument gives one line and exit code 2."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.__main__ import main as faults
from tests.sim import crashes, scheduling
from tests.sim.__main__ import main as sim

WRONG: list[tuple[Callable[[list[str]], int], str, str]] = [
    (sim, "--protocol ring-of-fire", "ring-of-fire"),
    (sim, "--peers 33", "at most 32"),
    (sim, "--seeds 9:3", "holds no seeds"),
    (sim, "--protocol ring --faults lies", "ring is not made to bear lies"),
    (scheduling.main, "--seeds 5:", "neither a seed"),
    (crashes.main, "--sample 0", "at least 1"),
    (crashes.main, "--peers 2 --only p9:1", "no message 'p9:1'"),
    (faults, "--scenario kill --protocol ring", "invalid choice: 'ring'"),
    (faults, "--scenario kill --peers 2", "at least 3"),
]


@pytest.mark.parametrize("main, arguments, words", WRONG)
def test_wrong_argument_gives_one_line_error(
    main: Callable[[list[str]], int], arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments.split())
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    printed = capsys.readouterr()
    assert code == 2 and printed.out == ""
    assert words in printed.err and printed.err.count("\n") == 1
