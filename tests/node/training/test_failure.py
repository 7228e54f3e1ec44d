"""The line that says why a worker failed: of exceptions, crashes and hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from node.tasks.name import TaskError
from node.tasks.user_task import blamed
from node.training.failure import FaultDump, describe

WRONG_SHAPE = nn.Linear(2, 2)


def raised(code: str) -> BaseException:
    with pytest.raises(BaseException) as caught:
        exec(compile(code, "/home/anna/shapes.py", "exec"), {"nn": nn, "torch": torch, "layer": WRONG_SHAPE})
    return caught.value


@pytest.mark.parametrize(
    "code, line",
    [
        ("def f():\n [][3]\nf()", "IndexError in f (shapes.py:2): list index out of range"),
        ("class A:\n def g(self):\n  raise KeyError\nA().g()", "KeyError in A.g (shapes.py:3)"),
        ("layer(torch.ones(3))", "RuntimeError in <module> (shapes.py:1): mat1 and mat2 shapes cannot be multiplied"),
        ("raise MemoryError", "MemoryError in <module> (shapes.py:1)"),
        ("torch.empty(1 << 60)", "RuntimeError in <module> (shapes.py:1): not enough memory for this task: "),
        ("raise ValueError('one\\ntwo')", "ValueError in <module> (shapes.py:1): one"),
    ],
)
def test_exception_is_placed_in_the_users_code(code: str, line: str) -> None:
    said = describe(raised(code))
    assert said.startswith(line) and "\n" not in said and len(said) < 500


def test_users_task_is_named_with_the_place() -> None:
    with pytest.raises(TaskError) as caught, blamed("shapes:shapes", "loss()"):
        raise raised("def loss():\n 1 / 0\nloss()")
    said = describe(caught.value)
    assert said == "task shapes:shapes: loss(): ZeroDivisionError: division by zero, in loss (shapes.py:2)"


@pytest.mark.parametrize(
    "last, crash",
    [
        ("import ctypes; ctypes.string_at(0)", "Segmentation fault"),
        ("import os; os.abort()", "Aborted"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGUSR1); time.sleep(0)", ""),
    ],
)
def test_faulthandlers_dump_is_read(last: str, crash: str, tmp_path: Path) -> None:
    """Of a crash, and of a process that was asked where it stands, with another thread beside it."""
    file = tmp_path / "task.py"
    file.write_text(
        "import faulthandler, signal, threading, time\n"
        "faulthandler.enable(); faulthandler.register(signal.SIGUSR1, all_threads=True)\n"
        "threading.Thread(target=time.sleep, args=(0.2,), daemon=True).start()\n"
        f"def loss():\n    {last}\n"
        "loss()\n"
    )
    done = subprocess.run([sys.executable, "-I", str(file)], capture_output=True, text=True, timeout=60)
    dump = FaultDump()
    for line in ["something before", *done.stderr.splitlines(), '  File "x.py", line 1 in after']:
        dump.take(line)
    assert (dump.crash, dump.place) == (crash, "loss (task.py:5)"), done.stderr
