"""Is `plan` right? Its tokens/s beside those of simulated swarms, and its advice beside the fastest of these.

    python -m benchmarks.planning [--widths 128,512] [--links 10,100,1000] [--peers 8] [--json FILE]

Each row is a model and a link, each column a way to train: whole, whole with overlap, 2, 4 and 8 stages. A cell plays
the protocol in virtual time, through `tests.sim`, rounds included: computing takes what the model's blocks take on this
machine, measured at the start, and bytes take their time on the links. Drivers choose star or chain as in a run. To be
played at all, payloads, vectors and uplinks are scaled down by one factor, so that they take as long. A cell has the
simulated thousands of tokens/s, in brackets the planned ones, and `c` where the plan is a chain. The last column: how
much slower than the fastest the way is that `plan` takes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from node.planning.costs import MICROBATCH_SECONDS, Outlook, Pipeline, Workload, stage_seconds
from node.planning.machines import Machine, PlannedSwarm
from node.planning.outlook import MeasuredModel, best, measured_model, outlooks
from node.tasks.paced_stage import SIZES, PacedStage
from node.tasks.partition import cut
from node.training.stage_learner import StageCompute
from protocols.base import Member
from protocols.pipeline.job import JobResult, StageJob, StageSizes
from protocols.pipeline.settings import PipelineSettings
from protocols.pipeline.ways import Chains
from tests.sim import loop as simloop
from tests.sim.arguments import Parser, at_least_one
from tests.sim.faults import Faults
from tests.sim.pipeline_world import PipelineWorld
from tests.sim.process import prepare
from tests.sim.scenario import Scenario
from tests.sim.world import World

ROUNDS = 4
PAYLOAD_BYTES = 2048  # of a simulated activation
LATENCY_SECONDS = 0.03
LAYERS, CONTEXT, INNER_STEPS = 6, 128, 20
MEGABIT = 1e6 / 8


@dataclass(frozen=True, slots=True)
class Cell:
    width: int
    megabits: int
    way: str
    planned: float  # tokens/s
    simulated: float
    is_chain: bool  # planned


class PaddedStage(PacedStage):
    """A paced stage whose payloads have the sizes of another model's."""

    sizes: StageSizes

    def run(self, job: StageJob, outer: object = None) -> JobResult:
        lengths = [SIZES.of(each) for each in job.kind.takes]
        payloads = tuple(bytes(data)[:length] for data, length in zip(job.payloads, lengths, strict=True))
        found = super().run(replace(job, payloads=payloads))
        padded = (
            bytes(data).ljust(self.sizes.of(each), b"\0")
            for data, each in zip(found.payloads, job.kind.gives, strict=True)
        )
        return replace(found, payloads=tuple(padded))


class Whole(World):
    """Each peer holds the whole model."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.network.latency_seconds = LATENCY_SECONDS


class Staged(PipelineWorld):
    def __init__(self, scenario: Scenario, sizes: StageSizes) -> None:
        super().__init__(scenario)
        self.network.latency_seconds, self._sizes = LATENCY_SECONDS, sizes

    def stage_compute(self, index: int, me: Member) -> StageCompute:
        assert self.scenario.elements
        name = f"{me.peer}/{me.incarnation}"
        stage = PaddedStage(self.scenario.elements, index, self.microbatch_tokens, name)
        stage.sizes = self._sizes
        return stage

    def pipeline(self) -> PipelineSettings:
        return replace(super().pipeline(), sizes=self._sizes)

    @property
    def chains(self) -> Chains:
        return Chains.AUTO


def whole(work: Workload, machine: Machine, peers: int, scale: float, overlaps: bool) -> float:
    """Tokens/s of all peers of a simulated swarm without stages, from the first round's end to that of the last."""
    scenario = Scenario(
        peers=peers,
        rounds=ROUNDS,
        faults=Faults(),
        codec="int8",
        elements=int(work.parameters * scale),
        chunk_elements=4096,
        inner_steps=work.inner_steps,
        uplinks=(machine.upload * scale,) * peers,
        step_seconds=(work.step_seconds / machine.speed,) * peers,
        jitter=False,
        overlaps=overlaps,
    )
    return _steps_per_second(Whole(scenario), stages=1, tokens=256) * work.step_tokens


