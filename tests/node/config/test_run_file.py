"""The run file that `init` writes: it says what holds without it, and every setting that there is."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path

from node.config.peer_config import FILE_KEYS, PeerConfig, load_peer
from node.config.run_config import GptTable, PacedTable, RunConfig, load_run
from node.config.run_file import meanings, run_file
from node.tasks.base import Recipe

PROTOCOLS = ("butterfly",)
SWITCHED_ON = re.sub(r"^#(\w+ = )", r"\1", run_file(), flags=re.MULTILINE)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_generated_run_file_equals_the_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, run_file())
    assert load_run(path, {}, PROTOCOLS) == load_run(None, {}, PROTOCOLS)
    assert load_run(path, {"task": "paced"}, PROTOCOLS) == load_run(None, {"task": "paced"}, PROTOCOLS)
    assert load_run(path, {"task": "a.b:c"}, PROTOCOLS) == load_run(None, {"task": "a.b:c"}, PROTOCOLS)
    assert replace(load_peer({}, {}, path), origins={}) == PeerConfig()


def test_commented_settings_state_the_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, SWITCHED_ON)
    assert run_file() != SWITCHED_ON and load_run(path, {}, PROTOCOLS) == load_run(None, {}, PROTOCOLS)


def test_one_edited_line_is_enough(tmp_path: Path) -> None:
    for line, edited, key, value in (
        ("#rounds = 16", "rounds = 40", "recipe.rounds", 40),
        ('preset = "w128"', 'preset = "w64"', "gpt.preset", "w64"),
        ('task = "gpt"', 'task = "paced"', "task", "paced"),
        ('codec = "int8"', 'codec = "fp32"', "codec", "fp32"),
    ):
        assert run_file().count(f"\n{line}\n") == 1
        path = written(tmp_path, run_file().replace(f"\n{line}\n", f"\n{edited}\n"))
        assert load_run(path, {}, PROTOCOLS) == load_run(None, {key: value}, PROTOCOLS)


def test_run_file_documents_every_setting() -> None:
    without_value = re.sub(r"^#(\w+) =$", r"\1 = 0", SWITCHED_ON, flags=re.MULTILINE)
    tables = tomllib.loads(without_value)
    names = {table: {field.name for field in fields(schema)} for table, schema in SCHEMAS.items()}
    assert {each for each in tables if each not in (*SCHEMAS, "options", "peer")} | {*SCHEMAS, "options"} == {
        field.name for field in fields(RunConfig)
    }
    assert tables["gpt"].keys() == names["gpt"] | {"preset"} and tables["peer"].keys() == {*FILE_KEYS}
    assert tables["recipe"].keys() == names["recipe"] and tables["paced"].keys() == names["paced"]
    for schema in (RunConfig, PeerConfig, *SCHEMAS.values()):
        told = meanings(schema)
        untold = {field.name for field in fields(schema)} - told.keys()
        assert untold <= {"gpt", "paced", "options"}, f"{schema.__name__}: its docstring says nothing of {untold}"
    lines = run_file().splitlines()
    settings = [number for number, line in enumerate(lines) if re.match(r"#?\w+ =", line)]
    assert [lines[number] for number in settings if not lines[number - 1]] == ['preset = "w128"']


SCHEMAS: dict[str, type] = {"recipe": Recipe, "gpt": GptTable, "paced": PacedTable}
