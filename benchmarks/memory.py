"""Memory of one peer that fine-tunes a model of Hugging Face, beside the estimate printed before training.

    python -m benchmarks.memory [CASE ...] [--rounds 3] [--json FILE]

Each case is `python -m node swarm --peers 2`, on a Llama of random weights and on random words, with rounds of two
steps. Ten times a second, the memory of the first peer's processes is read: of peer, worker and p2pd what is their own,
once what peer and worker share, and once the libraries of both (the larger of the two).

It prints the peak of their sum, its parts then, the largest of each process, what `node.tasks.hf.memory` says, and
the bytes that the peer sent in a round beside those of its encoded vector.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

from node.config.run_config import load_run
from node.tasks.hf.memory import memory_need
from node.tasks.hf.model import load_model
from protocols.vectors.codec import codec
from tests.support.small_models import write_tokenizer

RUN = """
task = "hf"
[hf]
train = "{train}"
context = {context}
rows = {rows}
[recipe]
inner_steps = 2
rounds = {rounds}
batches = 1
"""
READ_SECONDS, RUN_SECONDS = 0.1, 900.0
WIDTH, LAYERS, HEADS, VOCABULARY = 640, 8, 10, 16_384


@dataclass(frozen=True, slots=True)
class Case:
    """One swarm."""

    train: str
    context: int
    rows: int
    checkpointing: bool = False
    layers: int = LAYERS
    precision: str = "float32"


CASES = {
    "full": Case("full", 256, 2),
    "full-small": Case("full", 256, 2, layers=2),
    "full-checkpointing": Case("full", 512, 4, checkpointing=True),
    "full-wide": Case("full", 512, 4),
    "full-bfloat16": Case("full", 256, 2, precision="bfloat16"),
    "lora": Case("lora", 256, 2),
    "lora-wide": Case("lora", 512, 4),
    "lora-checkpointing": Case("lora", 512, 4, checkpointing=True),
}


def write_base(folder: Path, layers: int) -> Path:
    """A Llama with random weights, and a tokenizer of fewer tokens than it has embeddings."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=WIDTH * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=1024,
        bos_token_id=None, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_text(path: Path) -> Path:
    words = [bytes(random.Random(each).choices(b"abcdefghij", k=5)).decode() for each in range(500)]
    draw = random.Random(0)
    path.write_text("\n".join(" ".join(draw.choices(words, k=12)) for _ in range(20_000)))
    return path


def of_founder(swarm: psutil.Process) -> list[psutil.Process]:
    """The processes of the first peer: itself, its worker, its p2pd."""
    for each in swarm.children():
        with suppress(psutil.Error):
            if "join" in each.cmdline() and "--bootstrap" not in each.cmdline():
                return [each, *each.children(recursive=True)]
    return []


def reading(processes: list[psutil.Process]) -> dict[str, float]:
    """Memory in megabytes: of each process its own, what they share, and mapped files.

    Args:
        processes: the peer first. A child that has its command line is one that is being started: until it runs its
            own program it shares the peer's memory, which would count twice.
    """
    found: dict[str, float] = {}
    lines: list[str] = []
    for each in processes:
        with suppress(psutil.Error, OSError):
            line = " ".join(each.cmdline())
            if line in lines[:1]:
                continue
            lines.append(line)
            kind = "worker" if "worker" in line else "p2pd" if "p2pd" in line else "peer"
            for row in Path(f"/proc/{each.pid}/status").read_text().splitlines():
                name, _, value = row.partition(":")
                if name == "RssAnon":
                    found[kind] = found.get(kind, 0.0) + int(value.split()[0]) * 1.024e-3
                elif name in ("RssShmem", "RssFile"):
                    what = "shared" if name == "RssShmem" else "files"
                    found[what] = max(found.get(what, 0.0), int(value.split()[0]) * 1.024e-3)
    return found


