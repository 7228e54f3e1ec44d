"""The run file that `init` writes: every setting, its meaning and its default, taken from the schemas.

# Meaning of the setting.
name = "starling"        a fixed default
#rounds = 16             a default that depends on another setting, such as the preset: remove the # to set it
#data =                  no default
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from node.config.peer_config import FILE_KEYS, SETTINGS, PeerConfig
from node.config.run_config import RunConfig
from node.config.task_tables import GptTable, PacedTable
from node.runtime.program import typed
from node.tasks.gpt_presets import DEFAULT_PRESET, PRESETS
from node.tasks.hf.settings import HfSettings
from node.tasks.recipe import Recipe

_COLUMNS = 100
_TABLES = ("recipe", "gpt", "paced", "hf", "options")
_HEAD = """\
A run file of Starling. The settings that all peers of a run share come first; joiners get them from the swarm. The
table [peer] is for this machine only. Start the run with: {join} --run FILE.toml

A line such as "#rounds = 16" shows the value that holds if you do not set one. Remove the # to set it."""
_RECIPE = f"""\
How the task is trained. The defaults depend on the task. Those shown here are of gpt with preset {DEFAULT_PRESET}; its
learning rate also depends on the inner optimiser, and its outer step on the number of rounds and the codec
(docs/learning.md). A task of your own has AdamW, the learning rate 2e-3, the outer learning rate 0.9, the outer
momentum 0.5 and no decay; paced has its own."""
_OPTIONS = """\
For a task of your own, package.module:factory: the options of its factory, under names that you choose. Values are
texts, numbers, true and false. See docs/tasks.md."""
_GPT = f"""\
The task gpt, a language model over bytes. The preset sets the defaults of the other values here and of [recipe]. It is
one of {", ".join(PRESETS)}."""
_PACED = """\
The task paced: vectors, and steps that take a given time, to study the protocols."""
_HF = """\
The task hf, which fine-tunes a language model of Hugging Face. Each peer names its own copy by model and its own data
by data, in [peer] or by --model and --data. See docs/models.md."""
_PEER = """\
This machine. Flags and NODE_* variables override these settings."""


def run_file() -> str:
    """The text of the run file, in TOML. Loaded without changes, it sets the same values as no file at all."""
    preset = PRESETS[DEFAULT_PRESET]
    gpt = GptTable(**asdict(preset.shape), rows=preset.rows)
    run = RunConfig(recipe=preset.recipe, gpt=gpt)
    top = [field.name for field in fields(RunConfig) if field.name not in _TABLES]
    parts = [
        (*_prose(_HEAD.format(join=typed("join"))), "", *_settings(RunConfig, _values(run, top))),
        (*_table("recipe", _RECIPE), *_settings(Recipe, _values(run.recipe), off=True)),
        (*_table("gpt", _GPT), f"preset = {_toml(DEFAULT_PRESET)}", "", *_settings(GptTable, _values(gpt), off=True)),
        (*_table("paced", _PACED), *_settings(PacedTable, _values(PacedTable()))),
        (*_table("hf", _HF), *_settings(HfSettings, _values(HfSettings()), off=True)),
        (*_table("options", _OPTIONS), ""),
        (*_table("peer", _PEER), *_settings(PeerConfig, _values(PeerConfig(), FILE_KEYS))),
    ]
    return "\n".join(line for part in parts for line in part)


def _values(of: Any, names: Iterable[str] = ()) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names or [field.name for field in fields(of)]}


def _table(name: str, about: str) -> Iterator[str]:
    yield from (f"[{name}]", *_prose(about), "")


def _prose(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        yield from (f"# {line}" for line in textwrap.wrap(" ".join(paragraph.split()), _COLUMNS))


def _settings(schema: type, values: Mapping[str, Any], off: bool = False) -> Iterator[str]:
    texts, hints = meanings(schema), get_type_hints(schema)
    for name, value in values.items():
        choices = get_args(hints[name]) if get_origin(hints[name]) is Literal else ()
        yield from _prose(texts.get(name, "") + (f" One of {', '.join(choices)}." if choices else ""))
        yield f"{'#' if off or value is None else ''}{name} = {'' if value is None else _toml(value)}".rstrip()
        yield ""


def _toml(value: Any) -> str:
    """A TOML value. Texts, numbers, booleans and lists of them are written as in JSON."""
    return json.dumps(value, ensure_ascii=False)


def meanings(schema: type) -> dict[str, str]:
    """Field -> its description."""
    if schema is PeerConfig:
        return {key: SETTINGS[key].description for key in SETTINGS}
    return {field.name: field.metadata["help"] for field in fields(schema) if "help" in field.metadata}
