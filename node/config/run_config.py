"""The configuration that all peers of a run share. The run's manifest holds it; joiners get it from there.

    name = "my run"
    task = "gpt"            # or "paced", "hf", or a user's own, "package.module:factory"

    [gpt]
    preset = "w128"         # sets the defaults of [gpt] and [recipe]; values beside it override them
    [options]
    width = 32              # for the factory of a user's own task
    [recipe]
    rounds = 32

A loaded configuration holds every value, never the name of a preset, whose meaning may change with the code. Every
value is bounded, because a configuration may come from an untrusted peer, and decides how much memory peers allocate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from node.config.peer_config import FILE_KEYS as OF_THIS_MACHINE
from node.config.task_tables import STRICT, GptTable, PacedTable
from node.config.toml import ConfigError, check_keys, one_line, read_toml, suggestion
from node.tasks import name as names
from node.tasks.gpt_presets import DEFAULT_PRESET, PLAIN_OUTER_STEP, USUAL_OUTER_STEP, Preset, preset, recipe_for
from node.tasks.hf.settings import HfSettings
from node.tasks.recipe import MAX_FRAGMENTS, Recipe, described
from protocols.allreduce.plan import CLAIM_SPREAD
from protocols.base import MAX_STAGES, MAX_WEIGHT
from protocols.registry import (
    ACTIVATION_CODECS,
    CHUNK_ELEMENTS,
    CODECS,
    ROBUST_RULES,
    SCHEDULES,
    TOPK_GRAIN,
    activation_bytes,
    require_known,
)
from protocols.wire import MAX_ROSTER

MAX_STAGE_BATCHES = 64
MAX_LEASED_BYTES = 1 << 30  # Of all microbatches that a replica holds at once, each with its input and a gradient
STAGE_BATCHES = 8  # Microbatches of an inner step in the presets, with stages. The tokens of a step stay the same.
_MIN_CHUNK_ELEMENTS = 1 << 10
_PROTOCOL = "butterfly"

MAX_ROUNDS = 10**7
_RECIPE_LIMITS: Mapping[str, float] = {
    "inner_steps": 10**6,
    "rounds": MAX_ROUNDS,
    "batches": 1 << 12,
    "warmup_steps": 10**9,
    "learning_rate": 1000,
    "outer_learning_rate": 1000,
    "weight_decay": 1000,
    "clip_norm": 1e9,
}
"""Largest values, where `Recipe` itself sets no limit."""

MIN_VOTERS = 3  # fewer could not lose one, and go on
_RECIPE_OF_MODELS = {**asdict(Recipe(50, 16, 2e-3, 0.9, 0.5)), "mean": "token", "decay": "matrices"}
"""Defaults of hf and of users' own tasks."""
_RECIPE_OF_HF = {"learning_rate": 2e-4, "weight_decay": 0.01, "batches": 1}
_PACED_RECIPE = Recipe(
    inner_steps=20, rounds=10_000, learning_rate=1e-3, outer_learning_rate=0.9, outer_momentum=0.5, warmup_steps=0
)


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text!r} holds characters that cannot be printed")
    return text


def _bounded(recipe: Recipe) -> Recipe:
    for name, limit in _RECIPE_LIMITS.items():
        if getattr(recipe, name) > limit:
            raise ValueError(f"{name} must be at most {limit}, not {getattr(recipe, name)!r}")
    return recipe


def _one_of(kind: str, names: Collection[str]) -> AfterValidator:
    return AfterValidator(lambda name: require_known(kind, name, names))


