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

from node.runtime.program import child_environment

LEASH = "STARLING_LEASH"  # as in `node.training.script`
_FOLLOW_SECONDS = 0.2


class ChildPeer:
    """Its lines go to stderr of the script unless `quiet`. `state_dir` is None until the peer has told it.

    `run` is the text of its run file; empty: it has none. `place` is its working directory, if not the script's.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        quiet: bool,
        run: str = "",
        place: Path | None = None,
    ) -> None:
        self._leash, theirs = socket.socketpair()
        self._leash.setblocking(False)
        handle, name = tempfile.mkstemp(prefix="starling-peer-", suffix=".log")
        self.log, self.state_dir, self._told = Path(name), None, b""
        self._lines, self._quiet = self.log.open(errors="replace"), quiet
        if not quiet:  # its lines are shown: nothing is left of them, even if this process is killed
            self.log.unlink()
        self._run_file = _private(run) if run else None
        if self._run_file:
            arguments = ["--run", str(self._run_file), *arguments]
        with theirs, os.fdopen(handle, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "node", "join", "--own-loop", *arguments],
                cwd=place,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, **child_environment(environment), LEASH: str(theirs.fileno())},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the script, which then leaves
            )
        os.register_at_fork(after_in_child=self._leash.close)
        self._following = threading.Thread(target=self._follow, name="starling", daemon=True)
        if not quiet:
            self._following.start()

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
                    self._forget_run_file()  # the peer has read it
        return self.state_dir

    def last_line(self) -> str:
        end = os.pread(self._lines.fileno(), 1 << 16, max(0, os.fstat(self._lines.fileno()).st_size - (1 << 16)))
        lines = end.decode(errors="replace").strip().splitlines()
        line = lines[-1].removeprefix("starling: ") if lines else ""
        return line.replace(f"{self._run_file}: ", "settings: ")

    def how_it_ended(self) -> str:
        code = self.code or 0
        if code < 0:
            return f"the peer was killed by signal {-code}"
        return f"the peer ended with exit code {code}: {self.last_line() or 'it said nothing'}"

    def end(self, seconds: float) -> None:
        """Wait for its end, which has been asked for; at the limit, kill it."""
        self._leash.close()  # so it knows that nobody waits for it
        try:
            self._process.wait(max(0.1, seconds))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self._forget_run_file()
            if self._process.returncode == 0:  # else nothing else has shown the lines of a quiet peer
                self.log.unlink(missing_ok=True)
            if self._following.is_alive() and self._following is not threading.current_thread():
                self._following.join(5 * _FOLLOW_SECONDS)  # the last lines

    def _forget_run_file(self) -> None:
        if self._run_file:
            self._run_file.unlink(missing_ok=True)

    def _follow(self) -> None:
        with suppress(OSError, ValueError):
            while True:
                ended = self.code is not None
                for line in self._lines:
                    print(line, end="", file=sys.stderr, flush=True)
                if ended:
                    return
                time.sleep(_FOLLOW_SECONDS)


def _private(text: str) -> Path:
    """A new file that only this user can read."""
    handle, name = tempfile.mkstemp(prefix="starling-run-", suffix=".toml")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    return Path(name)
