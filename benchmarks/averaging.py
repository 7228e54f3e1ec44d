"""Averaging between processes: butterfly over a real network, compared with the time to move its bytes alone.

    python -m benchmarks.averaging --peers 4 --megabytes 100 --codec fp32 --rounds 3 [--path libp2p] [--json]

Each peer is a process with its own p2pd on the loopback and its own vector. Data goes directly, or over libp2p.
In each round all peers

move      send 2 (N - 1) / N encoded vectors, as many as a round, to the next peer over one plain stream; no reduction
average   average through `protocols.butterfly.averager`, from the cut to the return of `mean`

The time of a step runs from the first peer's start to the last peer's end. Results must be the same bits at all peers.
They must equal the float64 mean computed here from the same seeds, within the codec's bound. Otherwise the exit code is
1. Processor seconds count from the command to the last answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any, Protocol, Self

import psutil
import torch

from benchmarks.averaging_setup import Setup
from protocols.vectors.codec import CODECS
from protocols.wire import MAX_ROSTER
from tests.sim.arguments import Parser

BOUNDS = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 1e-2, "int8": 3e-2, "int4": 0.25, "e3m0": 0.35, "topk": 1.0}
"""Bounds on the relative L2 error of a mean of normal vectors, encoded twice. topk sends most only in later rounds."""
START_SECONDS = 60.0
STOP_SECONDS = 10.0
LOGGED_LINES = 12
SPARE_SECONDS = 60.0  # how long an answer may take beyond the round's own deadline

Answer = dict[str, Any]


class Main(Protocol):
    def __call__(self, arguments: Sequence[str] | None = None) -> int: ...


class SwarmError(Exception):
    """A peer's process ended or did not answer."""


