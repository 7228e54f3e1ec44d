"""Values derived from the run's configuration and this machine's: the worker's specification, a protocol's settings."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

from node.config.manifest import Manifest
from node.config.peer_config import DEFAULT_BANDWIDTH, PeerConfig
from node.config.run_config import RunConfig
from node.config.sizes import megabytes
from node.config.toml import ConfigError
from node.machine.rules import MachineRules, WeeklyHours
from node.runtime.metrics import workers_here
from node.tasks.hf.settings import HfMachine, HfSettings, HfValues, ModelPins
from node.tasks.spec import GptValues, OwnValues, PacedValues, StageValues, Values, WorkerSpec
from protocols.allreduce.plan import cost_seconds, least_claim
from protocols.base import Member, Settings
from protocols.vectors.codec import codec
from protocols.wire import MAX_ROSTER

KEEP_ROUNDS = 4
"""Rounds whose reduced parts stay in memory for members that missed them. A member further behind uses state sync."""


def worker_spec(
    run: RunConfig,
    mine: PeerConfig,
    seed: int,
    sample: Path | None = None,
    stage: StageValues | None = None,
    pins: ModelPins | None = None,
) -> WorkerSpec:
    """Specification of this peer's worker in a run, with `seed` for its data stream.

    `sample` (file of the run's evaluation sample) and `pins` are None for the founder, which makes them. Raises
    ConfigError if the task needs a model, and this machine's configuration names none.
    """
    return WorkerSpec(
        values=_hf_values(run.hf, mine, pins) if run.hf else _values(run),
        recipe=run.recipe,
        stream_seed=seed,
        weights_seed=run.seed,
        data=mine.data,
        held_out=sample,
        device=mine.device,
        threads=0 if mine.threads == "auto" else mine.threads,
        peers_here=1 + workers_here(),
        precision=mine.precision,
        checkpointing=mine.checkpointing,
        nice=mine.nice,
        stage=stage,
        timeout_seconds=mine.worker_timeout_seconds,
    )


def protocol_settings(
    manifest: Manifest,
    mine: PeerConfig,
    incarnation: int,
    stage: int = 0,
    bandwidth_limit: Callable[[], float] = lambda: math.inf,
) -> Settings:
    """Settings of the run's averaging protocol. `bandwidth_limit` returns what this peer may send, bytes/s."""
    config = manifest.config
    return Settings(
        codec=config.codec,
        elements=manifest.elements_of(stage),
        chunk_elements=config.chunk_elements,
        bandwidth=mine.bandwidth_bytes_per_second,
        bandwidth_limit=bandwidth_limit,
        incarnation=incarnation,
        keep_rounds=KEEP_ROUNDS,
        fork_peers=config.fork_peers,
        robust=config.robust,
        schedule=config.schedule,
    )


def vector_bytes(manifest: Manifest, stage: int = 0) -> int:
    """Bytes of what a peer sends in a round, encoded."""
    return codec(manifest.config.codec).encoded_bytes(max(manifest.elements_of(stage)))


def check_caps(manifest: Manifest, mine: PeerConfig, stage: int = 0) -> None:
    """Refuse a limit (ConfigError) with which this peer would be late in each round, and make all others wait.

    What the others declare is not known yet: they are taken to have the default bandwidth.
    """
    claim, size = mine.claim_bytes_per_second, vector_bytes(manifest, stage)
    least, seconds = least_claim(size, DEFAULT_BANDWIDTH)
    if claim >= min(least, mine.bandwidth_bytes_per_second):
        return
    which = "upload" if mine.upload_limit_bytes_per_second == claim else "download"
    wish = f"give --{which}-limit {1.005 * least / 1e6:.3g} or more, or none"
    raise ConfigError(
        f"the {which} limit of {megabytes(claim)}/s is too low for this run: a round's {megabytes(size)} would take "
        f"{size / claim:.0f} s, and others wait {seconds:.0f} s at most: {wish}"
    )


def cap_cost_seconds(manifest: Manifest, mine: PeerConfig, members: int, stage: int = 0) -> float:
    """About how much longer a round takes with this peer's limits, if the others send as fast as it could."""
    size, declared = vector_bytes(manifest, stage), mine.bandwidth_bytes_per_second
    return cost_seconds(mine.claim_bytes_per_second, declared, size, min(members, MAX_ROSTER))


def stage_values(config: RunConfig, bounds: tuple[int, ...], elements: int, number: int, me: Member) -> StageValues:
    return StageValues(number, bounds, config.activation_codec, elements, f"{me.peer}/{me.incarnation}")


def machine_rules(mine: PeerConfig) -> MachineRules:
    return MachineRules(
        hours=tuple(map(WeeklyHours.parse, mine.hours)),
        battery=mine.on_battery == "pause",
        metered=mine.on_metered == "pause",
        memory=mine.on_low_memory == "pause",
        heat=mine.on_heat == "pause",
        in_use=mine.when_in_use == "pause",
        busy=mine.when_busy == "pause",
    )


def stream_seed(me: Member) -> int:
    """Seed of a member's data stream: each incarnation has its own, unless it resumes one from a checkpoint."""
    return int.from_bytes(hashlib.sha256(f"{me.peer}/{me.incarnation}".encode()).digest()[:7], "big")


def _hf_values(settings: HfSettings, mine: PeerConfig, pins: ModelPins | None) -> HfValues:
    if mine.model is None:
        like = f"the founder's is {pins.base}, {pins.size / 1e9:.2f} GB" if pins else "a folder, or ORG/NAME@REVISION"
        raise ConfigError(f"task hf needs a model on this machine: give it by --model ({like})", "model")
    files = (str(each or "") for each in (mine.held_out, mine.template))
    machine = HfMachine(mine.model, mine.compile, *files)
    return HfValues(settings, machine, pins)


def _values(run: RunConfig) -> Values:
    if run.gpt is not None:
        return GptValues(run.gpt.shape, run.gpt.rows)
    if run.options is not None:
        return OwnValues(run.task, run.options)
    assert run.paced is not None
    return PacedValues(run.paced.elements, run.paced.tokens_per_step, run.paced.step_seconds)
