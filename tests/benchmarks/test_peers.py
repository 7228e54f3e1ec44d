"""The comparison of averaging systems: its figures, its plan, and that a wrong or missing result is never a row."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import benchmarks.peers.systems as systems
from benchmarks.averaging import Swarm
from benchmarks.averaging_setup import Setup
from benchmarks.peers import rounds
from benchmarks.peers.__main__ import main, parse, sizes
from benchmarks.peers.report import percentile, result, row, table
from benchmarks.peers.rounds import Cell, Turn, judged
from benchmarks.peers.systems import SYSTEMS, System, blocks, chosen

NAMED = {system.name: system for system in SYSTEMS}
TURN = Turn(
    seconds=1.0, forming_seconds=0.1, cpu_seconds=2.0, wire_bytes=600_000_000, p2pd_bytes=0, held_bytes=300_000_000,
    added_bytes=50_000_000, relative_error=1e-8, same_bits=True, ok=True,
)  # fmt: skip


def turns(*seconds: float) -> list[Turn]:
    return [replace(TURN, seconds=each) for each in seconds]


def test_result_names_the_required_figures() -> None:
    lengths = {"tcp-floor": 0.1, "encrypted-floor": 0.2, "torchft": 0.25, "hivemind": 2.0, "gloo": 0.2}
    lengths |= {"ours-fp32-direct": 0.5, "ours-int8-direct": 0.4, "ours-fp32-libp2p": 1.5, "ours-int8-libp2p": 0.9}
    small = [row(system, turns(9.0)) for system in SYSTEMS]
    rows = [row(NAMED[name], turns(each, 2 * each, each)) for name, each in lengths.items()]
    found = json.loads(json.dumps(result({Cell(2, 10.0): small, Cell(4, 100.0): rows})))
    assert found["ours_fp32_seconds_p50"] == 0.5 and found["ours_int8_seconds_p50"] == 0.4
    assert found["hivemind_fp32_seconds_p50"] == 2.0 and found["torchft_seconds_p50"] == 0.25
    assert found["encrypted_floor_seconds_p50"] == 0.2 and found["tcp_floor_seconds_p50"] == 0.1
    assert found["ratios"]["fp32_over_hivemind"] == 0.25 and found["ratios"]["fp32_over_encrypted_floor"] == 2.5
    assert [len(cell["rows"]) for cell in found["cells"]] == [len(SYSTEMS), len(lengths)]
    assert found["ok"] and found["cells"][1]["rows"][0]["seconds_p95"] == 0.2


def test_row_that_was_not_played_has_no_figure() -> None:
    found = result({Cell(4, 100.0): [row(NAMED["hivemind"], turns(2.0))]})
    assert found["ours_fp32_seconds_p50"] is None and found["ratios"]["fp32_over_hivemind"] is None


def test_percentile_is_a_measured_value() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.95) == 3.0
    assert percentile(range(1, 101), 0.95) == 95


def test_one_wrong_round_marks_row_and_result() -> None:
    wrong = row(NAMED["gloo"], [*turns(1.0, 1.0), replace(TURN, seconds=0.1, ok=False)])
    assert not wrong["ok"] and not result({Cell(4, 100.0): [row(NAMED["torchft"], [TURN]), wrong]})["ok"]
    assert "NOT OK, wrong: 1" in table(Cell(4, 100.0), [wrong]).splitlines()[-1]
    assert wrong["seconds"] == [1.0, 1.0]


@pytest.mark.parametrize("system, ok", [("hivemind", True), ("tcp-floor", False), ("ours-fp32-direct", False)])
def test_wrong_warm_up_is_told_and_fails_ours(system: str, ok: bool) -> None:
    found = row(NAMED[system], [replace(TURN, seconds=9.0, ok=False, is_warm_up=True), *turns(1.0, 1.0)])
    assert found["ok"] is ok and found["wrong_warm_ups"] == 1 and found["seconds_p95"] == 1.0


@pytest.mark.parametrize(
    "system, checks, right",
    [
        ("gloo", [(1e-8, "a"), (1e-8, "b")], True),
        ("gloo", [(1e-8, "a"), (1e-3, "a")], False),
        ("hivemind", [(1e-8, "a"), (math.nan, "a")], False),
        ("ours-fp32-direct", [(1e-8, "a"), (1e-8, "b")], False),
        ("ours-int8-libp2p", [(1e-2, "a"), (1e-2, "a")], True),
    ],
)
def test_result_of_each_peer_is_judged(system: str, checks: list[tuple[float, str]], right: bool) -> None:
    answers = [{"relative_error": error, "digest": digest} for error, digest in checks]
    assert judged(NAMED[system], answers)[2] == right


def test_blocks_keep_to_the_memory() -> None:
    for peers, megabytes, budget in ((4, 100.0, 16e9), (10, 100.0, 5e9), (2, 10.0, 1e12)):
        found = blocks(SYSTEMS, peers, megabytes, budget)
        assert [system for block in found for system in block] == list(SYSTEMS)
        for block in found:
            assert len(block) == 1 or sum(each.memory_bytes(peers, megabytes) for each in block) <= budget
    assert len(found) == 1


def test_all_sizes_are_bounded() -> None:
    cells = sizes(parse(["--all"]))
    assert {cell.peers for cell in cells} == {2, 4, 8, 10} and Cell(4, 400.0) in cells
    assert all(cell.peers * cell.megabytes <= 1600 for cell in cells) and len(cells) == 10


def test_pattern_without_system_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--systems", "gloo", "horovod"])
    assert "'horovod' names none of tcp-floor" in capsys.readouterr().err


SMALL = ["--peers", "2", "--megabytes", "0.4", "--rounds", "2"]


@pytest.mark.long
@pytest.mark.real
def test_real_systems_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes on the wire are bounded below only: other tests may use the loopback meanwhile."""
    plot = tmp_path / "peers.png"
    code, said = main([*SMALL, "--systems", "*-floor", "ours-fp32-libp2p", "--out", str(plot)]), capsys.readouterr()
    assert code == 0, said.err
    found = json.loads(said.out.splitlines()[-1])
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows: dict[str, dict[str, Any]] = {each["system"]: each for each in found["cells"][0]["rows"]}
    assert list(rows) == ["tcp-floor", "encrypted-floor", "p2pd-floor", "ours-fp32-libp2p"]
    moved = 2 * 0.4 * 2 * 1 / 2
    for each in rows.values():
        assert each["ok"] and len(each["seconds"]) == 2 and each["wire_megabytes_p50"] >= moved
    assert rows["ours-fp32-libp2p"]["forming_seconds_p50"] > 0 and rows["ours-fp32-libp2p"]["same_bits"]
    assert rows["ours-fp32-libp2p"]["p2pd_megabytes_max"] >= 2 * moved


