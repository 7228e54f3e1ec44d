"""A worker on the CPU whose vectors lie apart from the shared ones, like those of a worker on a GPU."""

from __future__ import annotations

from node.training import build, worker


def main(arguments: list[str]) -> int:
    build.device_of = lambda name: "cpu:0"  # not "cpu": so nothing is put into shared memory
    return worker.main(arguments)


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
