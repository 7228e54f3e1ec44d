"""A program for tests of what starts programs: it prints what it finds around it, then ends as its argument says."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path


def main(arguments: list[str]) -> int:
    descriptors = [int(each) for each in os.listdir("/proc/self/fd")]
    found = {
        "arguments": arguments,
        "line": Path("/proc/self/cmdline").read_bytes().decode().rstrip("\0").replace("\0", " "),
        "added": os.environ["ADDED"],
        "descriptors": sorted(each for each in descriptors if os.path.exists(f"/proc/self/fd/{each}")),
        "default signals": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "from here": os.getcwd() in sys.path or "" in sys.path,
        "drawn": random.random(),
        "sleeper": subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL).pid,
    }
    print(json.dumps(found))
    match arguments[0]:
        case "fails":
            raise ValueError("as asked")
        case "crashes":
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGSEGV)
        case "waits":
            time.sleep(60)
    return 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