@pytest.mark.parametrize("p2pd_bytes, ok", [(150_000, True), (250_000, False)])
async def test_vectors_through_p2pd_make_a_direct_round_wrong(
    p2pd_bytes: int, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Played:
        async def all(self, command: str, **more: Any) -> list[dict[str, Any]]:
            return [{"began": 0.0, "ended": 1.0, "relative_error": 0.0, "digest": "a"}] * 2

    class Metered:
        def held_bytes(self) -> int:
            return 0

        @asynccontextmanager
        async def watched(self) -> AsyncIterator[Any]:
            yield SimpleNamespace(cpu_seconds=0.0, wire_bytes=0, p2pd_bytes=p2pd_bytes, added_bytes=0)

    monkeypatch.setattr(rounds, "Swarm", lambda *_: Played())
    player = rounds.Player(NAMED["ours-fp32-direct"], Setup(2, 100, "fp32"))
    player._meter = Metered()  # type: ignore[assignment]
    assert (await player.play(0)).ok is ok


@pytest.mark.real
@pytest.mark.long
def test_vectors_through_p2pd_are_not_the_direct_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Strayed(Swarm):
        """All peers fell back to libp2p."""

        def __init__(self, setup: Setup, *rest: Any) -> None:
            super().__init__(replace(setup, path="libp2p"), *rest)

    monkeypatch.setattr(rounds, "Swarm", Strayed)
    assert main([*SMALL, "--systems", "ours-fp32-direct", "--out", str(tmp_path / "plot.png")]) == 1
    said = capsys.readouterr()
    assert said.out, said.err
    assert not json.loads(said.out.splitlines()[-1])["ok"]


@pytest.mark.real
def test_system_that_does_not_start_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = System("missing", "not installed", "benchmarks.peers.missing_peer")
    monkeypatch.setattr(systems, "SYSTEMS", (*chosen(["tcp-floor"]), missing))
    assert main([*SMALL, "--out", str(tmp_path / "plot.png")]) == 1
    said = capsys.readouterr()
    assert "missing does not start" in said.err and "No module named benchmarks.peers.missing_peer" in said.err
    assert said.out == ""
