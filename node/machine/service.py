"""What starts a peer with its user's session: a unit of systemd, or a job of launchd. `cli/upkeep.py` writes it."""

from __future__ import annotations

import os
import plistlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from node.runtime.directories import user_directory

NAME = "starling"
_SYSTEMD = Path("/run/systemd/system")  # exists where systemd is the init system
_PLAIN = re.compile(r"[\w@+=:,./-]+", re.ASCII)
_UNIT = """\
[Unit]
Description=Starling, a peer of a training run

[Service]
Type=exec
ExecStart={command}
WorkingDirectory={directory}
# The peer alone is asked to end: it ends its worker and p2pd when it has finished the round.
KillMode=mixed
TimeoutStopSec=20
# A worker that runs out of memory is replaced by its peer.
OOMPolicy=continue
Restart=on-failure
RestartSec=10
RestartPreventExitStatus=2
SuccessExitStatus=130 143
UMask=0077
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""


@dataclass(frozen=True, slots=True)
class Service:
    """Where the service's file lies, and what the user types; `{file}` stands for its path."""

    file: Path
    start: tuple[str, ...]
    stop: tuple[str, ...]
    links: tuple[Path, ...] = ()  # made when it was started, and useless without the file

    def content(self, command: Sequence[str], directory: Path) -> bytes:
        """The file that runs `command`, whose first word is a whole path, in `directory`. Raises ValueError."""
        if odd := next((each for each in (*command, str(directory)) if not each.isprintable()), ""):
            raise ValueError(f"{odd[:80]!r} cannot stand in the file of a service: it is not one line of text")
        if self.file.suffix == ".plist":
            return _job(command, directory)
        if "$" in command[0]:
            raise ValueError(f"systemd starts no program with a $ in its path ({command[0]}): install it elsewhere")
        if str(directory) != str(directory).rstrip(" \\"):
            raise ValueError(f"systemd cannot run in '{directory}', which ends in a space or backslash: use another")
        words = " ".join(map(_quoted, command))
        return _UNIT.format(command=words, directory=str(directory).replace("%", "%%")).encode()


def service() -> Service | None:
    """The service of this user; None: this system has neither systemd nor launchd. FileNotFoundError: no home."""
    if sys.platform == "darwin":
        file, domain = Path.home() / f"Library/LaunchAgents/{NAME}.plist", f"gui/{os.getuid()}"
        return Service(file, (f"launchctl bootstrap {domain} {file}",), (f"launchctl bootout {domain}/{NAME}",))
    if not _SYSTEMD.is_dir():
        return None
    units = user_directory("XDG_CONFIG_HOME", ".config") / "systemd/user"
    return Service(
        units / f"{NAME}.service",
        (
            f"systemctl --user daemon-reload && systemctl --user enable --now {NAME}",
            f"journalctl --user -u {NAME} -f      # what it says",
            "loginctl enable-linger                 # so that it also runs while you are not logged in",
        ),
        (f"systemctl --user stop {NAME}; systemctl --user daemon-reload",),
        (units / f"default.target.wants/{NAME}.service",),
    )


def is_service() -> bool:
    """Whether this process is what systemd runs, from version 248 on, and not a child of that."""
    return os.environ.get("SYSTEMD_EXEC_PID") == str(os.getpid())


def _quoted(word: str) -> str:
    """A word of ExecStart. `%` would begin a specifier, and `$` a variable."""
    word = word.replace("%", "%%").replace("$", "$$")
    return word if _PLAIN.fullmatch(word) else '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _job(command: Sequence[str], directory: Path) -> bytes:
    log = str(Path.home() / f"Library/Logs/{NAME}.log")
    return plistlib.dumps(
        {
            "Label": NAME,
            "ProgramArguments": [*command],
            "WorkingDirectory": str(directory),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 300,
            "ExitTimeOut": 20,
            "ProcessType": "Standard",
            "Umask": 0o077,
            "StandardOutPath": log,
            "StandardErrorPath": log,
        },
        sort_keys=False,
    )
