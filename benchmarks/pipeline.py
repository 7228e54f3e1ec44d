"""Pipelines of unequal, unreliable peers: SWARM routing beside fixed columns.

    python -m benchmarks.pipeline throughput [--seeds 0:3] [--json FILE]
    python -m benchmarks.pipeline churn [--seeds 0:3] [--lookahead 8] [--json FILE]
    python -m benchmarks.pipeline microbatches [--seeds 0:2]
    python -m benchmarks.pipeline silence [--seeds 0:6]
    python -m benchmarks.pipeline evaluation [--seeds 0:3]
    python -m benchmarks.pipeline chains [--seeds 0:3]

throughput  microbatches/s between two rounds, as a share of the capacity of all replicas of the slowest stage.
            `equal`: all replicas are equally fast. `1:4`: the four replicas of each stage have speeds 1, 2, 3 and 4.
            Stars and chains, without lookahead and with 8
microbatches  the same for other numbers of stages and microbatches: two equal replicas in each stage, .5 s a microbatch
churn       the same over many rounds. 5 % of the replicas restart each minute; each is away for half a minute
silence     one of two or three equal replicas of the middle stage falls silent, each seed at another moment of a round
            of 8 steps: the rate after it, as a share of the rate in the minute before
evaluation  two replicas in each of three stages, 2 s a microbatch, rounds of 4 steps: the pause of a driver between two
            rounds without evaluation, with evaluation beside the next round, and with as many samples between both
chains      two equal replicas in each of four stages at 20 Mbit/s, .1 s a microbatch, 128 tokens at width 512 in bf16:
            a star, in which the driver carries all activations, beside a chain, in which stages pass them on; and the
            driver's upload for each microbatch, beside the bytes that follow from the sizes

`tests.sim` provides the peers, the protocol, and in `churn` the averaging, in virtual time. Links take 50 ms; a replica
of speed 1 takes .4, 1 or 2 s for a microbatch. `columns` is the baseline: replica i of each stage forms a column with
replica i of the others, in an order drawn from the seed. A column runs GPipe's schedule (Huang et al. 2019): all
forwards, all backwards, a step. Nothing is rerouted: if a member is away, its column waits, and repeats its step from
the last checkpoint. Columns average at no cost.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from benchmarks.planning import PaddedStage
from node.session.round_evaluator import RoundEvaluator
from node.tasks.paced_stage import PacedStage
from node.training.stage_learner import StageCompute
from node.training.stage_replica import StageSeconds
from node.training.stage_trainer import DrivingTrainer, ServingTrainer
from protocols.base import LocalProgress, Member, PeerId, Trainer
from protocols.pipeline.held_out import MAX_SAMPLES, HeldOutLoss, usual_samples
from protocols.pipeline.job import StageSizes
from protocols.pipeline.settings import PipelineSettings
from protocols.pipeline.ways import Chains
from tests.sim import loop as simloop
from tests.sim.arguments import Parser, seeds
from tests.sim.faults import Crash, Faults
from tests.sim.host import EPOCH
from tests.sim.pipeline_world import FORWARD_SHARE, PipelineWorld
from tests.sim.process import prepare
from tests.sim.scenario import Scenario
from tests.support.status_examples import REPORT

STAGES, REPLICAS, BATCHES = 3, 4, 16
LATENCY_SECONDS = 0.05
LOOKAHEADS = (0, 8)
MICROBATCH_SECONDS = (0.4, 1.0, 2.0)
"""Of a replica of speed 1: from small models to those that a volunteer's machine is needed for."""
STAGE_NUMBERS, BATCH_NUMBERS = (2, 3, 4, 6), (8, 16, 32)
CHURN_MICROBATCH_SECONDS = 0.4
SPEEDS = {"equal": (2.0, 2.0, 2.0, 2.0), "1:4": (1.0, 2.0, 3.0, 4.0)}
WARM_SECONDS, MEASURED_SECONDS = 60.0, 240.0
CHURN_A_MINUTE, AWAY_SECONDS = 0.05, 30.0
CHURN_STEPS = 20
"""Inner steps of a round under churn, about a minute."""
CHURN_SECONDS = 1800.0
SILENT_STEPS, SILENT_AFTER_SECONDS = 8, 80.0
"""Inner steps of a round, of about 50 s; a replica falls silent then, or up to a round later."""
SILENT_REPLICAS = (2, 3)
SILENT_WINDOWS = (0.0, 6.0, 10.0, 15.0, 20.0)
EVALUATED_STEPS, EVALUATED_SECONDS, SLOW_SECONDS = 4, 2400.0, 2.0
EVALUATIONS = ("none", "beside", "between")
CHAIN_STAGES, CHAIN_LINK = 4, 20e6 / 8
CHAIN_SIZES = StageSizes(activation_bytes=2 * 128 * 512, gradient_bytes=2 * 128 * 512, target_bytes=128)
CHAIN_MICROBATCH_SECONDS = 0.1
CHAIN_WARM_SECONDS, CHAIN_SECONDS = 20.0, 80.0


