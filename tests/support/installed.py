"""A wheel of the project, and environments into which it is installed as users do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tests.support.paths import REPOSITORY

SECONDS = 100
JOINS = re.compile(r"starling (join --bootstrap \S+ --run-id \w+)")
"""The line that the founder prints for others."""


def make_wheel(place: Path) -> Path:
    command = ["make", "dist-files", f"BIN={Path(sys.executable).parent}", f"DIST={place}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return next(place.glob("*.whl"))


class Installed:
    """An environment for the wheel, which sees the other packages of this one; a home, and a working directory."""

    def __init__(self, place: Path, sockets: str, inside: Sequence[str] = ()) -> None:
        """`inside` is put before a command: it runs elsewhere in the network."""
        self._inside = inside
        self.place, self.home, self.work = place, place / "home", place / "work"
        self.bin = place / "env" / "bin"
        self.home.mkdir()
        self.work.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place / "env")], check=True, timeout=SECONDS)
        (self.site / "others.pth").write_text(sysconfig.get_path("purelib"))  # of which no .pth file counts then
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        self.environment = kept | {"HOME": str(self.home), "TMPDIR": sockets, "NODE_THREADS": "1"}

    @property
    def site(self) -> Path:
        return next(self.place.glob("env/lib/python3*/site-packages"))

    def files(self) -> set[str]:
        return {str(each.relative_to(self.place)) for each in (self.place / "env").rglob("*") if each.is_file()}

    def pip(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), *arguments]
        subprocess.run(command, env=self.environment, check=True, capture_output=True, timeout=SECONDS)

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [*self._inside, str(self.bin / words[0]), *words[1:]]
        return subprocess.Popen(
            command, cwd=self.work, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run(self, *words: str) -> str:
        process = self.start(*words)
        said, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, said
        return said