def _known_activations(name: str | None) -> str | None:
    if name is not None and name not in ACTIVATION_CODECS:
        raise ValueError(f"must be one of {', '.join(ACTIVATION_CODECS)}")
    return name


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class RunConfig:
    """Everything that the peers of a run must share. Made by `load_run`, or from a manifest."""

    name: Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_printable)] = described(
        "Name of the run, shown to people.", "starling"
    )
    task: Annotated[str, AfterValidator(names.known)] = described(
        "What is trained: gpt, paced, hf (a model of Hugging Face), loop (each peer's own script), or your own by the "
        "name of its factory, package.module:factory. The first three are set up by the table of their name, your own "
        "by [options].",
        "gpt",
    )
    protocol: Annotated[str, Field(min_length=1, max_length=32)] = described(
        "How peers average. With butterfly, all hold the same bits after each round. With the others, each has a "
        "state of its own: gossip, moshpit, push_sum, and the baselines data_parallel, ring, parameter_server and "
        "parameter_server_async. See docs/protocols.md.",
        _PROTOCOL,
    )
    codec: Annotated[str, _one_of("codec", CODECS)] = described(
        "How vectors are encoded for the network: fp32, fp16, bf16, int8, int4, e3m0 or topk. topk sends the largest "
        "1.6 % and adds the rest to later rounds; it works best with recipe.outer_learning_rate 1 and "
        "recipe.outer_momentum 0, which gpt then takes by itself. With moshpit and the baselines, states travel in "
        "fp32 unless this is fp16.",
        "int8",
    )
    robust: Annotated[str, _one_of("robust rule", ROBUST_RULES)] = described(
        "How reducers average, to tolerate some wrong vectors at some cost: centered_clip, trimmed_mean, median, krum "
        "or multi_krum. The default, mean, is with butterfly that of vectors clipped to the median norm.",
        "mean",
    )
    max_weight: Annotated[float | None, Field(ge=1, le=CLAIM_SPREAD)] = described(
        "With butterfly and moshpit: how many times the median member's work the work of one member may count in a "
        "mean, from 1 to 16, so that one large machine, or one liar, does not own it. Default: 3; with a robust rule "
        "always 1.",
        None,
    )
    schedule: Annotated[str, _one_of("schedule", SCHEDULES)] = described(
        "Which peers a peer exchanges with, in gossip and push_sum. ring: the next one. exponential: those at "
        "distances 1, 2, 4, …. one-peer-exponential: one of these in turn. random, the default: pairs are drawn in "
        "each round.",
        "random",
    )
    stages: Annotated[int, Field(ge=1, le=MAX_STAGES)] = described(
        "Number of stages into which the model is cut, for machines that cannot hold it whole. Each peer holds one "
        "stage, and peers of stage 0 send microbatches through all others. With one, each peer holds the whole model. "
        "For the tasks gpt and paced, with butterfly. See docs/pipeline.md.",
        1,
    )
    activations: Annotated[str | None, AfterValidator(_known_activations)] = described(
        "How activations travel between stages: bf16 (the default with stages), fp32, or int8, half of bf16.", None
    )
    gradients: Annotated[str | None, AfterValidator(_known_activations)] = described(
        "How the gradients of activations travel between stages. Default: as activations.", None
    )
    rebalance: bool | None = described(
        "Only for stages: whether peers move to the stage that needs them most, by themselves. Those with --stage, and "
        "those that were moved by hand, stay. left out: they do not move.",
        None,
    )
    fork: Literal["allowed", "never"] = described(
        "Whether a minority may go on alone once the majority of the roster is gone for long; butterfly only.",
        "allowed",
    )
    min_peers: Annotated[int, Field(ge=1, le=MAX_ROSTER)] = described(
        "Peers that such a minority must have, at least; butterfly only.", 1
    )
    clusters: bool | None = described(
        "Whether the work of peers outside the roster counts, too, through a member of it each (docs/protocols.md). "
        "Default: true with butterfly, without stages and codec topk. false: they only follow.",
        None,
    )
    voters: Annotated[int | None, Field(ge=MIN_VOTERS, le=MAX_ROSTER)] = described(
        "Only with clusters: members that the roster has at most, which vote on each mean. Default: 32.", None
    )
    spread_limit: Annotated[float, Field(gt=0, le=1)] = described(
        "Largest accepted distance of a peer from the mean of all, as a share of the mean's length (0.02 is 2 %); not "
        "for butterfly.",
        0.02,
    )
    admission: Literal["invited"] | None = described(
        "Who may take part: with invited, only peers that a member has invited (docs/private.md). left out: everybody.",
        None,
    )
    inviters: Literal["members", "founder"] | None = described(
        "Only for a private run: who may invite, all members (the default) or only the founder.", None
    )
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = described(
        "Seed of the initial parameters, and of all other random choices that peers must make alike.", 0
    )
    chunk_elements: Annotated[int, Field(ge=_MIN_CHUNK_ELEMENTS, le=CHUNK_ELEMENTS)] = described(
        "Elements of a chunk, the unit in which vectors travel and are reduced.", CHUNK_ELEMENTS
    )
    recipe: Annotated[Recipe, AfterValidator(_bounded)] = described("Inner steps, rounds and outer steps.")
    gpt: GptTable | None = None
    paced: PacedTable | None = None
    hf: HfSettings | None = None
    options: Annotated[dict[str, Any], AfterValidator(names.plain)] | None = None

    def __post_init__(self) -> None:
        table = "options" if names.is_own(self.task) or self.task == names.LOOP else self.task
        if {name for name in _OF_TASKS if getattr(self, name) is not None} != {table}:
            raise ValueError(f"task {self.task} takes the table [{table}] and no other task's")
        if self.robust != "mean" and self.codec == "topk":
            raise ValueError(f"codec topk sends mostly zeros, from which {self.robust} makes zeros: use another codec")
        if self.robust != "mean" and self.protocol not in _RULED:
            raise ValueError(f"robust {self.robust} is for {' and '.join(_RULED)}: {self.protocol} takes no rule")
        if self.max_weight is not None and (self.protocol not in _RULED or self.robust != "mean"):
            why = self.protocol if self.protocol not in _RULED else f"robust {self.robust}, where no weight exceeds one"
            raise ValueError(f"max_weight is for {' and '.join(_RULED)} and the robust rule mean: not for {why}")
        if self.schedule != "random" and self.protocol not in _SCHEDULED:
            raise ValueError(f"schedule {self.schedule} is for {' and '.join(_SCHEDULED)}: {self.protocol} has none")
        if self.codec == "topk" and self.protocol != "butterfly":
            raise ValueError(f"codec topk is for protocol butterfly: {self.protocol} needs vectors whole")
        if self.codec == "topk" and self.chunk_elements % TOPK_GRAIN:
            raise ValueError(f"with codec topk, chunk_elements must be a multiple of {TOPK_GRAIN}")
        if self.protocol != "butterfly" and (self.fork == "never" or self.min_peers > 1):
            raise ValueError(f"fork and min_peers are for butterfly: {self.protocol} has no votes")
        if self.inviters and not self.admission:
            raise ValueError('inviters is for private runs: also set admission = "invited", or leave it out')
        self._check_clusters()
        self._check_recipe()
        self._check_stages()

    def _check_clusters(self) -> None:
        prevents = next(_prevent_clusters(asdict(self)), "")
        if self.clusters and prevents:
            raise ValueError(f"clusters and {prevents} do not go together: leave one of them out")
        if self.voters is not None and not self.clusters:
            why = f"not for {prevents}" if prevents else "leave out voters, or clusters = false"
            raise ValueError(f"voters is for runs with clusters: {why}")

    def _check_recipe(self) -> None:
        if self.recipe.outer_pull and self.protocol != "gossip":
            raise ValueError(f"recipe.outer_pull is for gossip, whose pairs pull each other: not for {self.protocol}")
        for name, given in {"overlap": self.recipe.overlaps, "fragments": self.recipe.fragments}.items():
            if given and (self.protocol != "butterfly" or self.stages > 1):
                where = "a run with stages" if self.stages > 1 else self.protocol
                raise ValueError(f"recipe.{name} is for butterfly, without stages: not for {where}")
        if self.recipe.inner_optimizer == "muon" and self.hf and self.hf.train == "lora":
            raise ValueError("recipe.inner_optimizer muon is for hidden matrices: adamw trains adapters")

    def _check_stages(self) -> None:
        stages = self.stages
        if stages == 1:
            given = [name for name in ("activations", "gradients", "rebalance") if getattr(self, name) is not None]
            given += ["recipe.lookahead"] * (self.recipe.lookahead is not None)
            if given:
                raise ValueError(f"{given[0]} is for runs with stages: give stages, too, or leave it out")
            return
        if self.protocol != "butterfly":
            raise ValueError(f"stages average by butterfly, not by {self.protocol}")
        if self.options is not None or self.hf is not None:
            raise ValueError(f"stages is for the tasks gpt and paced: {self.task} cannot be cut")
        if self.codec == "topk":
            raise ValueError("stages and codec topk do not go together: use another codec")
        if (batches := self.recipe.batches) > MAX_STAGE_BATCHES:
            raise ValueError(f"with stages, recipe.batches must be at most {MAX_STAGE_BATCHES}, not {batches}")
        if self.gpt is not None:
            self.gpt.require_stages(stages)
            tokens, codecs = self.gpt.rows * self.gpt.context, (self.activation_codec, self.gradient_codec)
            places = batches + (self.recipe.lookahead or 0)
            held = places * sum(activation_bytes(codec, tokens, self.gpt.width) for codec in codecs)
            if held > MAX_LEASED_BYTES:
                what = f"{places} microbatches would take {held / 2**20:.0f} MiB of each replica's memory"
                raise ValueError(f"{what}, more than {MAX_LEASED_BYTES >> 20}: take fewer gpt.rows")
        elif self.paced is not None and self.paced.elements < stages:
            raise ValueError(f"{self.paced.elements} elements cannot be cut into {stages} stages")

    @property
    def activation_codec(self) -> str:
        """How activations travel between stages: a key of `ACTIVATION_CODECS`."""
        return self.activations or "bf16"

    @property
    def gradient_codec(self) -> str:
        return self.gradients or self.activation_codec

    @property
    def weight_limit(self) -> float:
        """`protocols.base.Settings.max_weight`. Runs that say nothing were begun before there was this setting."""
        return self.max_weight or CLAIM_SPREAD

    @property
    def fork_peers(self) -> int:
        """`protocols.base.Settings.fork_peers`: the smallest minority that may go on alone; 0 if none may."""
        return 0 if self.fork == "never" else self.min_peers

    @property
    def own_task(self) -> str:
        """Name of the user's own task; empty if the task is built in."""
        return self.task if names.is_own(self.task) else ""

    @property
    def consent_task(self) -> str:
        """The task that a joiner must name by --task; empty if it need not name any."""
        return names.HUGGING_FACE if self.hf is not None else self.own_task

    @property
    def elements(self) -> int | None:
        """Length of the flat vector that is trained; None if only a user's code, or the model, knows it."""
        return next((table.elements for table in (self.gpt, self.paced) if table), None)

    def preset(self) -> Preset:
        """Everything that `node.tasks.gpt.GptTask` is built from. Raises ValueError if the task is not gpt."""
        if self.gpt is None:
            raise ValueError(f"a run of task {self.task} has no model")
        return Preset(self.gpt.shape, self.gpt.rows, self.recipe)

    def require_protocol(self, protocols: Collection[str]) -> None:
        """Raise ConfigError if the run's protocol is not among `protocols`."""
        if self.protocol not in protocols:
            name = ascii(self.protocol)[1:-1]
            raise ConfigError(f'unknown protocol "{name}": {suggestion(self.protocol, protocols)}', "protocol")