W = TypeVar("W", bound="MeasuredWorld")


@dataclass(frozen=True, slots=True)
class Throughput:
    """Shares of the slowest stage's capacity."""

    what: str
    seed: int
    swarm: float
    columns: float
    lookahead: int
    is_chain: bool

    @property
    def way(self) -> str:
        return ("chain" if self.is_chain else "star") + (f", A = {self.lookahead}" if self.lookahead else "")


class MeasuredWorld(PipelineWorld):
    """A pipeline that runs for a set time and is not judged."""

    def __init__(self, scenario: Scenario, seconds: float) -> None:
        super().__init__(scenario)
        self.network.latency_seconds = LATENCY_SECONDS
        self._seconds = seconds

    async def run(self) -> float:
        """Run until the time is over; returns it."""
        for peer, rate in zip(self.peers, self.scenario.uplinks or (), strict=True):
            self.network.join(peer, rate)
        for peer in self.peers:
            self._start(peer)
        self.injector.start()
        await self._wait(self._seconds)
        return self.now

    def goes_on(self, peer: str) -> bool:
        return True

    def rate(self, since: float, until: float = math.inf) -> float:
        """Microbatches/s that stage 0 counts in that time."""
        done = (time for time, event in self.events if event.kind == "counted" and event.stage == 0)
        return sum(since <= time < until for time in done) / (min(until, self._seconds) - since)


def shuffled(speeds: Sequence[float], microbatch_seconds: float, seed: int) -> list[list[float]]:
    """For each stage, the microbatches/s of its replicas, in a random order."""
    rng = random.Random(f"speeds/{seed}")
    rates = [speed / microbatch_seconds for speed in speeds]
    return [rng.sample(rates, len(rates)) for _ in range(STAGES)]


def swarm(
    rates: Sequence[Sequence[float]],
    seed: int,
    inner_steps: int,
    faults: Faults,
    seconds: float,
    batches: int = BATCHES,
    lookahead: int = 0,
) -> MeasuredWorld:
    """A world that has run for so long.

    Args:
        rates: microbatches/s of the replicas of each stage.
        batches, lookahead: B and A.
    """
    return played(MeasuredWorld(scenario_of(rates, seed, inner_steps, faults, batches, lookahead), seconds))


