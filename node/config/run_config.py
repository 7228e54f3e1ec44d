"""What all peers of a run share: it is hashed and signed in the run's manifest, and comes to joiners from there.

    name = "my run"
    task = "gpt"            # or "paced", or a user's own, "package.module:factory"

    [gpt]
    preset = "w128"         # gives defaults to [gpt] and [recipe]; what is named beside it wins
    [options]
    width = 32              # of a user's own task: for its factory
    [recipe]
    rounds = 32

A loaded configuration holds every value, never the name of a preset, whose meaning may change with the code. Every
value is bounded: a configuration may come from a stranger, and decides how much memory peers set aside.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from node.config.peer_config import KEYS as OF_THIS_MACHINE
from node.config.toml import MAX_BYTES, ConfigError, canonical, check_keys, one_line, read_toml, suggestion
from node.tasks import name as names
from node.tasks.base import MAX_ELEMENTS, Recipe
from node.tasks.gpt import DEFAULT_PRESET, PRESETS, VOCABULARY, GptConfig, Preset, preset
from protocols.codec import codec
from protocols.pairwise.matching import known as known_schedule
from protocols.robust import known as known_rule
from protocols.vectors import CHUNK_ELEMENTS
from protocols.wire import MAX_ROSTER

MAX_BATCH_TOKENS = 1 << 20
_MIN_CHUNK_ELEMENTS = 1 << 10

STRICT = ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False, revalidate_instances="always", val_json_bytes="hex"
)
"""Nothing is guessed: "5" is no number, true is no number, 1.0 is no whole number."""

_RECIPE_LIMITS: Mapping[str, float] = {
    "inner_steps": 10**6,
    "rounds": 10**7,
    "batches": 1 << 12,
    "warmup_steps": 10**9,
    "learning_rate": 1000,
    "outer_learning_rate": 1000,
    "weight_decay": 1000,
    "clip_norm": 1e9,
}
"""The largest that a value may be, where `Recipe` itself knows none."""

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


def _known_codec(name: str) -> str:
    return codec(name).name


def _unless_mean(rule: str | None) -> str | None:
    """The mean has no name in a manifest: so those from before there were other rules stay what they were."""
    return None if rule is None or known_rule(rule) == "mean" else rule


def _unless_random(schedule: str | None) -> str | None:
    """As for the mean."""
    return None if schedule is None or known_schedule(schedule) == "random" else schedule


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class GptTable:
    """`[gpt]`: the model's shape and the rows of a batch; see `node.tasks.gpt`.

    Attributes:
        layers: of the transformer.
        width: of its residual stream.
        heads: of attention; they divide the width into even parts.
        context: bytes that the model sees.
        rows: of a batch, each as long as the context.
    """

    layers: int = Field(ge=1, le=1 << 10)
    width: int = Field(ge=1, le=1 << 16)
    heads: int = Field(ge=1, le=1 << 10)
    context: int = Field(ge=1, le=1 << 14)
    rows: int = Field(ge=1, le=1 << 12)

    def __post_init__(self) -> None:
        _ = self.shape  # refuses heads that do not fit
        if self.elements > MAX_ELEMENTS:
            raise ValueError(f"the model has {self.elements} parameters, more than {MAX_ELEMENTS}: make it smaller")
        if self.rows * self.context > MAX_BATCH_TOKENS:
            raise ValueError(f"rows times context are {self.rows * self.context}, more than {MAX_BATCH_TOKENS}")

    @property
    def shape(self) -> GptConfig:
        return GptConfig(self.layers, self.width, self.heads, self.context)

    @property
    def elements(self) -> int:
        """Parameters of `node.tasks.gpt.Gpt` in that shape, without making one."""
        layer = 4 * self.width**2 + 3 * self.width * self.shape.hidden + 2 * self.width
        return 2 * VOCABULARY * self.width + self.layers * layer + self.width


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class PacedTable:
    """`[paced]`: length of the vector, and what an inner step takes and is worth; see `node.tasks.paced`.

    Attributes:
        elements: of the vector.
        step_seconds: that an inner step takes.
        tokens_per_step: that it counts as.
    """

    elements: int = Field(default=1_000_000, ge=1, le=MAX_ELEMENTS)
    step_seconds: float = Field(default=0.1, gt=0, le=3600)
    tokens_per_step: int = Field(default=1024, ge=1, le=1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class RunConfig:
    """Everything that the peers of a run must share. Made by `load_run`, or from canonical bytes.

    Attributes:
        name: of the run, for people.
        task: what is trained: gpt, paced, or your own by the name of its factory, package.module:factory. It takes the
            table of that name, or [options].
        protocol: how replicas agree: butterfly, to the same bits in each round; or each has a state of its own, and
            they mix: gossip, moshpit, push_sum, and the baselines data_parallel, ring, parameter_server and
            parameter_server_async. See docs/protocols.md.
        codec: in what form vectors travel: fp32, fp16, bf16, int8, int4, e3m0; or topk, which sends the largest 1.6 %
            and owes the rest, best with recipe.outer_learning_rate 1 and recipe.outer_momentum 0. By moshpit and the
            baselines states travel in fp32, unless fp16 is named here.
        robust: by what rule reducers average, against peers that send what is wrong, at some cost: centered_clip,
            trimmed_mean, median, krum, multi_krum. Without one: the mean, by the butterfly of norms clipped to the
            median.
        schedule: whom a peer of gossip or push_sum turns to: ring, the next one; exponential, all at 1, 2, 4, … places;
            one-peer-exponential, one of these in turn. Without one: random, pairs drawn anew in each round.
        fork: whether a minority may go on alone once the majority of the roster is gone.
        min_peers: how many may then, at least. Both are of butterfly alone.
        spread_limit: relative distance from the mean that is borne, .02 is 2 %; of all protocols but butterfly.
        seed: of the initial parameters, and of whatever else all peers draw alike.
        chunk_elements: vectors travel and are reduced in chunks of so many.
        recipe: inner steps, rounds and outer steps.
    """

    name: Annotated[str, AfterValidator(_printable)] = Field(default="starling", min_length=1, max_length=64)
    task: Annotated[str, AfterValidator(names.known)] = "gpt"
    protocol: str = Field(default="butterfly", min_length=1, max_length=32)
    codec: Annotated[str, AfterValidator(_known_codec)] = "int8"
    robust: Annotated[str | None, AfterValidator(_unless_mean)] = None
    schedule: Annotated[str | None, AfterValidator(_unless_random)] = None
    fork: Literal["allowed", "never"] = "allowed"
    min_peers: int = Field(default=1, ge=1, le=MAX_ROSTER)
    spread_limit: float = Field(default=0.02, gt=0, le=1)
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    chunk_elements: int = Field(default=CHUNK_ELEMENTS, ge=_MIN_CHUNK_ELEMENTS, le=CHUNK_ELEMENTS)
    recipe: Annotated[Recipe, AfterValidator(_bounded)]
    gpt: GptTable | None = None
    paced: PacedTable | None = None
    options: Annotated[dict[str, Any], AfterValidator(names.plain)] | None = None

    def __post_init__(self) -> None:
        table = "options" if names.is_own(self.task) else self.task
        if {name for name in _OF_TASKS if getattr(self, name) is not None} != {table}:
            raise ValueError(f"task {self.task} takes the table [{table}] and no other task's")
        if self.robust and self.codec == "topk":
            raise ValueError(f"codec topk sends mostly zeros, of which {self.robust} makes zeros: take another codec")
        if self.robust and self.protocol not in _RULED:
            raise ValueError(f"robust {self.robust} is for {' and '.join(_RULED)}: {self.protocol} takes no rule")
        if self.schedule and self.protocol not in _SCHEDULED:
            raise ValueError(f"schedule {self.schedule} is for {' and '.join(_SCHEDULED)}: {self.protocol} has none")
        used = codec(self.codec)
        if used.decay and self.protocol != "butterfly":
            raise ValueError(f"codec {used.name} is for protocol butterfly: {self.protocol} needs vectors whole")
        if self.chunk_elements % used.grain:
            raise ValueError(f"with codec {used.name}, chunk_elements must be a multiple of {used.grain}")
        if self.recipe.outer_pull and self.protocol != "gossip":
            raise ValueError(f"recipe.outer_pull is for gossip, whose pairs pull each other: not for {self.protocol}")
        if self.protocol != "butterfly" and (self.fork == "never" or self.min_peers > 1):
            raise ValueError(f"fork and min_peers are for butterfly: by {self.protocol} nobody votes, all just go on")

    @property
    def fork_peers(self) -> int:
        """`protocols.base.Settings.fork_peers`: members that may go on alone, at least; 0: none may."""
        return 0 if self.fork == "never" else self.min_peers

    @property
    def own_task(self) -> str:
        """Name of the user's own task that is trained; empty if it is one of ours."""
        return self.task if self.options is not None else ""

    @property
    def elements(self) -> int | None:
        """Length of the flat vector that is trained; None where only a user's code knows."""
        return next((table.elements for table in (self.gpt, self.paced) if table), None)

    def preset(self) -> Preset:
        """All that `node.tasks.gpt.GptTask` is built from.

        Raises:
            ValueError: the task is another.
        """
        if self.gpt is None:
            raise ValueError(f"a run of task {self.task} has no model")
        return Preset(self.gpt.shape, self.gpt.rows, self.recipe)

    def require_protocol(self, protocols: Collection[str]) -> None:
        """
        Raises:
            ConfigError: the run's protocol is none of these.
        """
        if self.protocol not in protocols:
            name = ascii(self.protocol)[1:-1]
            raise ConfigError(f'unknown protocol "{name}": {suggestion(self.protocol, protocols)}', "protocol")

    def to_canonical(self) -> bytes:
        """The one spelling of this configuration, at most `MAX_BYTES`."""
        return canonical(self)

    @classmethod
    def from_canonical(cls, data: bytes) -> RunConfig:
        """
        Raises:
            ConfigError: too long, a value missing, unknown or out of its range, or not the canonical spelling.
        """
        if len(data) > MAX_BYTES:
            raise ConfigError(f"a configuration of {len(data)} bytes, more than {MAX_BYTES}")
        config = _parse(data)
        if config.to_canonical() != data:
            raise ConfigError("the configuration is not in its canonical spelling")
        return config


