"""Real peers with pipeline stages: memory, traffic on a slow link, and speed beside whole-model DiLoCo.

    python -m benchmarks.real_pipeline memory [--width 1024] [--layers 12]
    python -m benchmarks.real_pipeline link [--megabits 20] [--activations int8]
    python -m benchmarks.real_pipeline speed [--rounds 4]

memory   four stages, one peer each, train a model of about 150 million parameters for a few steps. Shows the tensors of
         each process, computed, and its largest PSS: memory that several processes share counts for each by its part.
link     three stages; the driver sends through a link of so many megabits/s. Shows its bytes per token beside the
         formula. Needs root, for network namespaces.
speed    three stages of two peers each, and two peers that each hold the whole model: w64, rounds of 50 steps. Shows
         held-out loss and tokens/s of each round, and the share of the time in which workers computed.

All peers are `join` processes with p2pd, on this machine. Runs end by themselves; the last line is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from node.config.manifest import Manifest, unseal
from node.reporting.report import read_reports
from node.runtime.identity import verify
from protocols.registry import ACTIVATION_CODECS, activation_bytes
from tests.faults.network import Namespaces
from tests.faults.shell import from_shell
from tests.sim.arguments import Parser, at_least_one
from tests.support.paths import REPOSITORY
from tests.support.real_swarm import RealPeer, wait

PATIENT_SECONDS = 1500.0
TENSORS: Mapping[str, Mapping[str, int]] = {
    "peer": {"momentum": 4, "pseudo-gradient": 4, "mean": 4},
    "worker": {"gradient": 4, "AdamW moments": 8},
    "shared": {"weights": 4, "anchor": 4},
}
"""Bytes for each parameter of the stage, or of the whole model, in each process; `shared` is mapped by both."""


def run_file(home: Path, text: str) -> Path:
    path = home / "run.toml"
    path.write_text(text)
    return path


def swarm(home: Path, peers: int, stages: int, run: Path) -> subprocess.Popen[bytes]:
    """Start the command `swarm`; its output goes to a file."""
    command = [sys.executable, "-m", "node", "swarm", "--peers", str(peers), "--json", "--run", str(run)]
    command += ["--dir", str(home / "peers")] + (["--stages", str(stages)] if stages > 1 else [])
    with (home / "out").open("wb") as out:
        return subprocess.Popen(command, cwd=REPOSITORY, stdout=out, stderr=subprocess.STDOUT)


def reports(directory: Path) -> list[dict[str, Any]]:
    path = directory / "rounds.jsonl"
    return read_reports(path.read_text()) if path.exists() else []


def manifest_of(directory: Path) -> Manifest:
    return unseal((directory / "manifest.bin").read_bytes(), verify)


# -- memory -----------------------------------------------------------------------------------------------------------


def owner(process: psutil.Process) -> str:
    """Nickname of the peer that a process belongs to."""
    line = process.cmdline()
    while "--nickname" not in line:
        process = process.parent()
        line = process.cmdline()
    return str(line[line.index("--nickname") + 1])


def pss_of(parent: int) -> dict[tuple[str, str], int]:
    """(peer, role) -> PSS in bytes, of all processes below `parent` now."""
    found: dict[tuple[str, str], int] = {}
    for process in psutil.Process(parent).children(recursive=True):
        try:
            text = " ".join(process.cmdline())
            role = "worker" if "node.training" in text else "p2pd" if "p2pd" in text else "peer"
            found[owner(process), role] = process.memory_full_info().pss
        except (psutil.Error, AttributeError):
            continue
    return found


def memory(width: int, layers: int) -> dict[str, Any]:
    stages, most = 4, dict[tuple[str, str], int]()
    text = (
        f'[gpt]\nlayers = {layers}\nwidth = {width}\nheads = 16\ncontext = 128\nrows = 1\n'
        "[recipe]\ninner_steps = 2\nrounds = 2\nbatches = 8\n"
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        process = swarm(home, stages, stages, run_file(home, text))
        until = time.monotonic() + PATIENT_SECONDS
        while process.poll() is None and time.monotonic() < until:
            for key, size in pss_of(process.pid).items():
                most[key] = max(size, most.get(key, 0))
            time.sleep(0.5)
        process.kill()
        print((home / "out").read_text())
        manifest = manifest_of(home / "peers" / "peer-1")
        losses = [each["loss"] for each in reports(home / "peers" / "peer-1")]
    whole = sum(manifest.elements)
    bytes_each = {process: sum(of.values()) for process, of in TENSORS.items()}
    print("| peer | parameters | tensors: peer | worker | shared by both | PSS: peer | worker | p2pd |")
    print("|---|---|---|---|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    for stage, count in enumerate(manifest.elements):
        name = f"peer-{stage + 1}"
        tensors = {process: each * count for process, each in bytes_each.items()}
        pss = {role: most.get((name, role), 0) for role in ("peer", "worker", "p2pd")}
        rows.append({"stage": stage, "parameters": count, "tensors": tensors, "pss": pss})
        cells = (*tensors.values(), *pss.values())
        print(f"| stage {stage} | {count / 1e6:.1f} M | {' | '.join(f'{each / 1e6:.0f} MB' for each in cells)} |")
    total = sum(bytes_each.values())
    print(f"whole model: {whole / 1e6:.1f} M parameters, tensors {total * whole / 1e6:.0f} MB")
    largest = max(sum(row["tensors"].values()) for row in rows)
    print(f"largest stage: {largest / (total * whole):.0%} of the whole model's tensors")
    return {"stages": rows, "parameters": whole, "whole_bytes": total * whole, "losses": losses}


# -- traffic ----------------------------------------------------------------------------------------------------------


def link(megabits: float, activations: str) -> dict[str, Any]:
    """The driver's bytes per token in one round, beside what the formula says."""
    stages, inner_steps, batches = 3, 50, 8
    text = f'stages = {stages}\nactivations = "{activations}"\n[gpt]\npreset = "w64"\n'
    text += f"[recipe]\nrounds = 1\ninner_steps = {inner_steps}\n"
    with tempfile.TemporaryDirectory() as place, Namespaces() as net:
        home = Path(place)
        run = run_file(home, text)
        peers = [RealPeer(f"p{stage}", home) for stage in range(stages)]
        try:
            for peer in peers:
                spot = net.add(peer.name)
                peer.inside, peer.listen = spot.inside, f"/ip4/{spot.address}/tcp/4001"
            net.slow("p0", int(1e6 * megabits))
            peers[0].start("--run", str(run), "--wait-for", str(stages))
            wait("the founder's address", peers[0].meet, 120.0)
            for stage in (1, 2):
                peers[stage].start("--bootstrap", peers[0].address, "--stage", str(stage))
            wait("the round of the driver", lambda: reports(peers[0].directory), PATIENT_SECONDS)
            report, manifest = reports(peers[0].directory)[0], manifest_of(peers[0].directory)
        finally:
            for peer in peers:
                peer.clear()
    gpt = manifest.config.gpt
    assert gpt is not None
    tokens = gpt.rows * gpt.context
    activation = activation_bytes(activations, tokens, gpt.width)
    calls = 2 * (stages - 2) + 1
    microbatches = report["microbatches"]  # the one round is evaluated after its report
    sent = microbatches * (calls * activation + 4 * tokens)
    received = microbatches * calls * activation
    found = {
        "tokens": report["tokens"],
        "tokens_per_second": report["tokens"] / report["seconds_train"],
        "sent_per_token": report["bytes_sent"] / report["tokens"],
        "received_per_token": report["bytes_received"] / report["tokens"],
        "formula_sent": sent / report["tokens"],
        "formula_received": received / report["tokens"],
        "inner_steps": inner_steps,
        "batches": batches,
    }
    for way in ("sent", "received"):
        share = found[f"{way}_per_token"] / found[f"formula_{way}"] - 1
        print(
            f"{way}: {found[f'{way}_per_token']:.0f} bytes/token, formula {found[f'formula_{way}']:.0f}, {share:+.1%}"
        )
    print(f"{found['tokens_per_second']:.0f} tokens/s at {megabits:g} Mbit/s")
    return found


