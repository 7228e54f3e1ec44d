"""The run file that `init` writes: it states the defaults, and every setting."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path

from node.config.peer_config import FILE_KEYS, PeerConfig
from node.config.peer_sources import load_peer
from node.config.run_config import RunConfig, load_run
from node.config.run_file import meanings, run_file
from node.config.task_tables import GptTable, PacedTable
from node.tasks.hf.settings import HfSettings
from node.tasks.recipe import Recipe

PROTOCOLS = ("butterfly",)
SWITCHED_ON = re.sub(r"^#(\w+ = )", r"\1", run_file(), flags=re.MULTILINE)


def test_generated_run_file_equals_the_defaults(file: Path) -> None:
    """As it is, and with all commented settings switched on."""
    file.write_text(run_file())
    for overrides in ({}, {"task": "paced"}, {"task": "a.b:c"}):
        assert load_run(file, overrides, PROTOCOLS) == load_run(None, overrides, PROTOCOLS)
    assert replace(load_peer({}, {}, file), origins={}) == PeerConfig()
    file.write_text(SWITCHED_ON)
    assert run_file() != SWITCHED_ON and load_run(file, {}, PROTOCOLS) == load_run(None, {}, PROTOCOLS)


def test_run_file_documents_every_setting() -> None:
    without_value = re.sub(r"^#(\w+) =$", r"\1 = 0", SWITCHED_ON, flags=re.MULTILINE)
    tables = tomllib.loads(without_value)
    names = {table: {field.name for field in fields(schema)} for table, schema in SCHEMAS.items()}
    assert {each for each in tables if each not in (*SCHEMAS, "options", "peer")} | {*SCHEMAS, "options"} == {
        field.name for field in fields(RunConfig)
    }
    assert tables["gpt"].keys() == names["gpt"] | {"preset"} and tables["peer"].keys() == {*FILE_KEYS}
    assert tables["recipe"].keys() == names["recipe"] and tables["paced"].keys() == names["paced"]
    assert tables["hf"].keys() == names["hf"]
    assert meanings(PeerConfig).keys() >= {*FILE_KEYS}
    for schema in (RunConfig, *SCHEMAS.values()):
        missing = {field.name for field in fields(schema)} - meanings(schema).keys()
        assert missing <= {"gpt", "paced", "hf", "options"}, f"{schema.__name__}: it does not describe {missing}"
    lines = run_file().splitlines()
    settings = [number for number, line in enumerate(lines) if re.match(r"#?\w+ =", line)]
    assert [lines[number] for number in settings if not lines[number - 1]] == ['preset = "w128"']


SCHEMAS: dict[str, type] = {"recipe": Recipe, "gpt": GptTable, "paced": PacedTable, "hf": HfSettings}