_OF_TASKS = ("gpt", "paced", "options")
_RULED = ("butterfly", "moshpit")
_SCHEDULED = ("gossip", "push_sum")
_RUN = TypeAdapter(RunConfig)
_TABLES: Mapping[str, tuple[str, ...]] = {
    "recipe": tuple(field.name for field in fields(Recipe)),
    "gpt": ("preset", *(field.name for field in fields(GptTable))),
    "paced": tuple(field.name for field in fields(PacedTable)),
}
_KEYS = (*(field.name for field in fields(RunConfig)), "peer")


def load_run(path: Path | None, overrides: Mapping[str, object], protocols: Collection[str]) -> RunConfig:
    """The configuration of a new run: overrides > the file > the task's preset > defaults.

    Args:
        overrides: values by dotted names ("task", "recipe.rounds"), as flags give them; None: not given.
        protocols: names of those that there are.

    Raises:
        ConfigError: a file that cannot be read, an unknown key, a bad value; names its source and the key.
    """
    file = read_toml(path) if path else {}
    flags = {key: value for key, value in overrides.items() if value is not None}
    try:
        config = _parse(json.dumps(_expanded(_merged(file, _nested(flags))), default=str))
        config.require_protocol(protocols)
    except ConfigError as error:
        source = path if path and error.key not in flags else "command line"
        raise ConfigError(f"{source}: {error}", error.key) from None
    return config


def _parse(data: str | bytes) -> RunConfig:
    """By way of JSON, in which strictness is about values only: lists there are tuples here, tables are dataclasses."""
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


def _expanded(values: dict[str, Any]) -> dict[str, Any]:
    """With the values of its preset, and without the tables of other tasks."""
    task = values.setdefault("task", "gpt")
    gpt, paced, options = (values.pop(table) for table in _OF_TASKS)
    if isinstance(task, str) and names.is_own(task):
        recipe = asdict(PRESETS[DEFAULT_PRESET].recipe)
        return {**values, "options": options, "recipe": {**recipe, **values["recipe"]}}
    if task == "paced":
        return {**values, "paced": paced, "recipe": {**asdict(_PACED_RECIPE), **values["recipe"]}}
    try:
        base = preset(str(gpt.pop("preset", DEFAULT_PRESET)))
    except ValueError as error:
        raise ConfigError(str(error), "gpt.preset") from None
    gpt = {**asdict(base.shape), "rows": base.rows, **gpt}
    return {**values, "gpt": gpt, "recipe": {**asdict(base.recipe), **values["recipe"]}}
