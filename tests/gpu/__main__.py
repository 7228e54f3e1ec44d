"""Tests that need a GPU: `make gpu-test`, or

    python -m tests.gpu [--device cuda] [argument of pytest ...]

They need torch, psutil and pytest, and nothing that is installed by `make install` beside: models of Hugging Face are
tested where transformers is there, and a swarm where the packages of a peer are. Ten minutes at most.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
from pathlib import Path

NEEDED = ("torch", "psutil", "pytest")
NO_GPU = 2
"""Exit code without the device. Not 0: a run that has tested nothing must not look like one that has passed. Not 1
either, with which pytest says that a test has failed."""


def missing(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


def why_not(device: str) -> str:
    """What this machine lacks for the tests, in one line; empty if it lacks nothing."""
    if lacking := missing(NEEDED):
        return f"{sys.executable} has no {', '.join(lacking)}: give another Python by PYTHON=/path/to/python"
    if device == "cpu":
        return ""
    import torch

    if not torch.cuda.is_available():
        return (
            f"an NVIDIA GPU is needed, and torch {torch.__version__} finds none here; "
            "`make gpu-test DEVICE=cpu` runs the same tests on the CPU"
        )
    try:
        torch.ones(1, device=device).add_(1).item()
    except RuntimeError as error:
        return f"torch finds a GPU that does not compute: {str(error).splitlines()[0]}"
    return ""


def described(device: str) -> str:
    import torch

    words = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if device == "cuda":
        about = torch.cuda.get_device_properties(0)
        words += [about.name, f"{about.total_memory / 1e9:.0f} GB", f"capability {about.major}.{about.minor}"]
    return ", ".join(words)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options, more = parser.parse_known_args()
    if why := why_not(options.device):
        print(f"gpu-test: {why}", file=sys.stderr)
        return NO_GPU
    from tests.gpu.test_device import OF_HF, OF_PEER

    print(f"gpu-test on {options.device}: {described(options.device)}", flush=True)
    for names, what in ((OF_HF, "models of Hugging Face"), (OF_PEER, "a swarm")):
        if lacking := missing(names):
            print(f"not tested: {what}, without {', '.join(lacking)}", flush=True)
    import pytest

    os.environ["STARLING_TEST_DEVICE"] = options.device
    here = Path(__file__).parent
    return int(pytest.main(["-c", str(here / "pytest.ini"), str(here), *more]))


if __name__ == "__main__":
    sys.exit(main())
