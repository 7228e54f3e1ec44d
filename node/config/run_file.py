"""A run file to begin with: every setting, what it means, and its default, as the schema itself has them.

# what it means
name = "starling"        a default that stands by itself
#rounds = 16             one that follows from others, the preset's say: without the # it is set
#data =                  one that is not there
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from node.config.peer_config import FILE_KEYS, PeerConfig
from node.config.run_config import GptTable, PacedTable, RunConfig
from node.tasks.base import Recipe
from node.tasks.gpt import DEFAULT_PRESET, PRESETS

_COLUMNS = 100
_TABLES = ("recipe", "gpt", "paced", "options")
_HEAD = """\
A run file of Starling. What all peers of a run share stands first; joiners get it from the swarm. The table [peer]
is of this machine alone. Start the run with: python -m node join --run FILE.toml

A line that begins with # and a name is switched off, and shows what holds without it: take the # away to set it."""
_RECIPE = f"""\
How it is trained. What is switched off follows from the task: of gpt, the preset says it; a task of your own has
what is shown here, the values of {DEFAULT_PRESET}; paced has its own."""
_OPTIONS = """\
Of a task of your own, package.module:factory: what its factory takes, by names that you choose; texts, numbers, true
and false. See docs/tasks.md."""
_GPT = f"""\
The task gpt, a language model over bytes. The preset gives the other values here and those of [recipe]. One of
{", ".join(PRESETS)}."""
_PACED = """\
The task paced: vectors, and steps that take a set time, to study the protocols."""
_PEER = """\
This machine. Flags and variables NODE_* win over these."""


def run_file() -> str:
    """The text of one, in TOML. Loaded as it is, it says what no file says."""
    preset = PRESETS[DEFAULT_PRESET]
    gpt = GptTable(**asdict(preset.shape), rows=preset.rows)
    run = RunConfig(recipe=preset.recipe, gpt=gpt)
    top = [field.name for field in fields(RunConfig) if field.name not in _TABLES]
    parts = [
        (*_prose(_HEAD), "", *_settings(RunConfig, _values(run, top))),
        (*_table("recipe", _RECIPE), *_settings(Recipe, _values(run.recipe), off=True)),
        (*_table("gpt", _GPT), f"preset = {_toml(DEFAULT_PRESET)}", "", *_settings(GptTable, _values(gpt), off=True)),
        (*_table("paced", _PACED), *_settings(PacedTable, _values(PacedTable()))),
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
    words, hints = meanings(schema), get_type_hints(schema)
    for name, value in values.items():
        choices = get_args(hints[name]) if get_origin(hints[name]) is Literal else ()
        yield from _prose(words.get(name, "") + (f" One of {', '.join(choices)}." if choices else ""))
        yield f"{'#' if off or value is None else ''}{name} = {'' if value is None else _toml(value)}".rstrip()
        yield ""


def _toml(value: Any) -> str:
    """Texts, numbers, true and false, and lists of them are written as in JSON."""
    return json.dumps(value, ensure_ascii=False)


def meanings(schema: type) -> dict[str, str]:
    """Field -> what the docstring says of it under `Attributes:`; none where Python was told to drop docstrings."""
    _, _, section = (inspect.getdoc(schema) or "").partition("Attributes:\n")
    found: dict[str, str] = {}
    for names, text in re.findall(r"^    (\w+(?:, \w+)*): (.*(?:\n {8,}.*)*)", section, re.MULTILINE):
        sentence = " ".join(text.replace("`", "").replace("None:", "left out:").split())
        found |= dict.fromkeys(names.split(", "), sentence)
    return found
