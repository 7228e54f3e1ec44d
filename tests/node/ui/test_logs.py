"""Logs for people and for programs, and their writer: bounded, never blocking, never raising."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import time
from collections.abc import Iterator

import pytest
import structlog

from node.runtime import notes
from node.ui import logs
from node.ui.logs import OUTLET_BYTES, LogStyle, NonBlockingWriter


@pytest.fixture(autouse=True)
def structlog_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        with contextlib.suppress(OSError):
            os.close(fd)


def test_logs_are_json_or_text() -> None:
    lines: list[str] = []
    logs.set_up("info", lines.append, "json")
    logging.getLogger("node.x").info("round %d", 3)
    structlog.get_logger("node.y").warning("odd", peer="bob")
    first, second = (json.loads(line) for line in lines)
    assert (first["event"], first["level"], first["logger"]) == ("round 3", "info", "node.x")
    assert (second["event"], second["peer"]) == ("odd", "bob")
    assert first["timestamp"].endswith("Z")
    logs.set_up("info", lines.append, "plain")
    logging.getLogger("node.x").info("round %d", 4)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[info +\] round 4 +\[node.x\]", lines[2])


@pytest.mark.parametrize("style", ["coloured", "plain", "json"])
def test_notes_of_a_worker_are_plain_lines(style: LogStyle, capsys: pytest.CaptureFixture[str]) -> None:
    notes.note("training needs about 5 GB")
    notes.warn("only 4 GB are free")
    lines: list[str] = []
    logs.set_up("warning", lines.append, style)
    for line in [*capsys.readouterr().err.splitlines(), "LibraryWarning: deprecated\x1b[2J"]:
        notes.relay("worker", line)
    assert lines[0] == "training needs about 5 GB"
    assert "warning" in lines[1] and "worker: only 4 GB are free" in lines[1]
    assert "warning" in lines[2] and "worker: LibraryWarning: deprecated" in lines[2]


def test_log_level_applies_to_own_loggers_only() -> None:
    lines: list[str] = []
    logs.set_up("debug", lines.append, "json")
    logging.getLogger("node.x").debug("a")
    logging.getLogger("asyncio").debug("b")
    logging.getLogger("elsewhere").info("c")
    logging.getLogger("elsewhere").warning("d")
    assert [json.loads(line)["event"] for line in lines] == ["a", "d"]
    logs.set_up("error", lines.append, "json")
    logging.getLogger("elsewhere").warning("e")
    logging.getLogger("node.x").warning("f")
    assert len(lines) == 2


@pytest.mark.parametrize("style", ["coloured", "plain", "json"])
def test_foreign_text_in_logs_is_escaped_and_bounded(style: LogStyle) -> None:
    lines: list[str] = []
    logs.set_up("info", lines.append, style)
    logging.getLogger("node.x").info("%s", "evil\x1b[2J\x9b1m\nfaked line " + "x" * 10**6)
    try:
        raise ValueError("y" * 10**6)
    except ValueError:
        logging.getLogger("node.x").exception("it failed")
    assert "\x1b[2J" not in lines[0] and "\x9b" not in lines[0] and "\n" not in lines[0]
    assert "yyy" in lines[1]
    assert all(len(line) < 10_000 for line in lines)


def test_stopped_reader_costs_no_time_and_bounded_memory(pipe: tuple[int, int]) -> None:
    outlet, line = NonBlockingWriter(pipe[1]), "x" * 999 + "\n"
    began = time.monotonic()
    for _ in range(5000):
        outlet.write(line)
    assert time.monotonic() - began < 2.0
    assert not outlet.ready and outlet.dropped > 0
    assert sum(map(len, outlet._waiting)) <= OUTLET_BYTES
    got = io.BytesIO()
    while not outlet.ready:
        got.write(os.read(pipe[0], 1 << 16))
    got.write(os.read(pipe[0], 1 << 20))
    lines = got.getvalue().splitlines(keepends=True)
    assert {len(each) for each in lines} == {1000}  # whole lines, or none
    assert len(lines) + outlet.dropped == 5000


def test_closed_reader_is_no_error(pipe: tuple[int, int]) -> None:
    outlet = NonBlockingWriter(pipe[1])
    os.close(pipe[0])
    for _ in range(3):
        outlet.write("unheard\n")
    assert outlet.gone and not outlet.ready


def test_final_drain_times_out(pipe: tuple[int, int]) -> None:
    outlet = NonBlockingWriter(pipe[1])
    outlet.write("x" * (OUTLET_BYTES - 1))
    began = time.monotonic()
    outlet.drain(0.2)
    assert 0.1 < time.monotonic() - began < 2.0


def test_writer_accepts_a_regular_file(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "out")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        outlet = NonBlockingWriter(fd)
        outlet.write("x" * 5000)
        assert outlet.ready and not outlet.isatty()
    finally:
        os.close(fd)
    assert os.path.getsize(path) == 5000
