"""What this process's control group says of memory: its limit, and how often the kernel has killed for want of it.

Both versions of Linux control groups are read, from inside a container too. What cannot be read is not known.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SELF = Path("/proc/self")
_UNLIMITED_BYTES = 1 << 60
"""What version 1 shows where there is no limit is more than this."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A memory control group.

    Attributes:
        path: its directory; None if none is known.
        version: 1 or 2.
    """

    path: Path | None = None
    version: int = 2

    def kills(self) -> int | None:
        """How many processes of it the kernel has killed for want of memory; None: not known."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        for line in self._read(name).splitlines():
            word, _, count = line.partition(" ")
            if word == "oom_kill" and count.isdigit():
                return int(count)
        return None

    def limit_bytes(self) -> int | None:
        """The most memory that its processes may have together; None: no limit, or not known."""
        text = self._read("memory.max" if self.version == 2 else "memory.limit_in_bytes").strip()
        return int(text) if text.isdigit() and int(text) < _UNLIMITED_BYTES else None

    def _read(self, name: str) -> str:
        with suppress(OSError):
            return (self.path / name).read_text() if self.path else ""
        return ""


def own_group(process: Path = _SELF) -> MemoryGroup:
    """The group of this process; one without a path where there is none, or not on Linux.

    Args:
        process: the directory in /proc to read from.
    """
    try:
        groups = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
    except OSError:
        return MemoryGroup()
    first = {"memory" in controllers.split(","): path for number, controllers, path in groups if number != "0"}
    if True in first:
        return MemoryGroup(_directory(mounts, "cgroup", first[True]), 1)
    unified = next((path for number, _, path in groups if number == "0"), None)
    return MemoryGroup(_directory(mounts, "cgroup2", unified)) if unified is not None else MemoryGroup()


def _directory(mounts: list[list[str]], kind: str, group: str) -> Path | None:
    """Where that group is mounted; a container sees its own as the root of the mount, whatever the path says.

    Args:
        mounts: the fields of each line of mountinfo: the fourth is the mount's root, the fifth its place; after a dash
            come its type, its source and its options.
    """
    for fields in mounts:
        if "-" not in fields[6:]:
            continue
        after = fields[fields.index("-", 6) + 1 :]
        if after[:1] != [kind] or (kind == "cgroup" and "memory" not in after[-1].split(",")):
            continue
        root, place = fields[3].rstrip("/"), Path(fields[4])
        if group.startswith(f"{root}/") and ".." not in group.split("/"):
            return place / group[len(root) + 1 :]
        return place
    return None
