"""The ranks' worker on the CPU, but each rank's vectors lie apart from the shared ones, like those on a GPU."""

from __future__ import annotations

import re
import sys

from node.ranks import worker
from node.tasks import spec
from node.training import build


def main(arguments: list[str]) -> int:
    spec._DEVICE = re.compile("cpu(:0)?")
    build.device_of = worker.device_of = lambda name: "cpu:0"  # type: ignore[attr-defined]
    return worker.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