_OF_TASKS = ("gpt", "paced", "hf", "options")
_RULED = ("butterfly", "moshpit")
_SCHEDULED = ("gossip", "push_sum")
_RUN = TypeAdapter(RunConfig)
_TABLES: Mapping[str, tuple[str, ...]] = {
    "recipe": tuple(field.name for field in fields(Recipe)),
    "gpt": ("preset", *(field.name for field in fields(GptTable))),
    "paced": tuple(field.name for field in fields(PacedTable)),
    "hf": tuple(field.name for field in fields(HfSettings)),
}
_KEYS = (*(field.name for field in fields(RunConfig)), "peer")


def load_run(path: Path | None, overrides: Mapping[str, object], protocols: Collection[str]) -> RunConfig:
    """Load the configuration of a new run: overrides > the file > the task's preset > defaults.

    `overrides` maps a dotted name ("task", "recipe.rounds") to the value of an option, or None. Raises ConfigError,
    which names the source and the key.
    """
    file = read_toml(path) if path else {}
    if isinstance(hf := file.get("hf"), dict):
        file = {**file, "hf": {key: value for key, value in hf.items() if key != "template"}}  # see `load_peer`
    flags = {key: value for key, value in overrides.items() if value is not None}
    try:
        config = _parse(json.dumps(_expanded(_merged(file, _nested(flags))), default=str))
        config.require_protocol(protocols)
    except ConfigError as error:
        source = path if path and error.key not in flags else "command line"
        raise ConfigError(f"{source}: {error}", error.key) from None
    return config


