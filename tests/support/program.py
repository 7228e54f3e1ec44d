"""Programs that are given as text, in processes that have loaded PyTorch (`tests.support.warm`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support import warm


def run(program: str, *arguments: str, environment: Mapping[str, str], home: Path) -> tuple[str, str]:
    home.mkdir(exist_ok=True)
    said, warnings = home / "said", home / "warnings"
    with said.open("w") as out, warnings.open("w") as err:
        code = (
            warm.server()
            .start(__name__, (program, *arguments), environment, {1: out.fileno(), 2: err.fileno()})
            .wait(170)  # the test's own time ends earlier
        )
    assert code == 0, warnings.read_text()
    return said.read_text(), warnings.read_text()


if __name__ == "__main__":
    del sys.argv[0]
    exec(sys.argv[0], {"__name__": "__main__"})
    sys.stdout.flush()