# -- speed ------------------------------------------------------------------------------------------------------------


def speed(rounds: int) -> dict[str, Any]:
    text = f'[gpt]\npreset = "w64"\n[recipe]\ninner_steps = 50\nrounds = {rounds}\n'
    found: dict[str, Any] = {}
    for what, peers, stages in (("3 stages of 2", 6, 3), ("2 whole models", 2, 1)):
        with tempfile.TemporaryDirectory() as place:
            home = Path(place)
            process = swarm(home, peers, stages, run_file(home, text))
            process.wait(PATIENT_SECONDS)
            found[what] = {number: reports(home / "peers" / f"peer-{number}") for number in range(1, peers + 1)}
    print("| run | round | held-out loss | tokens | tokens/s | share of the time in which workers computed |")
    print("|---|---|---|---|---|---|")
    for what, of in found.items():
        for number in range(rounds):
            lines = [each for peer in of.values() for each in peer if each["round"] == number]
            trained = sorted((each for each in lines if each["seconds_train"]), key=lambda each: each["stage"])
            first = [each for each in lines if each["stage"] == 0]
            tokens = sum(each["tokens"] for each in first)
            rate = sum(each["tokens"] / each["seconds_train"] for each in first if each["seconds_train"])
            loss = next((each["held_out_loss"] for each in first if each["held_out_loss"] is not None), float("nan"))
            busy = [f"{each['seconds_compute'] / each['seconds_train']:.0%}" for each in trained if each["stages"] > 1]
            print(f"| {what} | {number + 1} | {loss:.3f} | {tokens:,} | {rate:,.0f} | {', '.join(busy) or '–'} |")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.real_pipeline", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("experiment", choices=("memory", "link", "speed"))
    parser.add_argument("--width", type=at_least_one, default=1024)
    parser.add_argument("--layers", type=at_least_one, default=12)
    parser.add_argument("--megabits", type=float, default=20.0)
    parser.add_argument("--activations", choices=ACTIVATION_CODECS, default="bf16")
    parser.add_argument("--rounds", type=at_least_one, default=4)
    options = parser.parse_args(arguments)
    if options.experiment == "link" and os.geteuid() != 0:
        parser.error("link needs root, for network namespaces")
    if options.experiment == "memory":
        result = memory(options.width, options.layers)
    elif options.experiment == "link":
        result = link(options.megabits, options.activations)
    else:
        result = speed(options.rounds)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(from_shell(main, "python -m benchmarks.real_pipeline", cure=""))