def scenario_of(
    rates: Sequence[Sequence[float]],
    seed: int,
    inner_steps: int,
    faults: Faults,
    batches: int = BATCHES,
    lookahead: int = 0,
) -> Scenario:
    stages = len(rates)
    times = [batches / rates[index % stages][index // stages]
             for index in range(stages * len(rates[0]))]  # fmt: skip
    return Scenario(
        peers=len(times),
        rounds=1_000_000,
        seed=seed,
        faults=faults,
        codec="fp32",
        elements=64,
        inner_steps=inner_steps,
        uplinks=(12.5e6,) * len(times),
        step_seconds=tuple(times),
        jitter=False,
        stages=stages,
        batches=batches,
        lookahead=lookahead,
    )


def played(world: W) -> W:
    simloop.run(world.run())
    if world.network.bugs:
        raise world.network.bugs[0]
    return world


def gpipe_seconds(rates: Sequence[float]) -> float:
    """Seconds of one step of a column: B forwards through all stages, then B backwards, all in order."""
    forward = [FORWARD_SHARE / rate for rate in rates]
    backward = [(1 - FORWARD_SHARE) / rate for rate in rates]
    free = [0.0] * len(rates)
    arrived = []
    for _ in range(BATCHES):
        time = 0.0
        for stage, seconds in enumerate(forward):
            free[stage] = time = max(free[stage], time) + seconds
            time += LATENCY_SECONDS
        arrived.append(time - LATENCY_SECONDS)
    for time in reversed(arrived):
        for stage in reversed(range(len(rates))):
            free[stage] = time = max(free[stage], time) + backward[stage]
            time += LATENCY_SECONDS
    return free[0]


def columns(rates: Sequence[Sequence[float]], away: Sequence[tuple[int, float]] = (), seconds: float = 1.0) -> float:
    """Microbatches/s of fixed columns.

    Args:
        away: (index of a peer, time of its death), in order of time. It returns after `AWAY_SECONDS`.
    """
    total = 0.0
    for column in range(REPLICAS):
        step = gpipe_seconds([stage[column] for stage in rates])
        if not away:
            total += BATCHES / step
            continue
        now, steps = WARM_SECONDS, 0
        for _, dies in sorted((index, time) for index, time in away if index // STAGES == column):
            if dies >= now:
                steps += int((dies - now) / step)  # the step under way is lost
            now = max(now, dies + AWAY_SECONDS)
        steps += int(max(0.0, seconds - now) / step)
        total += BATCHES * steps / (seconds - WARM_SECONDS)
    return total


def throughput(seed: int) -> Iterator[Throughput]:
    """Compare the ways of SWARM routing with columns for both kinds of speeds, between two rounds."""
    for each, (what, speeds) in itertools.product(MICROBATCH_SECONDS, SPEEDS.items()):
        rates = shuffled(speeds, each, seed)
        seconds, capacity = WARM_SECONDS + MEASURED_SECONDS * max(1.0, each), sum(rates[0])
        fixed = columns(rates) / capacity
        for is_chain, lookahead in itertools.product((False, True), LOOKAHEADS):
            scenario = scenario_of(rates, seed, 1_000_000, Faults(), lookahead=lookahead)
            world = played(MeasuredWorld(replace(scenario, chains=is_chain), seconds))
            share = world.rate(WARM_SECONDS) / capacity
            yield Throughput(f"{what}, {each:g} s", seed, share, fixed, lookahead, is_chain)


def churn(seed: int, lookahead: int) -> Iterator[Throughput]:
    """Compare both routings under the same restarts, drawn from the seed."""
    rng = random.Random(f"churn/{seed}")
    peers, away, time = STAGES * REPLICAS, [], WARM_SECONDS
    while (time := time + rng.expovariate(CHURN_A_MINUTE * peers / 60.0)) < CHURN_SECONDS - AWAY_SECONDS:
        away.append((rng.randrange(peers), time))
    free = dict.fromkeys(range(peers), 0.0)
    kept = []
    for index, at in away:  # the dead do not die again
        if at >= free[index]:
            kept.append((index, at))
            free[index] = at + AWAY_SECONDS + 1.0
    rates = shuffled(SPEEDS["equal"], CHURN_MICROBATCH_SECONDS, seed)
    faults = Faults().also(*(Crash(f"p{index}", at, AWAY_SECONDS) for index, at in kept))
    world = swarm(rates, seed, CHURN_STEPS, faults, CHURN_SECONDS, lookahead=lookahead)
    rate = world.rate(WARM_SECONDS) / sum(rates[0])
    fixed = columns(rates, sorted(kept, key=lambda each: each[1]), CHURN_SECONDS) / sum(rates[0])
    yield Throughput("churn", seed, rate, fixed, lookahead, False)


def microbatches(numbers: Sequence[int], lookahead: int) -> None:
    """Print the share of the capacity by stages and microbatches; means over the seeds."""
    print("| stages | " + " | ".join(f"{batches} microbatches" for batches in BATCH_NUMBERS) + " |")
    print("|---" * (1 + len(BATCH_NUMBERS)) + "|")
    for stages in STAGE_NUMBERS:
        rates = [[2.0, 2.0]] * stages
        cells = []
        for batches in BATCH_NUMBERS:
            seconds = WARM_SECONDS + MEASURED_SECONDS
            worlds = (swarm(rates, seed, 1_000_000, Faults(), seconds, batches, lookahead) for seed in numbers)
            cells.append(f"{fmean(world.rate(WARM_SECONDS) for world in worlds) / sum(rates[0]):.2f}")
        print(f"| {stages} | {' | '.join(cells)} |", flush=True)


def silent_rates(replicas: int, seed: int, at_cut: bool) -> list[float]:
    """The share of the rate that is left in each of `SILENT_WINDOWS`, and last from 6 to 20 s.

    The replica falls silent at any moment of a round; or in the last five seconds, so that its stage may not know yet
    that it is gone when the round is called.
    """
    rng = random.Random(f"silence/{seed}")
    rates = [[1.0 / CHURN_MICROBATCH_SECONDS] * replicas] * STAGES
    round_seconds = SILENT_STEPS * BATCHES / rates[0][0]
    at = SILENT_AFTER_SECONDS + rng.random() * round_seconds
    if at_cut:
        whole = swarm(rates, seed, SILENT_STEPS, Faults(), SILENT_AFTER_SECONDS + 2 * round_seconds)
        ends = (report["time"] - EPOCH for report in whole.histories["p1"])
        at = next(end for end in ends if end > SILENT_AFTER_SECONDS) - rng.random() * 5.0
    peers = [f"p{index}" for index in range(STAGES * replicas)]
    faults = Faults().silence(["p1"], peers, at)
    world = swarm(rates, seed, SILENT_STEPS, faults, at + SILENT_WINDOWS[-1])
    windows = (*itertools.pairwise(SILENT_WINDOWS), (SILENT_WINDOWS[1], SILENT_WINDOWS[-1]))
    return [world.rate(at + since, at + until) / world.rate(at - 60.0, at) for since, until in windows]


def silence(numbers: Sequence[int]) -> None:
    """Print what is left of the rate when one replica falls silent."""
    names = [f"{since:g}-{until:g} s" for since, until in itertools.pairwise(SILENT_WINDOWS)]
    print("| replicas, moment | seed | " + " | ".join(names) + " | 6-20 s |")
    print("|---" * (3 + len(names)) + "|")
    for replicas, at_cut in itertools.product(SILENT_REPLICAS, (False, True)):
        what, found = f"{replicas}, {'before a cut' if at_cut else 'any'}", []
        for seed in numbers:
            found.append(silent_rates(replicas, seed, at_cut))
            print(f"| {what} | {seed} | " + " | ".join(f"{each:.2f}" for each in found[-1]) + " |", flush=True)
        means = [fmean(column) for column in zip(*found, strict=True)]
        print(f"| {what} | mean | " + " | ".join(f"{each:.2f}" for each in means) + " |", flush=True)


class EvaluatedWorld(MeasuredWorld):
    """Drivers evaluate each round: not at all, beside the next one, or before it."""

    def __init__(self, scenario: Scenario, seconds: float, when: str) -> None:
        super().__init__(scenario, seconds)
        self._when = when
        self._evaluators: dict[PeerId, RoundEvaluator] = {}
        self._trainings: dict[PeerId, list[tuple[float, float]]] = {}  # of each driver: beginning and end, by round
        self.samples: list[int] = []  # of each loss that is reported

    def seconds(self, index: int) -> StageSeconds:
        paced = super().seconds(index)
        return replace(paced, outer=paced.forward)

    def stage_compute(self, index: int, me: Member) -> StageCompute:
        stage = super().stage_compute(index, me)
        assert isinstance(stage, PacedStage)
        stage.held_out_microbatches = MAX_SAMPLES
        return stage

    async def after_round(self, index: int, trainer: Trainer) -> None:
        peer = self.peers[index]
        if peer not in self.drivers or self._when == "none":
            return
        scenario = self.scenario
        found = HeldOutLoss(self.trained_rounds(peer), usual_samples(scenario.inner_steps, scenario.batches))
        if self._when == "between":
            await self._evaluate(peer, found)
            self.samples.append(found.samples)
            return
        if peer not in self._evaluators:
            evaluator = self._evaluators[peer] = RoundEvaluator(partial(self._evaluate, peer))
            evaluator.on_end = lambda report, found, why: self.samples.append(found.samples * found.is_enough)
            self.spawn(peer, evaluator.run())
        self._evaluators[peer].start(REPORT, found)

    async def _evaluate(self, peer: PeerId, found: HeldOutLoss) -> None:
        await self.drivers[peer].evaluate(found, self.now + 600.0)

    def _checked(self, me: Member, trainer: DrivingTrainer | ServingTrainer) -> Trainer:
        checked = super()._checked(me, trainer)
        if me.peer in self.of_stage(0):
            train = checked.train

            async def timed(*arguments: Any, **options: Any) -> LocalProgress:
                began = self.now
                work = await train(*arguments, **options)
                self._trainings.setdefault(me.peer, []).append((began, self.now))
                return work

            checked.train = timed  # type: ignore[method-assign]
        return checked

    def pauses(self) -> list[float]:
        """Seconds from the end of a driver's training for a round to the beginning of that for the next."""
        ways = (itertools.pairwise(each) for each in self._trainings.values())
        return [later[0] - earlier[1] for way in ways for earlier, later in way]


def evaluation(numbers: Sequence[int]) -> None:
    """Print the pauses between rounds by when they are evaluated."""
    print("| evaluation | seed | pause: mean, s | longest | share of the capacity | losses | samples |")
    print("|---|---|---|---|---|---|---|")
    rates = [[1 / SLOW_SECONDS] * 2] * STAGES
    for seed, when in itertools.product(numbers, EVALUATIONS):
        scenario = scenario_of(rates, seed, EVALUATED_STEPS, Faults())
        world = played(EvaluatedWorld(scenario, EVALUATED_SECONDS, when))
        pauses, rate = world.pauses(), world.rate(WARM_SECONDS) / sum(rates[0])
        losses = [each for each in world.samples if each]
        samples = f"{min(losses)} to {max(losses)}" if losses else "–"
        cells = (f"{fmean(pauses):.2f}", f"{max(pauses):.2f}", f"{rate:.3f}")
        print(
            f"| {when} | {seed} | {' | '.join(cells)} | {len(losses)} of {len(world.samples)} | {samples} |", flush=True
        )


class ChainedWorld(MeasuredWorld):
    """Payloads have the sizes of a model's. Counts what drivers send after the warm-up."""

    def __init__(self, scenario: Scenario, seconds: float, chains: Chains) -> None:
        super().__init__(scenario, seconds)
        self._chains, self._sent = chains, 0

    @property
    def chains(self) -> Chains:
        return self._chains

    def pipeline(self) -> PipelineSettings:
        return replace(super().pipeline(), sizes=CHAIN_SIZES)

    def stage_compute(self, index: int, me: Member) -> StageCompute:
        assert self.scenario.elements
        stage = PaddedStage(self.scenario.elements, index, self.microbatch_tokens, f"{me.peer}/{me.incarnation}")
        stage.sizes = CHAIN_SIZES
        return stage

    async def _wait(self, seconds: float) -> None:
        await super()._wait(CHAIN_WARM_SECONDS)
        self._sent -= self._sent_bytes()
        await super()._wait(seconds - CHAIN_WARM_SECONDS)
        self._sent += self._sent_bytes()

    def _sent_bytes(self) -> int:
        return sum(self.network.totals(peer)[0] for peer in self.of_stage(0))

    @property
    def upload_bytes(self) -> float:
        """Of all drivers, for each microbatch."""
        return self._sent / (self.rate(CHAIN_WARM_SECONDS) * (self._seconds - CHAIN_WARM_SECONDS))


def chains(numbers: Sequence[int]) -> None:
    """Print rates and the drivers' upload of both ways."""
    print("| lookahead | seed | star | chain | ratio | upload in a star: of the formula | in a chain |")
    print("|---" * 7 + "|")
    rates = [[1 / CHAIN_MICROBATCH_SECONDS] * 2] * CHAIN_STAGES
    for lookahead, seed in itertools.product(LOOKAHEADS, numbers):
        scenario = scenario_of(rates, seed, 1_000_000, Faults(), lookahead=lookahead)
        scenario = replace(scenario, uplinks=(CHAIN_LINK,) * scenario.peers)
        ways = (Chains.NEVER, Chains.ALWAYS)
        star, chain = (played(ChainedWorld(scenario, CHAIN_SECONDS, way)) for way in ways)
        found = [world.rate(CHAIN_WARM_SECONDS) for world in (star, chain)]
        shares = [world.upload_bytes / world.pipeline().upload_bytes(world is chain) for world in (star, chain)]
        cells = (*(f"{rate:.2f}/s" for rate in found), f"{found[1] / found[0]:.2f}", *(f"{x:.3f}" for x in shares))
        print(f"| {lookahead} | {seed} | {' | '.join(cells)} |", flush=True)


def print_shares(play: Callable[[int], Iterator[Throughput]], numbers: Sequence[int]) -> list[Throughput]:
    """Print a row for each play as it ends, and the means over the seeds."""
    found: list[Throughput] = []
    for seed in numbers:
        for what, ways in itertools.groupby(play(seed), key=lambda each: each.what):
            mine = [*ways]
            if not found:
                header = ["speeds", "seed", *(each.way for each in mine), "fixed columns", "ratio of each"]
                print(f"| {' | '.join(header)} |\n{'|---' * len(header)}|")
            print_row(what, str(seed), mine)
            found += mine
    for what in dict.fromkeys(each.what for each in found):
        print_row(what, "mean", [each for each in found if each.what == what])
    return found


def print_row(what: str, seed: str, plays: Sequence[Throughput]) -> None:
    fixed = fmean(each.columns for each in plays)
    shares = [
        fmean(each.swarm for each in plays if each.way == way) for way in dict.fromkeys(each.way for each in plays)
    ]
    ratios = ", ".join(f"{share / fixed:.2f}" for share in shares)
    print(f"| {what} | {seed} | {' | '.join(f'{share:.2f}' for share in (*shares, fixed))} | {ratios} |", flush=True)


PLAIN = {"silence": silence, "evaluation": evaluation, "chains": chains}
"""Experiments that take seeds only."""
EXPERIMENTS = ("throughput", "churn", "microbatches", *PLAIN)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.pipeline", description="Pipelines of unequal, unreliable peers.")
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--seeds", type=seeds, default=range(3))
    parser.add_argument("--lookahead", type=int, default=0, help="A, microbatches of the next step (default: 0)")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args(arguments)
    if options.lookahead < 0:
        parser.error(f"--lookahead is 0 or more, not {options.lookahead}")
    if options.lookahead and options.experiment in ("throughput", *PLAIN):
        parser.error(f"{options.experiment} takes no lookahead: leave it out")
    if options.json and options.experiment in ("microbatches", *PLAIN):
        parser.error(f"{options.experiment} writes no JSON: leave --json out")
    prepare()
    if options.experiment == "microbatches":
        microbatches(options.seeds, options.lookahead)
        return 0
    if options.experiment in PLAIN:
        PLAIN[options.experiment](options.seeds)
        return 0
    play = throughput if options.experiment == "throughput" else partial(churn, lookahead=options.lookahead)
    found = print_shares(play, options.seeds)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
