"""A training loop of one's own in a swarm (`node.library`): what it costs, what it learns, and hivemind's beside it.

    python -m benchmarks.own_loop cost [--model w128] [--steps 50] [--pairs 6]
    python -m benchmarks.own_loop held-out [--seeds 0:3] [--rounds 8] [--steps 50] [--ways plain lightning …]
    python -m benchmarks.own_loop hivemind [--repeats 2] [--loss 0.2]

cost        a plain script beside the same script in a swarm of two, in turn: A B A B … A turn is a round. The other
            peer computes nothing. `swarm.step()` between rounds is timed call by call
held-out    two peers that train a small language model by scripts, and two that train it as a task, in turn
hivemind    the two scripts of docs/examples: seconds and steps until each of two peers has this held-out loss

All processes are real, on the loopback; each trains with one thread.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from benchmarks.own_loop_script import RECIPE, WAYS, Turn
from tests.sim.arguments import Parser, at_least_one, seeds

HIGHEST_STEP_SECONDS, LOWEST_SHARE, LARGEST_DIFFERENCE = 50e-6, 0.98, 0.01
START_SECONDS, TURN_SECONDS, RUN_SECONDS = 90.0, 120.0, 300.0
EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
SCRIPT = ("-m", "benchmarks.own_loop_script")
_HIVEMIND_OWN_ADVICE = '    averaging_timeout=10.0,\n    averager_opts={"request_timeout": 1.0},\n'


class Script:
    """A process with a script; `lines` are those of its standard output, each with the time at which it came."""

    def __init__(self, home: Path, name: str, *command: str, inside: Sequence[str] = ()) -> None:
        """`inside`: a prefix of the command that keeps the process id."""
        self.name, self.directory, self._log = name, home / name, home / f"{name}.log"
        given = {key: value for key, value in os.environ.items() if not key.startswith("NODE_")}
        own = {"NODE_LISTEN": "/ip4/127.0.0.1/tcp/0", "NODE_NAT": "false", "NODE_STATE_DIR": str(self.directory)}
        root = str(Path(__file__).parents[1])
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*inside, sys.executable, *command],
                env=given | own | {"PYTHONPATH": root, "PYTHONWARNINGS": "ignore"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self.lines: list[tuple[float, str]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self.lines.append((time.monotonic(), line.decode(errors="replace").strip()))

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def until(self, what: str, found: Callable[[], Any], seconds: float) -> Any:
        """The first value of `found` that is true."""
        deadline = time.monotonic() + seconds
        while not (value := found()):
            if not self.running or time.monotonic() > deadline:
                raise SystemExit(f"{self.name}: no {what}\n{self.said()[-2000:]}")
            time.sleep(0.01)
        return value

    def until_lines(self, count: int, seconds: float) -> None:
        self.until("line", lambda: len(self.lines) >= count, seconds)

    def until_loss(self, loss: float, seconds: float) -> tuple[float, int]:
        """When the script first printed at most this loss, and its steps until then."""
        found: tuple[float, int] = self.until("loss", lambda: reached(self.lines, loss), seconds)
        return found

    def address(self) -> str:
        """Of its peer, for others."""
        pattern = re.compile(r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+")

        def found() -> str:
            match = pattern.search(self.said()) or pattern.search("\n".join(line for _, line in self.lines))
            return match[0] if match else ""

        return str(self.until("address", found, START_SECONDS))

    def tell(self) -> None:
        """Send an empty line."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def ask(self) -> str:
        """The answer to an empty line."""
        before = len(self.lines)
        self.tell()
        self.until_lines(before + 1, TURN_SECONDS)
        return self.lines[-1][1]

    def wait(self, seconds: float) -> None:
        self._process.wait(seconds)

    def end(self) -> None:
        """Ask it to end, and kill it if it does not."""
        if self.running:
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def reports(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "rounds.jsonl").read_text().splitlines()]


@contextmanager
def scripts() -> Iterator[Callable[..., Script]]:
    """A function that starts scripts, which all end with the context."""
    started: list[Script] = []
    with tempfile.TemporaryDirectory() as folder:

        def start(name: str, *command: str, inside: Sequence[str] = ()) -> Script:
            started.append(Script(Path(folder), name, *command, inside=inside))
            return started[-1]

        try:
            yield start
        finally:
            for each in reversed(started):
                each.end()


def load() -> str:
    return f"load {os.getloadavg()[0]:.2f}"


# -- cost -------------------------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], share: int) -> float:
    return quantiles(values, n=100, method="inclusive")[share - 1]


def share_of_speed(bare: Turn, swarm: Turn, rounds: bool) -> float:
    """Tokens per second of the script in the swarm over those of the bare one; without `rounds`, between these."""
    seconds = swarm.seconds if rounds else swarm.seconds - swarm.round_seconds
    return swarm.tokens / seconds / (bare.tokens / bare.seconds)


