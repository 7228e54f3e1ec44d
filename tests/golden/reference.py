"""The reference pages of the settings of a machine, and of the values that a peer reports.

    python -m tests.golden.reference      # writes both, after a change of a setting or a reported field

The meaning of a reported field is the comment beside it, or the lines above it.
"""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from collections.abc import Iterator
from typing import Literal, get_args, get_origin, get_type_hints

from node.cli.options import default_text
from node.config.peer_config import SETTABLE, SETTINGS, PeerConfig, option_name
from node.reporting.report import RoundEvaluation, RoundReport
from node.reporting.status import PeerStatus, Status
from node.reporting.swarm import SwarmRow, SwarmStatus
from protocols.base import SyncStatus
from tests.support.paths import REPOSITORY

SETTINGS_PAGE, REPORT_PAGE = (REPOSITORY / "docs" / f"reference-{name}.md" for name in ("settings", "report"))
_NOTE = "This page is generated: `python -m tests.golden.reference`."


def settings_page() -> str:
    """Each setting with its key, its option and what it means. A variable is NODE_ and the key in capitals."""
    lines = [
        "# Settings of a machine",
        "",
        "An option of `join` wins over the variable `NODE_<KEY>` (`NODE_DISK_LIMIT_BYTES`), that over what `set` has",
        "saved, that over the key in `[peer]` of the run file, and that over the default. Options count in the unit",
        f"that they name, the keys of sizes and rates in bytes. {_NOTE}",
        "",
        f"`set` changes {' and '.join(f'`{name}`' for name in SETTABLE)} of a running peer. Keys marked * are not",
        "for run files, which start a run. Keys marked + hold for all peers of the command `swarm`.",
    ]
    hints, panel = get_type_hints(PeerConfig), ""
    for key, setting in SETTINGS.items():
        if setting.panel != panel:
            panel = setting.panel
            lines += ["", f"## {panel}", "", "| key | option | meaning | default |", "|---|---|---|---|"]
        kind = bool if bool in (hints[key], *get_args(hints[key])) else str
        mark = {"joiner": " *", "machine": " +", "peer": ""}[setting.scope]
        option = f"`{option_name(key)}{f' {setting.metavar}' if setting.metavar else ''}`" if option_name(key) else ""
        choices = f" One of {', '.join(get_args(hints[key]))}." if get_origin(hints[key]) is Literal else ""
        text = " ".join(filter(None, (setting.help, setting.more))) + choices
        default = setting.default or default_text(key, kind)
        lines.append(f"| `{key}`{mark} | {_cell(option)} | {_cell(text)} | {_cell(default)} |")
    return "\n".join(lines) + "\n"


def report_page() -> str:
    """The fields of a line of `rounds.jsonl`, and of a status."""
    parts = [
        f"# Reports and status\n\n{_NOTE} Figures that are not known are null.\n",
        _fields("A line of `rounds.jsonl`, and of `join --json`", RoundReport),
        _fields("The other lines of `rounds.jsonl`, in a run with stages", RoundEvaluation),
        _fields("`status --json`", Status),
        _fields("Each of `peers` in a status", PeerStatus),
        _fields("`syncing` in a status", SyncStatus),
        _fields("`swarm` in `status --swarm --json`", SwarmStatus),
        _fields("Each of `rows` in `swarm`", SwarmRow),
    ]
    return "\n".join(parts)


def _fields(title: str, kind: type) -> str:
    about = inspect.getdoc(kind) or ""
    rows = [f"| `{name}` | {_cell(type_)} | {_cell(text)} |" for name, type_, text in meanings(kind)]
    return "\n".join([f"## {title}", "", about, "", "| field | type | meaning |", "|---|---|---|", *rows, ""])


def meanings(kind: type) -> Iterator[tuple[str, str, str]]:
    """(name, type, meaning) of each field of a class."""
    source = inspect.getsource(kind)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {each.start[0]: each.string.lstrip("# ") for each in tokens if each.type == tokenize.COMMENT}
    whole_lines = {number for number, line in enumerate(source.splitlines(), 1) if line.lstrip().startswith("#")}
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    for each in body.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            above = each.lineno - 1
            while above in whole_lines:
                above -= 1
            words = [comments[number] for number in range(above + 1, each.lineno)]
            words += [comments[each.lineno]] if each.lineno in comments else []
            yield each.target.id, ast.unparse(each.annotation), " ".join(words)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    SETTINGS_PAGE.write_text(settings_page())
    REPORT_PAGE.write_text(report_page())
