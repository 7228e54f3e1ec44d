"""Values derived from the run's configuration and this machine's: the worker's specification, a protocol's settings."""

from __future__ import annotations

import hashlib
from pathlib import Path

from node.config.manifest import Manifest
from node.config.peer_config import PeerConfig
from node.config.run_config import RunConfig
from node.machine.hours import WeeklyHours
from node.machine.rules import MachineRules
from node.runtime.metrics import workers_here
from node.tasks.spec import GptValues, OwnValues, PacedValues, StageValues, Values, WorkerSpec
from protocols.base import Member, Settings

KEEP_ROUNDS = 4
"""Rounds whose reduced parts stay in memory for members that missed them. A member further behind uses state sync."""


def worker_spec(
    run: RunConfig, mine: PeerConfig, seed: int, sample: Path | None = None, stage: StageValues | None = None
) -> WorkerSpec:
    """Specification of this peer's worker in a run.

    Args:
        seed: seed of this peer's data stream.
        sample: file of the run's evaluation sample; None for the founder, which makes the sample.
        stage: this peer's stage; None in a run without stages.
    """
    return WorkerSpec(
        values=_values(run),
        recipe=run.recipe,
        stream_seed=seed,
        weights_seed=run.seed,
        data=mine.data,
        held_out=sample,
        device=mine.device,
        threads=0 if mine.threads == "auto" else mine.threads,
        peers_here=1 + workers_here(),
        precision=mine.precision,
        nice=mine.nice,
        stage=stage,
    )


def protocol_settings(manifest: Manifest, mine: PeerConfig, incarnation: int, stage: int = 0) -> Settings:
    """Settings of the run's averaging protocol, or of its stage's, for this incarnation of this peer."""
    config = manifest.config
    return Settings(
        codec=config.codec,
        elements=manifest.elements_of(stage),
        chunk_elements=config.chunk_elements,
        bandwidth=mine.bandwidth_bytes_per_second,
        incarnation=incarnation,
        keep_rounds=KEEP_ROUNDS,
        fork_peers=config.fork_peers,
        robust=config.robust or "mean",
        schedule=config.schedule or "random",
        digest=config.digest or "sha256",
    )


def stage_values(config: RunConfig, bounds: tuple[int, ...], elements: int, number: int, me: Member) -> StageValues:
    """Specification of one stage.

    Args:
        bounds, elements: as in `StageValues`.
        number: of the stage.
    """
    return StageValues(number, bounds, config.activation_codec, elements, f"{me.peer}/{me.incarnation}")


def machine_rules(mine: PeerConfig) -> MachineRules:
    """When this machine pauses."""
    return MachineRules(
        hours=tuple(map(WeeklyHours.parse, mine.hours)),
        battery=mine.on_battery == "pause",
        metered=mine.on_metered == "pause",
        memory=mine.on_low_memory == "pause",
        in_use=mine.when_in_use == "pause",
        busy=mine.when_busy == "pause",
    )


def stream_seed(me: Member) -> int:
    """Seed of a member's data stream: each incarnation has its own, unless it resumes one from a checkpoint."""
    return int.from_bytes(hashlib.sha256(f"{me.peer}/{me.incarnation}".encode()).digest()[:7], "big")


def _values(run: RunConfig) -> Values:
    if run.gpt is not None:
        return GptValues(run.gpt.shape, run.gpt.rows)
    if run.options is not None:
        return OwnValues(run.task, run.options)
    assert run.paced is not None
    return PacedValues(run.paced.elements, run.paced.tokens_per_step, run.paced.step_seconds)