def cost(model: str, steps: int, pairs: int) -> bool:
    print(f"{model}, rounds of {steps} steps, {load()}")
    print(f"{'pair':>4} {'bare tok/s':>10} {'in a swarm':>10} {'share':>6} {'between rounds':>14} {'round, s':>8}")
    measured: list[tuple[Turn, Turn]] = []
    with scripts() as start:
        swarm = start("swarm", *SCRIPT, "swarm", model, str(steps))
        start("partner", *SCRIPT, "partner", model, str(steps), swarm.address())
        bare = start("bare", *SCRIPT, "bare", model, str(steps))
        for each in (bare, swarm):
            each.until_lines(1, START_SECONDS)
            each.ask()  # warms up
        for pair in range(1, 2 * pairs + 1):
            a, b = (Turn(**json.loads(each.ask())) for each in (bare, swarm))
            is_whole = len(b.calls) >= steps - 1
            print(
                f"{pair:>4} {a.tokens / a.seconds:>10.0f} {b.tokens / b.seconds:>10.0f} "
                f"{share_of_speed(a, b, True):>6.1%} {share_of_speed(a, b, False):>14.1%} {b.round_seconds:>8.3f}"
                + ("" if is_whole else "  left out: others had ended the round while the script waited for its turn"),
                flush=True,
            )
            measured += [(a, b)] * is_whole
            if len(measured) == pairs:
                break
        else:
            raise SystemExit("too few whole rounds: the machine is too busy, take a smaller --model")
    calls = [seconds for _, each in measured for seconds in each.calls]
    between = [share_of_speed(*each, rounds=False) for each in measured]
    whole = [share_of_speed(*each, rounds=True) for each in measured]
    in_calls = sum(calls) / sum(each.seconds - each.round_seconds for _, each in measured)
    print(f"swarm.step() between rounds, {len(calls)} calls: median {median(calls) * 1e6:.1f} us, ", end="")
    print(f"p99 {percentile(calls, 99) * 1e6:.0f} us, longest {max(calls) * 1e6:.0f} us; {in_calls:.2%} of the time")
    for words, shares in (("with rounds", whole), ("between rounds", between)):
        figures = f"median {median(shares):.1%}, {min(shares):.1%} to {max(shares):.1%}"
        print(f"tokens/s over the bare script's, {words}: {figures}")
    held = median(calls) <= HIGHEST_STEP_SECONDS and median(between) >= LOWEST_SHARE
    print(f"bounds 50 us, 98 % between rounds: {'held' if held else 'BROKEN'}; {load()}")
    return held


# -- held-out loss ----------------------------------------------------------------------------------------------------


