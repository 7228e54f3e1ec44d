"""A worker that also measures itself: the program that `benchmarks.gpu` has a `RemoteTrainer` start.

    python -m benchmarks.gpu_worker MEMORY SOCKET

On the CPU its vectors lie apart from the shared ones, so that the same code runs as on a GPU.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from node.training import worker
from node.training.worker import Worker
from tests.gpu.worker import keep_vectors_apart


def is_on_gpu() -> bool:
    """Whether this process has used one."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def synchronize() -> None:
    if is_on_gpu():
        torch.cuda.synchronize()


def memory() -> dict[str, int | None]:
    """The largest number of bytes so far, on the device and in this process."""
    is_gpu = is_on_gpu()
    return {
        "device_peak_bytes": torch.cuda.max_memory_allocated() if is_gpu else None,
        "device_reserved_bytes": torch.cuda.max_memory_reserved() if is_gpu else None,
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


class MeasuredWorker(Worker):
    """Has commands that measure it, too."""

    def do_memory(self) -> dict[str, int | None]:
        return memory()

    def do_outer_step(self, repeats: int) -> dict[str, Any]:
        """Seconds and bytes of what a round costs on the device. The vectors must be published."""
        local_training, shared = self._local_training, self._shared
        vector = local_training.learner.vector
        size = vector.numel() * vector.element_size()
        acts: dict[str, tuple[int, Callable[[], object]]] = {
            "publish": (size, self._publish),
            "take": (2 * size, lambda: self._take(0)),
            "norm": (2 * size, local_training._norm),
            "outer": (3 * size, self._enter_and_leave),  # a copy aside, the anchor's, and back
        }
        found = {name: _measured(*act, repeats) for name, act in acts.items()}
        if is_pinned := vector.is_cuda and _pin(shared.local.data_ptr(), 2 * size):
            found |= {f"{name}_pinned": _measured(*acts[name], repeats) for name in ("publish", "take")}
        return {**found, "pinned": is_pinned if vector.is_cuda else None}

    def _enter_and_leave(self) -> None:
        with self._local_training.outer():
            pass


def _pin(address: int, size: int) -> bool:
    """Lock the shared vectors, from which the device may then copy by itself. Returns whether that is allowed."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if runtime.cudaHostRegister(address, size, 0) == runtime.cudaError.success:
        return True
    with suppress(RuntimeError):  # CUDA reports the error again in the next call
        torch.zeros(1, device="cuda").add_(1)
    return False


def _measured(size: int, act: Callable[[], object], repeats: int) -> dict[str, float]:
    """The fastest of several."""
    seconds = []
    for _ in range(repeats):
        synchronize()
        began = time.perf_counter()
        act()
        synchronize()
        seconds.append(time.perf_counter() - began)
    return {"seconds": min(seconds), "bytes": size, "bytes_per_second": size / max(min(seconds), 1e-9)}


def main(arguments: list[str]) -> int:
    keep_vectors_apart()
    return worker.main(arguments, MeasuredWorker)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
