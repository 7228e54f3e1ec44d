"""A worker of several ranks that streams a data set of the hub in windows of a few kilobytes."""

from __future__ import annotations

import sys

from node.ranks import worker
from node.tasks.hf import streamed

if __name__ == "__main__":
    streamed.WINDOW_BYTES = 6000
    sys.exit(worker.main(sys.argv[1:]))