def staged(work: Workload, cut_up: Pipeline, stages: int, machine: Machine, peers: int, scale: float) -> float:
    """The same with stages."""
    partition = cut(cut_up.blocks, stages)
    seconds = [
        cut_up.batches * (stage_seconds(partition, stage) / machine.speed + MICROBATCH_SECONDS)
        for stage in range(stages)
    ]
    sizes = (cut_up.activation_bytes, cut_up.gradient_bytes, cut_up.target_bytes)
    x, gradient, targets = (max(256, int(size * scale)) for size in sizes)
    scenario = Scenario(
        peers=peers,
        rounds=ROUNDS,
        faults=Faults(),
        codec="int8",
        elements=int(work.parameters * scale / stages),
        chunk_elements=4096,
        inner_steps=work.inner_steps,
        uplinks=(machine.upload * scale,) * peers,
        step_seconds=tuple(seconds[index % stages] for index in range(peers)),
        jitter=False,
        stages=stages,
        batches=cut_up.batches,
        lookahead=cut_up.lookahead,
    )
    world = Staged(scenario, replace(SIZES, activation_bytes=x, gradient_bytes=gradient, target_bytes=targets))
    return _steps_per_second(world, stages, world.microbatch_tokens) * cut_up.tokens


def _steps_per_second(world: World, stages: int, tokens: int) -> float:
    """Steps, or microbatches, that the peers of stage 0 take in a second after their first round."""
    simloop.run(world.run())
    if world.network.bugs:
        raise world.network.bugs[0]
    found = 0.0
    for peer in world.peers[::stages]:
        reports = world.histories[peer]
        found += sum(each["tokens"] for each in reports[1:]) / tokens / (reports[-1]["time"] - reports[0]["time"])
    return found


def model_of(width: int) -> MeasuredModel:
    """A model of this width, measured on this machine."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(f"[gpt]\nlayers = {LAYERS}\nwidth = {width}\nheads = 4\ncontext = {CONTEXT}\n")
        file.write(f"[recipe]\ninner_steps = {INNER_STEPS}\nrounds = {ROUNDS}\n")
        file.flush()
        return measured_model(Path(file.name), time.perf_counter)


def simulated(model: MeasuredModel, outlook: Outlook, machine: Machine, peers: int) -> float:
    """Tokens/s of the way that an outlook is about."""
    one = next(each for each in model.staged.values() if not isinstance(each, str))
    scale = PAYLOAD_BYTES / one.activation_bytes
    cut_up = model.staged.get(outlook.stages)
    if isinstance(cut_up, Pipeline):
        return staged(model.whole, cut_up, outlook.stages, machine, peers, scale)
    return whole(model.whole, machine, peers, scale, outlook.overlaps)


def row(model: MeasuredModel, width: int, megabits: int, peers: int) -> list[Cell]:
    """Play all ways with one model and one kind of link, and print them."""
    machine = Machine(megabits * MEGABIT, megabits * MEGABIT)
    found = [
        each for each in outlooks(model, PlannedSwarm((machine,) * peers, LATENCY_SECONDS)) if each.tokens_per_second
    ]
    cells = [
        Cell(width, megabits, each.way, each.tokens_per_second, simulated(model, each, machine, peers), each.is_chain)
        for each in found
    ]
    taken = best(found)
    assert taken
    most = max(cells, key=lambda each: each.simulated)
    slower = 1 - next(each.simulated for each in cells if each.way == taken.way) / most.simulated
    shown = " | ".join(f"{each.simulated / 1e3:.3g} ({each.planned / 1e3:.3g}{' c' * each.is_chain})" for each in cells)
    print(f"| {width} | {megabits} Mbit/s | {shown} | {taken.way}, {slower:.0%} |", flush=True)
    return cells


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.planning", description="The command `plan` beside simulated swarms.")
    parser.add_argument("--widths", type=numbers, default=[128, 512])
    parser.add_argument("--links", type=numbers, default=[10, 100, 1000], help="megabits/s, each way")
    parser.add_argument("--peers", type=at_least_one, default=8)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args(arguments)
    prepare()
    cells: list[Cell] = []
    for width in options.widths:
        model = model_of(width)
        if not cells:
            ways = [each.way for each in outlooks(model, PlannedSwarm((Machine(1e9, 1e9),) * options.peers))]
            print(
                f"| width | link | {' | '.join(ways)} | taken, slower than the fastest |\n"
                + "|---" * (len(ways) + 3)
                + "|"
            )
        for megabits in options.links:
            cells += row(model, width, megabits, options.peers)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in cells], indent=1) + "\n")
    return 0


def numbers(text: str) -> list[int]:
    return [at_least_one(each) for each in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