def as_scripts(way: str, seed: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    """The reports of one of two peers that train by scripts."""
    with scripts() as start:
        numbers = [str(rounds), str(steps)]
        a = start("a", *SCRIPT, "train", way, str(seed), str(1000 + 2 * seed), *numbers)
        b = start("b", *SCRIPT, "train", way, str(seed), str(1001 + 2 * seed), *numbers, a.address())
        for each in (a, b):
            each.wait(RUN_SECONDS)
        return a.reports()


def as_task(seed: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    """The reports of one of two peers that train the same as a task."""
    recipe = {**RECIPE, "inner_steps": steps, "rounds": rounds}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        lines = [f"seed = {seed}", 'task = "benchmarks.own_loop_script:task"', "[recipe]"]
        file.write_text("\n".join(lines + [f"{key} = {json.dumps(value)}" for key, value in recipe.items()]) + "\n")
        command = [sys.executable, *f"-m node swarm --peers 2 --rounds {rounds} --no-page --json".split()]
        done = subprocess.run(
            [*command, "--run", str(file), "--dir", str(Path(folder) / "peers"), "--device", "cpu"],
            capture_output=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"the swarm with seed {seed} ended with {done.returncode}: {done.stderr[-2000:]!r}")
        journal = next((Path(folder) / "peers").glob("*/rounds.jsonl"))
        return [json.loads(line) for line in journal.read_text().splitlines()]


def measured(name: str, reports: Sequence[dict[str, Any]]) -> float:
    """The last held-out loss, which is printed."""
    loss, tokens = float(reports[-1]["held_out_loss"]), sum(each["tokens"] for each in reports)
    print(f"{name}: held out {loss:.4f}, {tokens} tokens, in the mean {[len(each['peers']) for each in reports]}")
    return loss


def held_out(numbers: Sequence[int], rounds: int, steps: int, ways: Sequence[str]) -> bool:
    print(f"two peers, w64, {rounds} rounds of {steps} steps, a constant rate, {load()}")
    differences: dict[str, list[float]] = {way: [] for way in ways}
    for seed in numbers:
        task = measured(f"seed {seed}, task", as_task(seed, rounds, steps))
        for way in ways:
            loss = measured(f"seed {seed}, {way}", as_scripts(way, seed, rounds, steps))
            differences[way].append(loss / task - 1)
            print(f"seed {seed}, {way} over task: {loss / task - 1:+.2%}", flush=True)
    for way, each in differences.items():
        print(f"{way}: mean {mean(each):+.2%}")
    held = all(abs(mean(each)) <= LARGEST_DIFFERENCE for each in differences.values())
    print(f"bound {LARGEST_DIFFERENCE:.0%}: {'held' if held else 'BROKEN'}; {load()}")
    return held


# -- hivemind ---------------------------------------------------------------------------------------------------------


def code_lines(text: str) -> list[str]:
    """The lines of a script without its docstring, empty lines and comments."""
    body = text.split('"""', 2)[2]
    return [line for line in body.splitlines() if line.strip() and not line.strip().startswith("#")]


def own_lines(one: str, other: str) -> int:
    """Lines of code that the first script has, and the second has not."""
    changes = difflib.ndiff(code_lines(other), code_lines(one))
    return sum(line.startswith("+ ") for line in changes)


def reached(lines: Sequence[tuple[float, str]], loss: float) -> tuple[float, int] | None:
    """When a script first printed at most this loss, and its steps until then."""
    for when, line in lines:
        if (match := re.search(r"step (\d+): ([\d.]+)", line)) and float(match[2]) <= loss:
            return when, int(match[1])
    return None


def side(library: str, file: Path, loss: float) -> tuple[float, float, float]:
    """Seconds until both train, seconds from there until both have had this loss, and their steps until then (mean)."""
    with scripts() as start:
        launched = time.monotonic()
        a = start("a", str(file))
        b = start("b", str(file), a.address())
        if library != "starling":
            for each in (a, b):
                each.until_lines(2, START_SECONDS)  # the address, and the question
            for each in (a, b):
                each.tell()
        start_times = [each.until_loss(math.inf, START_SECONDS)[0] for each in (a, b)]
        ends = [each.until_loss(loss, RUN_SECONDS) for each in (a, b)]
        begun, seconds = max(start_times), max(when for when, _ in ends) - max(start_times)
        if library == "starling":
            means = sum(len(each["peers"]) == 2 for each in a.reports())
            told = f"{means} means of both, {len(a.reports()) - means} of one"
        else:
            told = f"{a.said().count('Averaged parameters with 2')} means of both, {a.said().count('[ERROR]')} errors"
    steps = [steps for _, steps in ends]
    print(f"{library}: {begun - launched:.1f} s to start, {seconds:.1f} s, steps {steps}; {told}; {load()}", flush=True)
    return begun - launched, seconds, mean(steps)


def hivemind(repeats: int, loss: float) -> bool:
    files = {each: EXAMPLES / f"local_updates_{each}.py" for each in ("starling", "hivemind")}
    ours, theirs = (file.read_text() for file in files.values())
    for name, one, other in (("starling", ours, theirs), ("hivemind", theirs, ours)):
        print(f"{name}: {len(code_lines(one))} lines of code, of which the other has not {own_lines(one, other)}")
    found: dict[str, list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        advised = Path(folder) / "advised.py"
        advised.write_text(theirs.replace("    averaging_timeout=10.0,\n", _HIVEMIND_OWN_ADVICE))
        for _ in range(repeats):
            for library, file in {**files, "hivemind, as its warning advises": advised}.items():
                found.setdefault(library, []).append(side(library, file, loss))
    print(f"until both peers have had a held-out loss of {loss:g}: seconds to start, seconds, steps (medians)")
    for library, figures in found.items():
        print(f"{library}: " + ", ".join(f"{median(column):.1f}" for column in zip(*figures, strict=True)))
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.own_loop", description=(__doc__ or "").splitlines()[0])
    cases = parser.add_subparsers(dest="case", required=True)
    case = cases.add_parser("cost")
    case.add_argument("--model", choices=("mlp", "w64", "w128"), default="w128")
    case.add_argument("--steps", type=at_least_one, default=50, help="of a round")
    case.add_argument("--pairs", type=at_least_one, default=6)
    case = cases.add_parser("held-out")
    case.add_argument("--seeds", type=seeds, default=range(3))
    case.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    case.add_argument("--rounds", type=at_least_one, default=8)
    case.add_argument("--steps", type=at_least_one, default=50, help="of a round")
    case = cases.add_parser("hivemind")
    case.add_argument("--repeats", type=at_least_one, default=2)
    case.add_argument("--loss", type=float, default=0.2)
    options = parser.parse_args(arguments)
    if options.case == "cost":
        return 0 if cost(options.model, options.steps, options.pairs) else 1
    if options.case == "held-out":
        return 0 if held_out(options.seeds, options.rounds, options.steps, options.ways) else 1
    return 0 if hivemind(options.repeats, options.loss) else 1


if __name__ == "__main__":
    sys.exit(main())
