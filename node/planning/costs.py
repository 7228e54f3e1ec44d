"""What a run costs its peers: a model of tokens/s, memory and traffic, whole or in stages. Pure.

It is checked against measured runs by `benchmarks.planning`. Rates are microbatches/s and bytes/s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from node.planning.machines import Machine, PlannedSwarm
from node.tasks.partition import BlockCost, Partition, cut
from protocols.allreduce.plan import expected_seconds, shares
from protocols.pipeline.job import StageSizes
from protocols.pipeline.settings import PipelineSettings
from protocols.pipeline.ways import Chains, Load, chosen_way
from protocols.wire import MAX_ROSTER

BYTES_PER_PARAMETER = 32
"""Weights, gradient, two moments, anchor, outer momentum, pseudo-gradient and mean, in float32."""
PROCESS_BYTES = 700e6
"""PyTorch and Python in two processes, and p2pd."""
ROUND_SECONDS = 0.7
"""Of a round beyond its bytes: offers, votes, the outer step."""
SHIFT_SECONDS = 0.1
"""For which training stops in a round that overlaps with it."""
MICROBATCH_SECONDS = 0.005
"""Of a stage's machine for each microbatch, beyond computing it: messages, copies, commands to the worker."""
FULLEST_PIPELINE = 0.95
"""Of a pipeline's capacity, that it uses at most."""
HEADROOM = 0.9
"""Share of a machine's memory that a plan fills at most."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and how it is trained.

    Attributes:
        step_seconds: of an inner step of the whole model on a machine of speed 1.
        step_tokens: of an inner step.
        inner_steps: of a round.
        parameters: of the whole model.
        vector_bytes: of an encoded vector of so many elements.
        activation_bytes: that a whole batch takes while its gradient is computed.
    """

    step_seconds: float
    step_tokens: int
    inner_steps: int
    parameters: int
    vector_bytes: Callable[[int], int]
    activation_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The same model cut into microbatches. Payloads are those of one microbatch.

    Attributes:
        blocks: of the model, with their costs on a machine of speed 1.
        batches: B, microbatches of an inner step.
        tokens: of a microbatch.
        lookahead: A.
        is_chain: whether stages pass their payloads on to each other, instead of through the driver.
    """

    blocks: tuple[BlockCost, ...]
    batches: int
    tokens: int
    activation_bytes: int
    gradient_bytes: int
    target_bytes: int
    lookahead: int = 0
    is_chain: bool = False


@dataclass(frozen=True, slots=True)
class Outlook:
    """What one way to train is expected to give.

    Attributes:
        way: in words, as in the table.
        stages: 1 if each peer holds the whole model.
        tokens_per_second: of all peers; 0 if it cannot run.
        limit: what would have to be better for more tokens/s; if it cannot run, why.
        memory_bytes: of the fullest machine.
        upload_bytes_per_token: of the peer that sends most, for each of its own tokens.
        idle_peers: that hold nothing: their memory is too small, or there are too many.
        overlaps: whether peers train on while a round averages.
        peers: of each stage.
        is_chain: whether the drivers are expected to choose a chain.
    """

    way: str
    stages: int
    tokens_per_second: float
    limit: str
    memory_bytes: float = 0.0
    upload_bytes_per_token: float = 0.0
    idle_peers: int = 0
    overlaps: bool = False
    peers: tuple[int, ...] = ()
    is_chain: bool = False


def whole_model(work: Workload, machines: PlannedSwarm, overlaps: bool) -> Outlook:
    """Each peer holds the whole model, and all average by butterfly."""
    way = "whole model, overlap" if overlaps else "whole model"
    memory_bytes = BYTES_PER_PARAMETER * work.parameters + work.activation_bytes + PROCESS_BYTES
    able = sorted((each for each in machines.peers if _fits(memory_bytes, each)), key=lambda each: -each.speed)
    if not able:
        return Outlook(way, 1, 0.0, "no machine has the memory", memory_bytes, idle_peers=len(machines.peers))
    peers = able[:MAX_ROSTER]
    # All train until the slower ones have taken their steps, and their work counts by its tokens.
    train_seconds = work.inner_steps * work.step_seconds / sorted(each.speed for each in peers)[len(peers) // 3]
    vector_bytes = work.vector_bytes(work.parameters)
    average_seconds = _average_seconds(vector_bytes, peers, machines.latency_seconds)
    if len(peers) == 1:
        busy = 1.0
    elif overlaps:
        busy = min(1.0, train_seconds / (average_seconds + ROUND_SECONDS))
        busy *= train_seconds / (train_seconds + SHIFT_SECONDS)
    else:
        busy = train_seconds / (train_seconds + average_seconds + ROUND_SECONDS)
    rate = sum(each.speed for each in peers) * work.step_tokens / work.step_seconds
    sent = 2 * (len(peers) - 1) / len(peers) * vector_bytes
    return Outlook(
        way=way,
        stages=1,
        tokens_per_second=busy * rate,
        limit="computing" if busy > 0.7 else "averaging: upload" if average_seconds > ROUND_SECONDS else "short rounds",
        memory_bytes=memory_bytes,
        upload_bytes_per_token=sent / (train_seconds * rate / len(peers)),
        idle_peers=len(machines.peers) - len(peers),
        overlaps=overlaps,
        peers=(len(peers),),
    )


def pipeline(work: Workload, cut_up: Pipeline, stages: int, machines: PlannedSwarm) -> Outlook:
    """Each peer holds one of `stages` stages; stages average by butterfly.

    In a chain if the drivers would choose one by what they measure in a star.
    """
    star, load = _outlook(work, cut_up, stages, machines)
    sizes = StageSizes(cut_up.activation_bytes, cut_up.gradient_bytes, cut_up.target_bytes)
    settings = PipelineSettings(bytes(32), stages, cut_up.batches, sizes, cut_up.lookahead)
    if not chosen_way(settings, Chains.AUTO, load).is_chain:
        return star
    return _outlook(work, replace(cut_up, is_chain=True), stages, machines)[0]


def _outlook(work: Workload, cut_up: Pipeline, stages: int, machines: PlannedSwarm) -> tuple[Outlook, Load]:
    """And what a driver measures."""
    way = f"{stages} stages"
    if stages > len(cut_up.blocks):
        return Outlook(way, stages, 0.0, f"the model has {len(cut_up.blocks)} blocks to cut"), Load()
    partition = cut(cut_up.blocks, stages)
    held = [_stage_memory(partition, stage, cut_up) for stage in range(stages)]
    teams = _teams(partition, machines.peers, held)
    placed = sum(map(len, teams))
    idle_peers = len(machines.peers) - placed
    outlook = Outlook(
        way, stages, 0.0, "", max(held), idle_peers=idle_peers, peers=tuple(map(len, teams)), is_chain=cut_up.is_chain
    )
    if not all(teams):
        few = len(machines.peers) < stages
        return replace(outlook, limit="fewer peers than stages" if few else "too few machines have the memory"), Load()
    rates = [sum(_rate(partition, stage, cut_up, peer) for peer in team) for stage, team in enumerate(teams)]
    narrowest = min(range(stages), key=lambda stage: rates[stage])
    full = _fullness(partition, cut_up, teams, rates[narrowest], machines.latency_seconds)
    rate = full * rates[narrowest]
    train_seconds = work.inner_steps * cut_up.batches * len(teams[0]) / rate
    average_seconds = max(
        _average_seconds(work.vector_bytes(_parameters(partition, stage)), team, machines.latency_seconds)
        for stage, team in enumerate(teams)
    )
    pause_seconds = average_seconds + ROUND_SECONDS if max(map(len, teams)) > 1 else 0.0
    busy = train_seconds / (train_seconds + pause_seconds)
    sent, _ = _traffic(cut_up, 0, stages)
    load = Load(
        rate / len(teams[0]),
        fmean(each.upload for each in teams[0]),
        machines.latency_seconds,
        stages * _seconds(partition, 0) / fmean(each.speed for each in teams[0]),
    )
    found = replace(
        outlook,
        tokens_per_second=busy * rate * cut_up.tokens,
        limit=_limit(partition, cut_up, narrowest, teams[narrowest], full, busy),
        upload_bytes_per_token=sent / cut_up.tokens,
    )
    return found, load


def _limit(
    partition: Partition, cut_up: Pipeline, stage: int, team: Sequence[Machine], full: float, busy: float
) -> str:
    if busy < 0.7:
        return "averaging: upload"
    if full < 0.7:
        return "trips between peers: more recipe.batches fill it better"
    where = "the drivers'" if stage == 0 else f"stage {stage}'s"
    computed = sum(each.speed for each in team) / _seconds(partition, stage)
    sent, received = _traffic(cut_up, stage, partition.stages)
    up, down = sum(each.upload for each in team) / sent, sum(each.download for each in team) / received
    return min((computed, f"{where} computing"), (up, f"{where} upload"), (down, f"{where} download"))[1]


def _fullness(
    partition: Partition, cut_up: Pipeline, teams: Sequence[Sequence[Machine]], rate: float, latency_seconds: float
) -> float:
    """The share of the narrowest stage's capacity that is used: the rest is lost while steps fill and drain.

    A driver's step takes B / r for its microbatches, and a part of the way of one through all stages. Where that way is
    long it takes a multiple of the way: at each stage a microbatch waits for those that other drivers have under way.
    A fit to simulated swarms, in RESULTS: 2 to 8 stages of 1 to 4 replicas, B from 8 to 32, A = 0 and 8.
    """
    stages, batches, ahead = partition.stages, cut_up.batches, cut_up.lookahead
    busy_seconds = batches * len(teams[0]) / rate
    computing = sum(_seconds(partition, stage) / fmean(p.speed for p in team) for stage, team in enumerate(teams))
    trips_seconds = _trips(cut_up, stages) * latency_seconds
    way_seconds = computing + trips_seconds
    for stage, team in enumerate(teams):
        sent, received = _traffic(cut_up, stage, stages)
        way_seconds += sent / fmean(each.upload for each in team) + received / fmean(each.download for each in team)
    if sum(map(len, teams)) == stages:  # one driver, and nothing to wait for
        drained_seconds, waits = (1 - 1 / stages) * computing + trips_seconds, 1.15
    else:
        drained_seconds = (0.4 * stages - 0.6) * way_seconds
        waits = max(1.15, 1.4 + 0.22 * stages + math.log2(batches / 8) * (0.14 * stages - 0.35))
    drained_seconds, waits = drained_seconds / (1 + 0.8 * ahead), waits / (1 + 1.8 * ahead / batches)
    step_seconds = max(busy_seconds + drained_seconds, waits * way_seconds + busy_seconds / 3)
    return min(FULLEST_PIPELINE, busy_seconds / step_seconds)


def _trips(cut_up: Pipeline, stages: int) -> float:
    """One-way trips of a microbatch. In a star each stage is asked for a place before it gets the input."""
    return 3.5 * stages - 3 if cut_up.is_chain else 6 * stages - 8


def _teams(partition: Partition, peers: Sequence[Machine], held: Sequence[float]) -> list[list[Machine]]:
    """Peers of each stage, as joiners are placed: by what they compute, the fastest first, each where least is."""
    stages = partition.stages
    teams: list[list[Machine]] = [[] for _ in range(stages)]
    rates = [0.0] * stages
    for peer in sorted(peers, key=lambda each: (each.memory, -each.speed)):
        open_stages = [k for k in range(stages) if _fits(held[k], peer) and len(teams[k]) < MAX_ROSTER]
        if open_stages:
            stage = min(open_stages, key=lambda k: rates[k])
            teams[stage].append(peer)
            rates[stage] += peer.speed / _seconds(partition, stage)
    return teams


def _rate(partition: Partition, stage: int, cut_up: Pipeline, peer: Machine) -> float:
    sent, received = _traffic(cut_up, stage, partition.stages)
    return min(peer.speed / _seconds(partition, stage), peer.upload / sent, peer.download / received)


def _seconds(partition: Partition, stage: int) -> float:
    return stage_seconds(partition, stage) + MICROBATCH_SECONDS


def stage_seconds(partition: Partition, stage: int) -> float:
    """Of computing a microbatch at a machine of speed 1, which keeps the graph of its forward."""
    return sum(block.backward_seconds for block in partition.of(stage))


def _traffic(cut_up: Pipeline, stage: int, stages: int) -> tuple[float, float]:
    """Bytes that a peer of a stage sends and receives for a microbatch."""
    x, gradient, targets = cut_up.activation_bytes, cut_up.gradient_bytes, cut_up.target_bytes
    if stage == 0 and cut_up.is_chain:
        return x + targets, gradient
    if stage == 0:
        return (stages - 1) * x + (stages - 2) * gradient + targets, (stages - 2) * x + (stages - 1) * gradient
    if stage == stages - 1:
        return gradient, x + targets
    return x + gradient, x + gradient


def _parameters(partition: Partition, stage: int) -> int:
    return sum(block.parameter_bytes for block in partition.of(stage)) // 4


def _stage_memory(partition: Partition, stage: int, cut_up: Pipeline) -> float:
    parameters = _parameters(partition, stage)
    places = cut_up.batches + cut_up.lookahead
    payloads = 2 * cut_up.activation_bytes + cut_up.target_bytes
    graphs = max(64 * 2**20, 8 * parameters)
    more = 4 * parameters if cut_up.lookahead else 0
    return BYTES_PER_PARAMETER * parameters + more + places * payloads + graphs + PROCESS_BYTES


def _fits(memory_bytes: float, peer: Machine) -> bool:
    return memory_bytes <= HEADROOM * peer.memory


def _average_seconds(vector_bytes: int, peers: Sequence[Machine], latency_seconds: float) -> float:
    """Of a butterfly all-reduce."""
    if len(peers) == 1:
        return 0.0
    uplinks = [min(each.upload, each.download) for each in peers]
    fractions = shares(uplinks, [True] * len(peers))
    return expected_seconds(fractions, uplinks, vector_bytes) + 4 * latency_seconds