def ends_in_one_line(program: str) -> Callable[[Main], Main]:
    """Decorate a benchmark's `main`: exit code 1 after one line on stderr if its swarm fails, 130 after Ctrl-C."""

    def decorate(main: Main) -> Main:
        @wraps(main)
        def decorated(arguments: Sequence[str] | None = None) -> int:
            try:
                return main(arguments)
            except SwarmError as error:
                print(f"{program}: {error}", file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                return 130

        return decorated

    return decorate


class Swarm:
    """Peers in processes of their own, all of which end with `async with`.

    Attributes:
        ups: each peer's first answer: its id and address, its process id and its p2pd's.
    """

    def __init__(
        self, setup: Setup, module: str = "benchmarks.averaging_peer", environment: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
            module: what each peer's process runs.
            environment: environment variables of the peers, besides those of this process.
        """
        self._module, self._environment = module, os.environ | (environment or {})
        self._directory = tempfile.TemporaryDirectory(prefix="starling-bench-")
        self.setup = replace(setup, directory=self._directory.name)
        self.ups: list[Answer] = []
        self._processes: list[Process] = []

    async def __aenter__(self) -> Self:
        try:
            for rank in range(self.setup.peers):
                self._processes.append(await self._start(rank))
            self.ups = await self.collect("up", START_SECONDS)
            await self.all("connect", peers=[(up["peer"], up["address"]) for up in self.ups])
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                await self._ask_to_end()
        finally:
            await self._end()

    async def _ask_to_end(self) -> None:
        for process in self._processes:
            process.stdin.close()  # type: ignore[union-attr]
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await asyncio.gather(*(process.wait() for process in self._processes))

    async def _end(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()  # its p2pd dies with it
            await process.wait()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started and left behind
        self._directory.cleanup()

    async def _start(self, rank: int) -> Process:
        setup = asdict(self.setup_of(rank))
        with self._log(rank).open("wb") as log:
            return await asyncio.create_subprocess_exec(
                *self.prefix(rank), sys.executable, "-m", self._module, json.dumps(setup),
                stdin=PIPE, stdout=PIPE, stderr=log, cwd=Path(__file__).parents[1], env=self._environment,
                start_new_session=True,  # so that Ctrl-C reaches this process only
            )  # fmt: skip

    def setup_of(self, rank: int) -> Setup:
        """The setup of one peer."""
        return replace(self.setup, rank=rank)

    def prefix(self, rank: int) -> Sequence[str]:
        """Words before the command of one peer, which run it elsewhere."""
        return ()

    def _log(self, rank: int) -> Path:
        """Where a peer's standard error goes."""
        return Path(self.setup.directory) / f"log{rank}"

    async def all(self, command: str, **arguments: Any) -> list[Answer]:
        """Send a command to all peers and return their answers, by rank.

        Raises:
            SwarmError: a peer ended, or did not answer in time.
        """
        for rank in range(self.setup.peers):
            self.tell(rank, command, **arguments)
        return await self.collect(command, self.setup.deadline_seconds + SPARE_SECONDS)

    def tell(self, rank: int, command: str, **arguments: Any) -> None:
        pipe = self._processes[rank].stdin
        assert pipe is not None
        pipe.write(json.dumps({"do": command, **arguments}).encode() + b"\n")

    async def hear(self, rank: int, event: str, seconds: float) -> Answer:
        """The next `event` of a peer. Earlier events of other kinds are dropped."""
        output = self._processes[rank].stdout
        assert output is not None
        try:
            async with asyncio.timeout(seconds):
                while line := await output.readline():
                    answer: Answer = json.loads(line)
                    if answer.pop("event") == event:
                        return answer
        except TimeoutError:
            raise SwarmError(f"peer {rank} did not say {event!r} within {seconds:g} s{self._last(rank)}") from None
        raise SwarmError(f"the process of peer {rank} ended before it said {event!r}{self._last(rank)}")

    def _last(self, rank: int) -> str:
        """The end of a peer's standard error, for a message."""
        lines = self._log(rank).read_text(errors="replace").splitlines()[-LOGGED_LINES:]
        return "".join(f"\n    {line}" for line in lines)

    async def collect(self, event: str, seconds: float) -> list[Answer]:
        """The next `event` of each peer, by rank."""
        return list(await asyncio.gather(*(self.hear(rank, event, seconds) for rank in range(self.setup.peers))))

    async def metered(self, command: str, **arguments: Any) -> list[Answer]:
        """As `all`; each answer also holds the processor seconds used."""
        before = [process_cpu_seconds(up) for up in self.ups]
        answers = await self.all(command, **arguments)
        for up, answer, (process, daemon) in zip(self.ups, answers, before, strict=True):
            now = process_cpu_seconds(up)
            answer |= {"cpu": now[0] - process, "daemon_cpu": now[1] - daemon}
        return answers

    def left_over(self) -> list[int]:
        """The ids of this swarm's processes that still run; a killed one may not have been reaped yet."""
        pids = {up[kind] for up in self.ups for kind in ("pid", "daemon") if kind in up}
        seen = psutil.process_iter(["status"])
        return [each.pid for each in seen if each.pid in pids and each.info["status"] != psutil.STATUS_ZOMBIE]


def process_cpu_seconds(up: Answer) -> tuple[float, float]:
    """Processor seconds that a peer has used so far, and that its p2pd has."""
    process, daemon = (psutil.Process(up[kind]).cpu_times() for kind in ("pid", "daemon"))
    return process.user + process.system, daemon.user + daemon.system


def relative_error(setup: Setup, number: int) -> float:
    """Relative L2 distance of rank 0's result from the weighted mean in float64, piece by piece."""
    result = torch.from_file(str(setup.result), shared=False, size=setup.elements, dtype=torch.float32)
    total = sum(setup.tokens(rank) for rank in range(setup.peers))
    off, whole = 0.0, 0.0
    for pieces in zip(*(setup.pieces(rank, number) for rank in range(setup.peers)), strict=True):
        low = pieces[0][0]
        mean = torch.zeros(len(pieces[0][1]), dtype=torch.float64)
        for rank, (_, piece) in enumerate(pieces):
            mean += piece.double() * (setup.tokens(rank) / total)
        off += float((result[low : low + len(mean)].double() - mean).square().sum())
        whole += float(mean.square().sum())
    return float((off / whole) ** 0.5)


async def play_round(swarm: Swarm, number: int, floor: bool = True) -> Answer:
    """Play one round: move the bytes alone, then average. Returns the report."""
    await swarm.all("make", round=number)
    moved = await swarm.metered("move") if floor else []
    averaged = await swarm.metered("average", round=number)
    results = await swarm.all("digest")
    error = await asyncio.to_thread(relative_error, swarm.setup, number)
    report: Answer = {
        "round": number,
        "seconds": span_seconds(averaged),
        "outcomes": [answer["outcome"] for answer in averaged],
        "identical": len({result["digest"] for result in results}) == 1,
        "relative_error": error,
        "peers": [a | r for a, r in zip(averaged, results, strict=True)],
    }
    if moved:
        report |= {
            "floor_seconds": span_seconds(moved),
            "floor": moved,
            "ratio": span_seconds(averaged) / span_seconds(moved),
        }
    report["ok"] = report["identical"] and error <= BOUNDS[swarm.setup.codec]
    return report


def span_seconds(answers: Sequence[Answer]) -> float:
    """Seconds from the first start to the last end."""
    return float(max(answer["ended"] for answer in answers) - min(answer["began"] for answer in answers))


def show(report: Answer) -> None:
    """Print one round."""
    same = "the same bits" if report["identical"] else "RESULTS DIFFER"
    print(
        f"round {report['round']}: averaged in {report['seconds']:.3f} s; the bytes alone"
        f" {report['floor_seconds']:.3f} s; ratio {report['ratio']:.2f}; {same}; relative error"
        f" {report['relative_error']:.1e}{'' if report['ok'] else ': NOT OK'}"
    )
    print("  peer  outcome     mean s   cpu s  p2pd s  sent MB  recv MB  lag p99/max ms  busy max ms  RSS MB (peak)")
    for rank, peer in enumerate(report["peers"]):
        print(
            f"  {rank:4}  {peer['outcome']:10}{peer['ended'] - peer['began']:8.3f}{peer['cpu']:8.2f}"
            f"{peer['daemon_cpu']:8.2f}{peer['sent'] / 1e6:9.1f}{peer['received'] / 1e6:9.1f}"
            f"{1e3 * peer['lag_p99']:9.0f} /{1e3 * peer['lag_max']:4.0f}{1e3 * peer['busy_max']:13.0f}"
            f"{peer['rss'] / 1e6:8.0f} ({peer['rss_peak'] / 1e6:.0f})",
            flush=True,
        )


def summary(reports: Sequence[Answer]) -> Answer:
    """Minimum and median over the rounds. Processor seconds are the whole swarm's, for one round."""

    def both(values: Sequence[float]) -> tuple[float, float]:
        return round(min(values), 4), round(median(values), 4)

    def cpu(step: str, kind: str) -> tuple[float, float]:
        return both([sum(peer[kind] for peer in report[step]) for report in reports])

    return {
        "seconds": both([report["seconds"] for report in reports]),
        "floor_seconds": both([report["floor_seconds"] for report in reports]),
        "ratio": both([report["ratio"] for report in reports]),
        **{kind: cpu("peers", kind) for kind in ("cpu", "daemon_cpu")},
        **{f"floor_{kind}": cpu("floor", kind) for kind in ("cpu", "daemon_cpu")},
        **{kind: max(p[kind] for r in reports for p in r["peers"]) for kind in ("lag_max", "busy_max", "rss_peak")},
        "ok": all(report["ok"] for report in reports),
    }


async def measure(setup: Setup, rounds: int) -> list[Answer]:
    """Play and print the rounds; stop at the first wrong one."""
    reports: list[Answer] = []
    async with Swarm(setup) as swarm:
        for number in range(rounds):
            reports.append(await play_round(swarm, number))
            show(reports[-1])
            if not reports[-1]["ok"]:
                break
    return reports


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("python -m benchmarks.averaging", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", type=int, default=4, help=f"2 to {MAX_ROSTER} processes (default %(default)s)")
    parser.add_argument(
        "--megabytes", type=float, default=100.0, help="of float32 in each vector (default %(default)s)"
    )
    parser.add_argument("--codec", choices=sorted(CODECS), default="fp32", help="default %(default)s")
    parser.add_argument("--path", choices=("direct", "libp2p"), default="direct", help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="one JSON object with everything, as the last line")
    options = parser.parse_args(arguments)
    if not 2 <= options.peers <= MAX_ROSTER:
        parser.error(f"argument --peers: 2 to {MAX_ROSTER}, not {options.peers}")
    if not 0.01 <= options.megabytes <= 10_000:
        parser.error(f"argument --megabytes: 0.01 to 10000, not {options.megabytes:g}")
    if options.rounds < 1:
        parser.error(f"argument --rounds: at least 1, not {options.rounds}")
    return options


@ends_in_one_line("benchmarks.averaging")
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    elements = int(options.megabytes * 250_000)
    deadline_seconds = 120 + 2 * options.megabytes
    setup = Setup(options.peers, elements, options.codec, deadline_seconds, path=options.path)
    load = os.getloadavg()[0]
    reports = asyncio.run(measure(setup, options.rounds))
    short = summary(reports)
    print(
        f"{options.peers} x {options.megabytes:g} MB, {options.codec}, min / median: averaged in"
        f" {short['seconds'][0]:.3f} / {short['seconds'][1]:.3f} s; the bytes alone"
        f" {short['floor_seconds'][0]:.3f} / {short['floor_seconds'][1]:.3f} s;"
        f" ratio {short['ratio'][0]:.2f} / {short['ratio'][1]:.2f};"
        f" load before: {load:.1f} on {os.cpu_count()} cores"
    )
    if options.json:
        print(json.dumps({**vars(options), "load": load, "cores": os.cpu_count(), **short, "reports": reports}))
    return 0 if short["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
