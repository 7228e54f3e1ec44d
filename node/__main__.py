"""`python -m node`, and the command `starling`."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import NoReturn

from node.cli import app as cli


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command, by default that of the command line, and end the process with its exit code.

    At once: all that was begun has ended by then. To take an interpreter apart that has PyTorch in it takes from half a
    second to many, on a busy machine, in which signals that still come find no handler.
    """
    code = cli.main(arguments)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
