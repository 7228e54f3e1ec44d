"""A script of several ranks (DDP, FSDP2, plain torchrun) is one peer: rank 0 talks to the swarm, the others follow it.

All ranks make the same calls. In each, rank 0 does what a script of one process does, and announces what all must do
together. The others do that until they hear how the call ended, which is then the same on all ranks:

    ordinary     nothing happened but counting
    result       of the call
    failed       rank 0 raised an error, and so do the others
    by name      an operation of `operations`

The ranks talk through a gloo group of their own, on the CPU. The connections of a rank that ends are closed, which the
others see at once. For one that hangs, or does not make the call, they wait at most the limit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from node.library.parameters import SwarmError

_SLICE = timedelta(seconds=0.5)  # of a wait: between two of them, Ctrl-C is noticed
_MAX_BYTES = 1 << 28
_FOLLOW_FACTOR = 3  # rank 0 may wait for the swarm, then for a rank, and evaluate


class Ranks:
    """`seconds` bounds the start, and each wait of rank 0 for another rank. The others wait longer for rank 0."""

    def __init__(self, seconds: float) -> None:
        """All ranks make it at the same time. Raises `SwarmError` if some do not."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.operations: dict[str, Callable[..., Any]] = {}
        self._lost, self._in_operation = "", False
        self._header = torch.zeros(2, dtype=torch.int64)
        try:
            self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        except (RuntimeError, ValueError) as error:
            raise SwarmError(
                f"the ranks found no connection: does each call Swarm.join? ({_first_line(error)})"
            ) from None
        self.limit(seconds)

    def limit(self, seconds: float) -> None:
        """Bound the waits from now on."""
        self._seconds = seconds if self.rank == 0 else _FOLLOW_FACTOR * seconds
        if not self._lost:
            self._group.set_timeout(timedelta(seconds=2 * _FOLLOW_FACTOR * seconds))

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def lost(self) -> bool:
        return bool(self._lost)

    def close(self, why: str = "the ranks of this script are not together any more") -> None:
        """End the connections: the other ranks fail in their next call, or in the present one."""
        if not self._lost:
            self._lost = why
            with suppress(RuntimeError, ValueError, AssertionError):  # the script may have ended all groups before
                dist.destroy_process_group(self._group)
            self._group = None

    # -- a call that all ranks make -----------------------------------------------------------------------------------

    def together(self, call: str, act: Callable[[], Any]) -> Any:
        """On rank 0 the result of `act`; on the others what it returned there. None is the ordinary result.

        The result is sent as JSON. An error of rank 0 is a `SwarmError` on the others.
        """
        self._require()
        try:
            return self._lead(call, act) if self.leads else self._follow(call)
        except BaseException as error:
            if not self.leads and not isinstance(error, SwarmError):
                self.close()
            raise

    def _lead(self, call: str, act: Callable[[], Any]) -> Any:
        try:
            result = act()
        except BaseException as error:
            if self._in_operation:  # the others may wait for data
                self.close()
            elif not self._lost:
                with suppress(SwarmError):
                    self._announce({"failed": _first_line(error), "call": call})
            raise
        self._announce(None if result is None else {"result": result, "call": call})
        return result

    def _follow(self, call: str) -> Any:
        while (message := self._heard()) is not None:
            if "do" in message:
                with suppress(_Refused):  # all ranks know, and rank 0 says what follows
                    self.operations[message.pop("do")](**message)
                continue
            if message["call"] != call:
                self.close()
                raise SwarmError(f"rank 0 called {message['call']}, and rank {self.rank} {call}: make the same calls")
            if "failed" in message:
                raise SwarmError(f"rank 0: {message['failed']}")
            return message["result"]
        return None

    @contextmanager
    def operation(self, name: str, **details: Any) -> Iterator[None]:
        """Let the other ranks do an operation, while rank 0 does its part within the context."""
        self._announce({"do": name, **details})
        self._in_operation = True
        yield
        self._in_operation = False

    # -- what they say ------------------------------------------------------------------------------------------------

    def _announce(self, message: dict[str, Any] | None) -> None:
        data = b"" if message is None else json.dumps(message).encode()
        self._header[0] = len(data)
        self._wait(lambda: self._group.broadcast(self._header, 0))
        if data:
            self.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _heard(self) -> dict[str, Any] | None:
        """What rank 0 announces; None is an ordinary end of the call."""
        self._wait(lambda: self._group.broadcast(self._header, 0))
        if not (size := int(self._header[0])):
            return None
        data = torch.empty(size, dtype=torch.uint8)
        self.broadcast(data)
        message: dict[str, Any] = json.loads(data.numpy().tobytes())
        return message

    def exchange(self, value: Any, refusal: str = "") -> list[Any]:
        """The values of all ranks, as JSON. If any rank refuses, all raise a `SwarmError` that says which and why."""
        data = json.dumps([refusal, value]).encode()
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(own)
        self._wait(lambda: self._group.allreduce(sizes))
        width = int(sizes.max())
        if width > _MAX_BYTES:
            raise SwarmError("the model has too many parameters for ranks that are one peer")
        padded = torch.zeros(width, dtype=torch.uint8)
        padded[: len(own)] = own
        every = [torch.empty(width, dtype=torch.uint8) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([every], [padded]))
        said = [json.loads(each[:size].numpy().tobytes()) for each, size in zip(every, sizes.tolist(), strict=True)]
        for rank, (why, _) in enumerate(said):
            if why:
                self._in_operation = False
                raise _Refused(f"rank {rank}: {why}" if self.size > 1 else why)
        return [each for _, each in said]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """From rank 0. A contiguous tensor on the CPU."""
        self._wait(lambda: self._group.broadcast(tensor, 0))

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """A contiguous tensor on the CPU. The rank calls `receive`."""
        self._wait(lambda: self._group.send([tensor], rank, 0), at_once=True)

    def receive(self, shape: Sequence[int], rank: int) -> torch.Tensor:
        tensor = torch.empty(*shape)
        self._wait(lambda: self._group.recv([tensor], rank, 0), at_once=True)
        return tensor

    def _require(self) -> None:
        if self._lost:
            raise SwarmError(self._lost)

    def _wait(self, begin: Callable[[], Any], at_once: bool = False) -> None:
        """`at_once`: an operation whose wait cannot be in slices; the ranks have just been heard of."""
        self._require()
        deadline = time.monotonic() + self._seconds
        try:
            work = begin()
            while True:
                try:
                    work.wait(timedelta(seconds=self._seconds)) if at_once else work.wait(_SLICE)
                    return
                except RuntimeError:
                    if at_once or work.is_completed() or time.monotonic() > deadline:
                        raise
        except (RuntimeError, ValueError, AttributeError) as error:
            is_late = time.monotonic() > deadline
            whom = "rank 0" if not self.leads else "another rank"
            what = f"did not take part within {self._seconds:g} s" if is_late else "has ended, or its connection"
            self.close(f"{whom} {what} ({_first_line(error)}). All ranks must make the same calls of the swarm")
            raise SwarmError(self._lost) from None


class _Refused(SwarmError):
    """All ranks know it."""


def _first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [""])[0].rpartition("] ")[2]
    return line if isinstance(error, SwarmError) else f"{type(error).__name__}: {line}"[:200]
