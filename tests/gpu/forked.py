"""Trains in a worker that is forked, as a peer's is, by a process that has loaded torch; prints what came of it.

python -m tests.gpu.forked cuda TEXT
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import torch

from node.runtime.fork_server import ForkServer
from node.training import stage_worker, worker  # noqa: F401 - what is forked has loaded them
from tests.gpu.test_device import STEP_TOKENS, STEPS, gpt, trained, trainer


async def main() -> None:
    async with trainer(gpt(sys.argv[1], Path(sys.argv[2]))) as found:
        assert ForkServer.here, "the worker was not forked"
        work = await trained(found)
        assert work.tokens == STEPS * STEP_TOKENS and found.restarts == 0
        print(json.dumps({"tokens": work.tokens, "loss": work.loss, "initialised": torch.cuda.is_initialized()}))


if __name__ == "__main__":
    ForkServer.begin()
    asyncio.run(main())
