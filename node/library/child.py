"""The peer process that a script starts. It ends with the script, however that ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

LEASH = "STARLING_LEASH"  # as in `node.training.script`
_FOLLOW_SECONDS = 0.2
_ROOT = Path(__file__).parents[2]


class ChildPeer:
    """Its lines go to stderr of the script unless `quiet`. `state_dir` is None until the peer has told it.

    `run` is the text of its run file; empty: it has none.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], quiet: bool, run: str = "") -> None:
        self._leash, theirs = socket.socketpair()
        self._leash.setblocking(False)
        handle, name = tempfile.mkstemp(prefix="starling-peer-", suffix=".log")
        self.log, self.state_dir, self._told = Path(name), None, b""
        if run:
            self.log.with_suffix(".toml").write_text(run)
            arguments = ["--run", str(self.log.with_suffix(".toml")), *arguments]
        paths = os.pathsep.join(filter(None, (str(_ROOT), environment.get("PYTHONPATH", ""))))
        with theirs, os.fdopen(handle, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "node", "join", "--own-loop", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, "PYTHONPATH": paths, LEASH: str(theirs.fileno())},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the script, which then leaves
            )
        self._quiet = quiet
        os.register_at_fork(after_in_child=self._leash.close)
        if not quiet:
            threading.Thread(target=self._follow, name="starling", daemon=True).start()

    state_dir: Path | None

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    def find_state_dir(self) -> Path | None:
        """The peer's state directory, once it has told it."""
        if self.state_dir is None and b"\n" not in self._told:
            with suppress(OSError, ValueError):
                with suppress(BlockingIOError):
                    self._told += self._leash.recv(1 << 16)
                if b"\n" in self._told:
                    self.state_dir = Path(json.loads(self._told)["state_dir"])
                    self.log.with_suffix(".toml").unlink(missing_ok=True)  # the peer has read it
        return self.state_dir

    def last_line(self) -> str:
        with suppress(OSError):
            lines = self.log.read_text(errors="replace").strip().splitlines()
            return lines[-1].removeprefix("starling: ") if lines else ""
        return ""

    def end(self, seconds: float) -> None:
        """Wait for its end, which has been asked for; at the limit, kill it."""
        self._leash.close()  # so it knows that nobody waits for it
        try:
            self._process.wait(max(0.1, seconds))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self.log.with_suffix(".toml").unlink(missing_ok=True)
            if self._process.returncode == 0 or not self._quiet:  # else nothing else has shown its lines
                self.log.unlink(missing_ok=True)

    def _follow(self) -> None:
        with suppress(OSError, ValueError), self.log.open(errors="replace") as file:
            while True:
                ended = self.code is not None
                for line in file:
                    print(line, end="", file=sys.stderr, flush=True)
                if ended:
                    return
                time.sleep(_FOLLOW_SECONDS)
