"""What real peers learn together, compared with one peer alone in as many steps.

    python -m benchmarks.swarms [--seeds 0:5] [--peers 4] [--rounds 16] [--json build/swarms.json]

Each run is `python -m node swarm`: real processes, real p2pds, the default preset. A pair of runs shares a seed,
which gives the initial weights: first several peers, then one alone, with equal rounds and steps. The held-out losses
after the last round are compared. A peer's identity seeds its data, and is new in every run.

With `--json FILE`, runs that the file already holds are not repeated.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tests.sim.arguments import Parser, seeds

_RUN_SECONDS = 900.0


def swarm(peers: int, rounds: int, seed: int, directory: Path) -> dict[str, Any]:
    """Run one swarm. Returns its JSON result, with its duration in seconds and the losses of its rounds."""
    file = directory / "run.toml"
    file.write_text(f"seed = {seed}\n")
    command = [sys.executable, "-m", "node", "swarm", "--peers", str(peers), "--rounds", str(rounds)]
    began = time.monotonic()
    done = subprocess.run(
        [*command, "--run", str(file), "--dir", str(directory / "peers"), "--json"],
        stdout=subprocess.PIPE,
        timeout=_RUN_SECONDS,
        check=False,
    )
    lines = done.stdout.decode().splitlines()
    if not lines:
        raise SystemExit(f"the swarm of {peers} with seed {seed} printed no result (exit code {done.returncode})")
    result: dict[str, Any] = json.loads(lines[-1])
    reports = [json.loads(line) for line in next((directory / "peers").glob("*/rounds.jsonl")).read_text().splitlines()]
    return result | {
        "code": done.returncode,
        "seconds": time.monotonic() - began,
        "losses": {each["round"]: each["held_out_loss"] for each in reports},
        "in_the_mean": [len(each["peers"]) for each in reports],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.swarms", description=__doc__)
    parser.add_argument("--seeds", type=seeds, default=range(5))
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    known: dict[str, Any] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    gains = []
    for seed in options.seeds:
        losses = []
        for peers in (options.peers, 1):
            name = f"{peers} peers, {options.rounds} rounds, seed {seed}"
            if name not in known:
                with tempfile.TemporaryDirectory() as directory:
                    known[name] = swarm(peers, options.rounds, seed, Path(directory))
                if options.json:
                    options.json.write_text(json.dumps(known, indent=1))
            result = known[name]
            losses.append(result["loss_last"])
            print(
                f"{name}: held out {result['loss_first']:.3f} -> {result['loss_last']:.3f}, "
                f"agree {result['agree']}, {result['seconds']:.0f} s, in the mean {result['in_the_mean']}",
                flush=True,
            )
        gains.append(100 * (losses[0] / losses[1] - 1))
        print(
            f"seed {seed}: {options.peers} peers {losses[0]:.4f}, one {losses[1]:.4f}, {gains[-1]:+.2f} %", flush=True
        )
    spread = stdev(gains) if len(gains) > 1 else 0.0
    print(json.dumps({"pairs": len(gains), "percent_mean": mean(gains), "percent_stdev": spread, "percent": gains}))
    return 0 if all(gain < 0 for gain in gains) else 1


if __name__ == "__main__":
    sys.exit(main())
