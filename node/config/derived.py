"""Values derived from the run's configuration and this machine's: the worker's specification, a protocol's settings."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

from node.config.manifest import Manifest
from node.config.peer_config import DEFAULT_BANDWIDTH, MAX_RANKS, PeerConfig
from node.config.run_config import RunConfig
from node.config.sizes import megabytes
from node.config.toml import ConfigError
from node.machine.rules import MachineRules, WeeklyHours
from node.membership.hello import StageSeat
from node.ranks.division import RanksError, units
from node.runtime.metrics import workers_here
from node.tasks.hf.settings import HfMachine, HfSettings, HfValues, ModelPins
from node.tasks.name import LOOP
from node.tasks.spec import GptValues, LoopValues, OwnValues, PacedValues, StageValues, Values, WorkerSpec
from protocols.allreduce.plan import cost_seconds, least_claim
from protocols.base import Member, Settings, stage_scope
from protocols.history.chain import Archive, Chain, state_root
from protocols.vectors.codec import codec
from protocols.vectors.views import fragment_sizes
from protocols.wire import MAX_ROSTER


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
    if mine.own_loop:
        if run.stages > 1:
            raise ConfigError("a run with stages is not for own loops: leave out --own-loop", "own_loop")
        return WorkerSpec(LoopValues(), run.recipe, seed, timeout_seconds=mine.worker_timeout_seconds)
    if run.task == LOOP:
        raise ConfigError("each peer of this run trains by a script of its own: see docs/own-loop.md", "own_loop")
    devices = training_devices(run, mine)
    has_group = len(devices) > 1 or mine.nodes != 1 or mine.offload != "none"
    return WorkerSpec(
        values=_hf_values(run.hf, mine, pins) if run.hf else _values(run),
        recipe=run.recipe,
        stream_seed=seed,
        weights_seed=run.seed,
        data=mine.data,
        held_out=sample,
        device=devices[0],
        devices=devices if has_group else (),
        shard="zero3" if mine.tensor_parallel > 1 else mine.shard if len(devices) > 1 or mine.nodes != 1 else "zero1",
        tensor_parallel=mine.tensor_parallel,
        nodes=int(mine.nodes),
        rendezvous=mine.rendezvous or "",
        meeting_seconds=mine.rendezvous_timeout_seconds,
        offload="" if mine.offload == "none" else mine.offload,
        threads=0 if mine.threads == "auto" else mine.threads,
        peers_here=1 + workers_here(),
        precision=mine.precision,
        checkpointing=mine.checkpointing,
        nice=mine.nice,
        stage=stage,
        timeout_seconds=mine.worker_timeout_seconds,
    )


def training_devices(run: RunConfig, mine: PeerConfig) -> tuple[str, ...]:
    """The devices that this peer trains on together, as `WorkerSpec` names them: one or several.

    Raises ConfigError for settings of several devices that do not fit each other, this machine or the run.
    """
    names = mine.devices
    if not names and mine.ranks and mine.ranks > 1:
        names = _first_devices(mine.device, mine.ranks)
    single = "a run with stages" if run.stages > 1 else "task paced" if run.paced else ""
    if single and len(names) > 1:
        which = "--devices" if mine.devices else "--ranks"
        raise ConfigError(f"{single} trains on one device of each peer, not {len(names)}: leave out {which}", "devices")
    rows = run.gpt.rows if run.gpt else run.hf.rows if run.hf else None
    if not names and not single and mine.ranks is None and mine.device == "auto" and not workers_here():
        free = min(visible_gpus(), run.recipe.batches * (rows or 1) * mine.tensor_parallel, MAX_RANKS)
        free -= free % mine.tensor_parallel
        names = tuple(f"cuda:{number}" for number in range(free)) if free > 1 else ()
    if mine.nodes != 1:
        _check_cluster(mine, single)
        names = names or lent_devices(mine)
    if mine.offload != "none" and not single:  # one device, too, is a group's then, which needs its name
        names = names or _first_devices(mine.device, 1)
    names = names or (mine.device,)
    alone = ("shard", "tensor_parallel", *(("offload",) if single else ()))
    for key in alone if len(names) == 1 and mine.nodes == 1 else ():
        if getattr(mine, key) not in ("auto", 1, "none"):
            raise ConfigError(
                f"{mine.origins[key]}: this peer trains on one device: name several by --devices, or leave it out", key
            )
    _check_division(mine, names)
    if rows:
        try:
            units(run.recipe.batches, rows, 0, len(names) // mine.tensor_parallel)
        except RanksError as error:
            raise ConfigError(str(error), "devices") from None
    return names


def _check_division(mine: PeerConfig, names: tuple[str, ...]) -> None:
    """Settings of several devices that contradict each other (ConfigError)."""
    if mine.offload != "none" and names[0] in ("cpu", "mps"):
        where = "the CPU" if names[0] == "cpu" else "a Mac"
        raise ConfigError(f"{mine.origins['offload']}: on {where} all memory is the host's: leave it out", "offload")
    if mine.offload == "parameters" and len(names) == 1 and mine.nodes == 1:
        raise ConfigError(
            f"{mine.origins['offload']}: one device keeps its parameters: give --offload optimizer", "offload"
        )
    if mine.offload == "parameters" and len(names) == mine.tensor_parallel > 1 and mine.nodes == 1:
        raise ConfigError(
            f"{mine.origins['offload']}: devices that all share each layer keep its parameters: give --offload "
            "optimizer, or more devices than --tensor-parallel",
            "offload",
        )
    if mine.offload == "parameters" and mine.shard != "zero3":
        raise ConfigError(
            f"{mine.origins['offload']}: only --shard zero3 keeps parameters on the host: give it", "offload"
        )
    if mine.tensor_parallel > 1 and mine.shard in ("zero1", "zero2"):
        raise ConfigError(
            f"{mine.origins['shard']}: beside tensor parallel the parameters are divided, too: give --shard zero3",
            "shard",
        )
    if len(names) % mine.tensor_parallel:
        raise ConfigError(
            f"{mine.origins['tensor_parallel']}: {len(names)} devices do not make groups of {mine.tensor_parallel}: "
            "give a number that divides theirs",
            "tensor_parallel",
        )


def _check_cluster(mine: PeerConfig, single: str) -> None:
    if single:
        raise ConfigError(f"{mine.origins['nodes']}: {single} trains on one device of each peer: leave it out", "nodes")
    if mine.device == "mps" or "mps" in mine.devices:
        raise ConfigError(f"{mine.origins['nodes']}: machines with mps cannot train together", "nodes")


def lent_devices(mine: PeerConfig) -> tuple[str, ...]:
    """The devices of one machine of a cluster, by their numbers: those that the user names, else all GPUs, or a CPU."""
    if mine.devices or mine.ranks:
        return mine.devices or _first_devices(mine.device, mine.ranks or 1)
    if mine.device == "auto" and (gpus := min(visible_gpus(), MAX_RANKS)):
        return tuple(f"cuda:{number}" for number in range(gpus))
    return _first_devices(mine.device, 1)


def unused_gpus(mine: PeerConfig, spec: WorkerSpec) -> str:
    """A line for a user who named no devices, if this peer leaves GPUs of its machine unused; else empty."""
    if mine.device != "auto" or mine.devices or mine.ranks or mine.nodes != 1 or isinstance(spec.values, PacedValues):
        return ""
    used, gpus = spec.devices or ("cuda:0",), visible_gpus()
    if gpus <= len(used):
        return ""
    return f"this peer trains on {', '.join(used)}; this machine has {gpus} GPUs: name those to use by --devices"


def visible_gpus() -> int:
    """GPUs of CUDA. The peer does not use one, and what uses one is forked from a process that was forked earlier."""
    import torch

    return torch.cuda.device_count()


def _first_devices(kind: str, count: int) -> tuple[str, ...]:
    gpus = visible_gpus() if kind in ("auto", "cuda") else 0
    if kind == "cpu" or (kind == "auto" and not gpus):
        return ("cpu",) * count
    if kind == "mps":
        if count == 1:
            return ("mps",)
        raise ConfigError("mps is one device: leave --ranks out, or give --device cpu", "ranks")
    if gpus < count:
        raise ConfigError(
            f"{count} rank{'s' * (count > 1)}, and this machine has {gpus} GPU{'s' * (gpus != 1)} that this build "
            "of torch can use: give fewer, name GPUs several times by --devices, or give --device cpu",
            "ranks",
        )
    return tuple(f"cuda:{number}" for number in range(count))


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
        elements=_averaged_elements(manifest, stage),
        chunk_elements=config.chunk_elements,
        bandwidth=mine.bandwidth_bytes_per_second,
        bandwidth_limit=bandwidth_limit,
        incarnation=incarnation,
        fork_peers=config.fork_peers,
        robust=config.robust,
        max_weight=config.weight_limit,
        overlaps=config.recipe.overlaps,
        schedule=config.schedule,
        voters=config.voters or MAX_ROSTER,
        clusters=bool(config.clusters),
    )


def chain_of(manifest: Manifest, seat: StageSeat | None, archive: Archive) -> Chain:
    """The rounds of a run, or of the stage of a seat, as far as the archive has them."""
    run, stage = bytes.fromhex(manifest.run_id), seat.stage if seat else 0
    first, scope, root, trained = manifest.founder, manifest.scope(stage), manifest.root_of(stage), 0
    if seat:
        first = seat.member
    for base in seat.base if seat else ():
        assert seat
        scope, trained = stage_scope(stage, seat.number), base.trained
        root = state_root(base.parameters_root, base.velocity_root, 0)
    chain = Chain(run, scope, (first,), root, archive, fragments=manifest.config.recipe.fragment_count)
    chain.trained_before = trained
    return chain


def _averaged_elements(manifest: Manifest, stage: int) -> tuple[int, ...]:
    """Elements of each fragment that a round may average; of all parameters in a run without fragments."""
    return fragment_sizes(sum(manifest.elements_of(stage)), manifest.config.recipe.fragment_count)


def vector_bytes(manifest: Manifest, stage: int = 0) -> int:
    """Bytes of what a peer sends in a round, encoded."""
    return codec(manifest.config.codec).encoded_bytes(max(_averaged_elements(manifest, stage)))


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
    return StageValues(
        number, bounds, config.activation_codec, config.gradient_codec, elements, f"{me.peer}/{me.incarnation}"
    )


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
