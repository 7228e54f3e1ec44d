"""Programs that are given as text, in processes that have loaded PyTorch (`tests.support.warm`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from tests.support import warm


def run(program: str, *arguments: str, environment: Mapping[str, str]) -> tuple[str, str]:
    done = warm.run(__name__, program, *arguments, environment=environment, seconds=170)  # the test's time ends earlier
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


if __name__ == "__main__":
    del sys.argv[0]
    exec(sys.argv[0], {"__name__": "__main__"})
    sys.stdout.flush()