def _parse(data: str | bytes) -> RunConfig:
    """Validate as JSON, where strict mode still takes a list for a tuple, and a table for a dataclass."""
    try:
        return _RUN.validate_json(data)
    except ValidationError as error:
        raise one_line(error) from None


def _nested(flags: Mapping[str, object]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flags.items():
        table, _, name = key.rpartition(".")
        place = nested.setdefault(table, {}) if table else nested
        if not isinstance(place, dict):
            raise ConfigError(f'"{table}" cannot be both a value and a table', key)
        place[name] = value
    return nested


def _merged(file: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    for values in (file, flags):
        for name, known in (*_TABLES.items(), ("peer", OF_THIS_MACHINE)):
            lost = next((key for key in values if key in known), None)
            if lost:
                raise ConfigError(
                    f'unknown key "{lost}": write it as "{name}.{lost}", or into the table [{name}]', lost
                )
        check_keys(values, _KEYS)
        for name, known in _TABLES.items():
            table = values.get(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f'"{name}" must be a table, [{name}]', name)
            check_keys(table, known, name)
    options = file.get("options", {})
    if not isinstance(options, dict):
        raise ConfigError('"options" must be a table, [options]', "options")
    tables = {name: {**file.get(name, {}), **flags.get(name, {})} for name in _TABLES} | {"options": options}
    merged = {**file, **flags, **tables}
    merged.pop("peer", None)
    return merged


def _prevent_clusters(values: Mapping[str, Any]) -> Iterator[str]:
    """The settings with which a run has no clusters."""
    usual = {"protocol": _PROTOCOL, "stages": 1}
    yield from (f"{name} {values[name]}" for name, value in usual.items() if values.get(name, value) != value)
    if values.get("codec") == "topk":
        yield "codec topk"


def _expanded(values: dict[str, Any]) -> dict[str, Any]:
    """Add the largest weight, clusters and the values of the preset, and drop the tables of other tasks."""
    task = values.setdefault("task", "gpt")
    if values.get("protocol", _PROTOCOL) in _RULED and values.get("robust", "mean") == "mean":
        values.setdefault("max_weight", MAX_WEIGHT)
    if not any(_prevent_clusters(values)):
        values.setdefault("clusters", True)
    gpt, paced, hf, options = (values.pop(table) for table in _OF_TASKS)
    if isinstance(task, str) and (names.is_own(task) or task == names.LOOP):
        return {**values, "options": options, "recipe": {**_RECIPE_OF_MODELS, **values["recipe"]}}
    if task == names.HUGGING_FACE:
        if isinstance(rank := hf.get("lora_rank"), int):
            hf.setdefault("lora_alpha", 2 * rank)
        return {**values, "hf": hf, "recipe": {**_RECIPE_OF_MODELS, **_RECIPE_OF_HF, **values["recipe"]}}
    if task == "paced":
        return {**values, "paced": paced, "recipe": {**asdict(_PACED_RECIPE), **values["recipe"]}}
    try:
        base = preset(str(gpt.pop("preset", DEFAULT_PRESET)))
    except ValueError as error:
        raise ConfigError(str(error), "gpt.preset") from None
    base = _for_run(base, values)
    rows, recipe = base.rows, asdict(base.recipe)
    if values.get("stages", 1) != 1 and "rows" not in gpt and "batches" not in values["recipe"]:
        rows, recipe["batches"] = _microbatches(base)
    gpt = {**asdict(base.shape), "rows": rows, **gpt}
    return {**values, "gpt": gpt, "recipe": {**recipe, **values["recipe"]}}


def _for_run(base: Preset, values: Mapping[str, Any]) -> Preset:
    """The preset for the length of the run, its inner optimiser and its codec.

    The outer step for many rounds is not for `outer_pull`, which is tuned to the momentum. Error feedback takes the
    place of outer momentum (SparseLoCo, Sarfi et al. 2025): with sparse means a run takes plain outer steps.
    """
    recipe = values["recipe"]
    sizes = [recipe.get(name, getattr(base.recipe, name)) for name in ("rounds", "inner_steps")]
    if not all(type(each) is int and each >= 1 for each in sizes):  # they are refused later, by their names
        return base
    outer_step = USUAL_OUTER_STEP if recipe.get("outer_pull") else None
    if values.get("codec") == "topk":
        outer_step = PLAIN_OUTER_STEP
    rounds, inner_steps = sizes
    fragments = given if type(given := recipe.get("fragments")) is int and 1 <= given <= MAX_FRAGMENTS else 1
    optimizer = recipe.get("inner_optimizer", base.recipe.inner_optimizer)
    chosen = recipe_for(base.shape.width, max(1, rounds // fragments), inner_steps * fragments, optimizer, outer_step)
    return replace(base, recipe=replace(chosen, rounds=rounds, inner_steps=inner_steps))


def _microbatches(base: Preset) -> tuple[int, int]:
    """Rows and batches with stages: the tokens of a step in `STAGE_BATCHES` microbatches, if its rows allow that."""
    rows = base.rows * base.recipe.batches
    batches = math.gcd(rows, STAGE_BATCHES)
    return rows // batches, batches