def watched(process: subprocess.Popen[bytes]) -> Iterator[dict[str, float]]:
    """Readings until the process ends."""
    began, swarm = time.monotonic(), psutil.Process(process.pid)
    while process.poll() is None:
        if time.monotonic() - began > RUN_SECONDS:
            process.kill()
        with suppress(psutil.Error):
            yield reading(of_founder(swarm))
        time.sleep(READ_SECONDS)


def measure(case: Case, rounds: int, home: Path) -> dict[str, Any]:
    """Run one swarm and return what it took."""
    base, data, file = write_base(home / "base", case.layers), write_text(home / "words.txt"), home / "run.toml"
    file.write_text(RUN.format(train=case.train, context=case.context, rows=case.rows, rounds=rounds))
    environment = os.environ | {
        "NODE_MODEL": str(base), "NODE_DATA": str(data), "NODE_PRECISION": case.precision,
        "NODE_CHECKPOINTING": str(case.checkpointing).lower(), "NODE_NICE": "0", "NODE_CHECKPOINT_EVERY": "1",
        "XDG_CACHE_HOME": str(home / "cache"),
    }  # fmt: skip
    command = [sys.executable, "-m", "node", "swarm", "--peers", "2", "--run", str(file), "--no-page", "--json"]
    with (home / "said").open("wb") as said:
        process = subprocess.Popen([*command, "--dir", str(home / "peers")], env=environment, stdout=said, stderr=said)
        readings = list(watched(process))
    if process.returncode not in (0, 1):
        raise SystemExit((home / "said").read_text()[-2000:])
    totals = [sum(each.values()) for each in readings]
    peak = max(totals)
    most = {f"most_{kind}": max(each.get(kind, 0.0) for each in readings) for kind in ("peer", "worker")}
    return {
        "peak": peak, **readings[totals.index(peak)], **most, **estimate(case, base), **traffic(case, home / "peers")
    }  # fmt: skip


def estimate(case: Case, base: Path) -> dict[str, float]:
    """The estimate that is printed before training, in megabytes."""
    config = load_run(None, {"task": "hf", "hf.train": case.train, "hf.context": case.context}, ["butterfly"])
    assert config.hf
    dtype = torch.bfloat16 if case.precision == "bfloat16" else torch.float32
    settings = replace(config.hf, rows=case.rows)
    found: dict[str, float] = {}

    def look(module: Any) -> None:
        need = memory_need(module.train(), settings, case.checkpointing)
        found["trained_elements"] = float(sum(each.numel() for each in module.parameters() if each.requires_grad))
        found["estimate"] = need.total / 1e6
        found.update({f"estimate_{name}": value / 1e6 for name, value in asdict(need).items()})

    load_model(str(base), settings, None, "cpu", dtype, look)
    return found


def traffic(case: Case, peers: Path) -> dict[str, float]:
    """Bytes sent by the first peer in a round in which both were, beside those of its encoded vector."""
    reports = [json.loads(line) for line in (peers / "peer-1" / "rounds.jsonl").read_text().splitlines()]
    sent = [each["bytes_sent"] for each in reports if len(each["peers"]) == 2]
    return {"rounds": float(len(reports)), "sent": max(sent, default=0) / 1e6}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"no case {min(unknown)}: choose from {', '.join(CASES)}")
    results: dict[str, Any] = {}
    for name in given.cases or CASES:
        with tempfile.TemporaryDirectory() as home:
            found = results[name] = measure(CASES[name], given.rounds, Path(home))
        encoded = codec("int8").encoded_bytes(int(found["trained_elements"])) / 1e6
        ratio = found["estimate"] / found["peak"]
        print(
            f"{name}: peak {found['peak']:.0f} MB, estimate {found['estimate']:.0f} MB, {ratio:.2f} of it; "
            f"sent {found['sent']:.3f} MB a round, encoded {encoded:.3f}",
            flush=True,
        )
        print("  " + ", ".join(f"{part} {value:.1f}" for part, value in sorted(found.items())), flush=True)
        if given.json:
            given.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
