"""The benchmark of training on a GPU, on the CPU: it runs, a case that fails leaves the others, and its arithmetic."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu import CASES, SMOKE, Benchmark, Failed, main, peak_flops
from node.tasks.gpt import Gpt


@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(150)
def test_case_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual, file = gpu.spec_of, tmp_path / "found.json"

    def spec_of(case: gpu.Case, device: str, home: Path) -> Any:
        if case.hf:
            raise Failed("there is no such model")
        if case.compile:
            raise KeyError("what nobody expected")
        return usual(case, device, home)

    monkeypatch.setattr(gpu, "spec_of", spec_of)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    breaks = replace(SMOKE["gpt-1b"], compile=True)
    ranks = replace(SMOKE["gpt-1b"], ranks=2)
    cases = {"fails": SMOKE["hf-150m"], "breaks": breaks, "works": SMOKE["gpt-1b"], "ranks": ranks}
    assert not asyncio.run(Benchmark(cases, "cpu", file).run())
    found = json.loads(file.read_text())
    assert found["cases"]["fails"]["failed"] == "there is no such model"
    assert found["cases"]["breaks"]["failed"] == "KeyError: 'what nobody expected'"
    works = found["cases"]["works"]
    for each in (works, found["cases"]["ranks"]):
        assert each["loss"]["worker"] == pytest.approx(each["loss"]["bare"], rel=1e-3), "the same model and batches"
    assert all(each > 0 for rates in works["tokens_per_second"].values() for each in rates)
    assert works["outer_step"]["take"]["bytes"] == 8 * works["elements"]
    assert 0 < works["utilisation"]["with_rounds"] <= works["utilisation"]["worker"]
    assert "| fails | there is no such model |" in capsys.readouterr().out


def test_operations_are_those_of_the_model() -> None:
    case = SMOKE["gpt-1b"]
    embeddings = 2 * 256 * case.shape.width
    norms = (2 * case.shape.layers + 1) * case.shape.width
    assert sum(each.numel() for each in Gpt(case.shape).parameters()) == case.parameters + embeddings + norms
    assert {name: round(CASES[name].parameters / 1e6) for name in ("gpt-150m", "gpt-1b")} == {
        "gpt-150m": 152, "gpt-1b": 1008,
    }  # fmt: skip


@pytest.mark.parametrize(
    "name, precision, peak",
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA H100 80GB HBM3", "float32", 5.0),
        ("something new", "bfloat16", 7.0),
    ],
)
def test_peak_is_the_makers_or_measured(name: str, precision: str, peak: float) -> None:
    about = {"name": name, "measured_bfloat16_flops": 7.0, "measured_float32_flops": 5.0}
    assert peak_flops(about, precision)[0] == peak


def test_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2 and "finds no NVIDIA GPU here" in capsys.readouterr().err
