"""Run another module as the worker's program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from node.runtime.child_process import ChildProcess
from node.training import process

USUAL = "node.training.worker"


@contextmanager
def worker_program(module: str, usual: str = USUAL) -> Iterator[None]:
    """Inside the context, a `RemoteTrainer` starts `python -m MODULE` in place of the usual worker."""

    class Other(ChildProcess):
        @classmethod
        async def start(cls, name: str, command: Sequence[str], *others: Any, **named: Any) -> ChildProcess:
            command = [module if word == usual else word for word in command]
            return await ChildProcess.start(name, command, *others, **named)

    with patch.object(process, "ChildProcess", Other):
        yield
