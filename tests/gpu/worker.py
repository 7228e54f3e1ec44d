"""A worker on the CPU whose vectors lie apart from the shared ones, like those of a worker on a GPU."""

from __future__ import annotations

import sys

from node.training import build, worker


def keep_vectors_apart() -> None:
    """A learner on `cpu:0` is built like one on a GPU: only that of `cpu` lies in the shared memory."""
    usual = build.device_of
    build.device_of = lambda name: "cpu:0" if name == "cpu" else usual(name)


def main(arguments: list[str]) -> int:
    keep_vectors_apart()
    return worker.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
