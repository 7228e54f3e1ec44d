"""Why a worker failed, in one line with the place in the code: of an exception, a crash, or a hang."""

from __future__ import annotations

import faulthandler
import re
import signal
import site
import sys
import sysconfig
import traceback
from pathlib import Path

from node.tasks.name import TaskError

_CHARACTERS = 300
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_PROJECT = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | set(site.getsitepackages())
)


def not_enough_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(each in str(error) for each in ("alloc", "out of memory"))


def first_line(error: BaseException) -> str:
    """The message of an exception, at most 300 characters of its first line, or its type."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0][:_CHARACTERS]
    return f"not enough memory for this task: {line}" if not_enough_memory(error.__cause__ or error) else line


def describe(error: BaseException) -> str:
    """One line: the exception, the innermost function that is not a library's, and the message."""
    if isinstance(error, TaskError) and error.__cause__ is not None:
        return f"{first_line(error)}, in {_place(error.__cause__)}"
    name, message = type(error).__name__, str(error).strip()
    return f"{name} in {_place(error)}" + (f": {first_line(error)}" if message else "")


def report(error: BaseException, told: set[str]) -> str:
    """Return `describe(error)`, and write the traceback to stderr if the line is not among those `told` before."""
    if (line := describe(error)) not in told:
        told.add(line)
        traceback.print_exception(error.__cause__ if isinstance(error, TaskError) and error.__cause__ else error)
        sys.stderr.flush()
    return line


def write_where_it_stands() -> None:
    """Have this process write the stacks of its threads to stderr if it crashes, and on SIGUSR1."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


class FaultDump:
    """Reads what `faulthandler` writes of a process that crashes, or that is asked where it stands."""

    def __init__(self) -> None:
        self.crash = ""  # such as "Segmentation fault"
        self.place = ""  # where the thread stood that crashed or was asked, if known
        self._reading, self._is_final = False, False

    def take(self, line: str) -> None:
        if line.startswith("Fatal Python error: "):
            self.crash, self._is_final = line.removeprefix("Fatal Python error: ")[:_CHARACTERS], False
        elif line.startswith("Current thread "):
            self._reading, self._is_final = True, False
        elif frame := _FRAME.match(line) if self._reading else None:
            file, number, function = frame.groups()
            if not self._is_final:
                self._is_final = _is_ours(file)
                if self._is_final or not self.place:
                    self.place = f"{function} ({Path(file).name}:{number})"
        else:
            self._reading = False


def _place(error: BaseException) -> str:
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return "an unknown place"
    code, line = ([each for each in frames if _is_ours(each[0].co_filename)] or frames)[-1]
    return f"{code.co_qualname.replace('<locals>.', '')} ({Path(code.co_filename).name}:{line})"


def _is_ours(file: str) -> bool:
    return file.startswith(_PROJECT) or not file.startswith((*_LIBRARIES, "<"))
