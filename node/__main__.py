"""`python -m node`, and the command `starling`."""

from __future__ import annotations

import sys

from node.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
