"""The worker without its process: the shared vectors, the spec, the commands."""

import base64
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from node.runtime import tensors
from node.tasks.gpt_presets import GptConfig
from node.tasks.recipe import Recipe
from node.tasks.spec import GptValues, PacedValues, WorkerSpec
from node.training import shared, worker
from node.training.build import _autocast, build, hf_precision
from node.training.shared import Shared
from tests.support.refusals import one_line

RECIPE = Recipe(4, 5, learning_rate=1e-2, outer_learning_rate=0.9, outer_momentum=0.5, warmup_steps=4)
TRAIN: dict[str, Any] = {"do": "train", "round": 0, "begin": True, "surplus": False}
GENERATE = {"do": "generate", "prompt": base64.b64encode(b"abc").decode(), "tokens": 5, "temperature": 1.0, "seed": 4}
GPT = GptValues(GptConfig(layers=1, width=16, heads=2, context=16), rows=2)


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = shared.create()
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def spec(spec: WorkerSpec) -> WorkerSpec:
    """The small GPT's, with four inner steps a round."""
    return replace(spec, recipe=RECIPE)


def serve(
    memory: int, spec: WorkerSpec, *commands: dict[str, Any], hear: Callable[[str, Any], None] = lambda *message: None
) -> list[dict[str, Any]]:
    """What a worker in this process sends, without its layout."""
    sent: list[dict[str, Any]] = []
    lines = [spec.to_json(), *map(json.dumps, commands)]

    def tell(kind: str, value: Any) -> None:
        sent.append(json.loads(json.dumps({kind: value})))
        hear(kind, value)

    code = worker.serve(io.BytesIO("".join(f"{line}\n" for line in lines).encode()), tell, memory)
    assert code == ("refused" in sent[0])
    return sent if code else sent[1:]


def shared_with(memory: int, spec: WorkerSpec) -> Shared:
    """This side's view of the vectors of a worker with this spec."""
    return Shared(memory, build(spec, torch.empty, False).learner.vector.numel())


def test_file_replaces_missing_anonymous_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    descriptor = shared.create()
    assert os.fstat(descriptor).st_nlink == 0
    Shared(descriptor, 4).local.fill_(1)
    assert Shared(descriptor, 4).local.tolist() == [1, 1, 1, 1]
    os.close(descriptor)


def test_threads_are_divided_among_local_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    spec = WorkerSpec(GPT, RECIPE, 1)
    counts = [replace(spec, peers_here=peers).thread_count() for peers in (1, 3, 9)]
    assert counts == [8, 2, 1] and replace(spec, threads=5, peers_here=9).thread_count() == 5


@pytest.mark.parametrize(
    "change, message",
    [
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, mps, or cuda:0 and so on, not 'tpu'"),
        ({"precision": "int8"}, "precision must be one of auto, float32, bfloat16, float16, not 'int8'"),
        ({"threads": -1}, "threads must be a whole number, 0 or more, not -1"),
        ({"peers_here": 0}, "peers_here must be a whole number, at least 1, not 0"),
    ],
)
def test_bad_values_give_one_line_error(change: dict[str, Any], message: str) -> None:
    assert one_line(ValueError, replace, WorkerSpec(GPT, RECIPE, 1), **change) == message
    with pytest.raises(ValueError, match="step_seconds must be seconds, below an hour, not -1"):
        PacedValues(10, step_seconds=-1)


@pytest.mark.parametrize("error", [IndexError("boom"), MemoryError(), SystemExit(3)])
@pytest.mark.parametrize(
    "name", ["train", "evaluate", "generate", "pins", "held_out", "save", "load", "step", "draw", "forward", "finish"]
)
def test_exception_ends_all_but_commands_that_only_read(
    name: str, error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    def carry_out(**command: Any) -> Any:
        raise error

    failing, told = cast(worker.Worker, SimpleNamespace(carry_out=carry_out)), set[str]()
    word, line = worker._attempt(failing, {"do": name}, told)
    assert worker._attempt(failing, {"do": name}, told) == (word, line)
    assert capsys.readouterr().err.count("Traceback") == 1, "not again in each round"
    survives = name in ("evaluate", "generate", "pins", "held_out") and isinstance(error, Exception)
    assert word == ("refused" if survives else "failed")
    assert type(error).__name__ in line and "carry_out (test_worker.py:" in line


def test_failure_at_the_start_is_sent(memory: int, spec: WorkerSpec) -> None:
    class Failing(worker.Worker):
        build = staticmethod(lambda *_: dict[str, Any]()["no"])

    sent: list[tuple[str, Any]] = []
    lines = io.BytesIO(spec.to_json().encode() + b"\n")
    assert worker.serve(lines, lambda *message: sent.append(message), memory, Failing) == 1
    ((word, line),) = sent
    assert word == "failed" and line.startswith("KeyError in") and line.endswith("'no'")


def test_worker_that_waits_for_data_shows_that_it_lives(memory: int, spec: WorkerSpec) -> None:
    """It takes no step, and stops when it is asked to; then it goes on where it stood."""
    mine, job, looks = shared_with(memory, spec), build(spec, torch.empty, False), 0

    def ready() -> bool:
        nonlocal looks
        looks += 1
        mine.attention = looks == 3
        return looks > 3

    waiting = worker.Worker(replace(job, ready=ready), mine, spec, lambda kind, value: None)
    done = waiting.carry_out(**TRAIN)
    assert (done["tokens"], mine.steps, mine.heartbeats, job.learner.position) == (0, 0, 3, 0)
    mine.attention = False
    done = waiting.carry_out(**TRAIN | {"begin": False})
    assert (done["complete"], mine.steps, job.learner.position) == (True, 4, 4)


def test_next_worker_resumes_the_former_ones_state(memory: int, spec: WorkerSpec) -> None:
    serve(memory, spec)
    mine = shared_with(memory, spec)
    mine.local.fill_(0.5)
    mine.claim(40)
    mine.attention = True
    work = serve(memory, spec, TRAIN | {"round": 2, "surplus": True, "carried": 64})[-1]["done"]
    assert work["tokens"] == 64 and mine.local.eq(0.5).all() and not mine.anchor.eq(0.5).any()
    assert mine.position == 40


def test_saved_inner_state_resumes_to_identical_bits(memory: int, spec: WorkerSpec, tmp_path: Path) -> None:
    path, second_round = str(tmp_path / "inner.safetensors"), TRAIN | {"round": 1}
    whole = shared.create()
    serve(whole, spec, TRAIN, second_round)
    serve(memory, spec, TRAIN, {"do": "save", "path": path})
    mine, position = shared_with(memory, spec), 4
    assert mine.position == mine.steps == position, "no surplus steps"
    mine.claim(0)
    sent = serve(memory, spec, {"do": "load", "path": path, "position": position, "threads": 0}, second_round)
    expected = Shared(whole, len(mine.local))
    assert sent[0] == {"done": None} and torch.equal(mine.local, expected.local) and mine.position == 8
    os.close(whole)


def test_device_with_memory_of_its_own_trains_the_same_bits(
    memory: int, spec: WorkerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner of `cpu:0` is built like that of a GPU, and its vector is copied."""
    commands = (TRAIN, {"do": "evaluate"}, TRAIN | {"round": 1, "carried": 64}, {"do": "evaluate"}, GENERATE)
    whole = shared.create()
    expected = serve(whole, spec, *commands)
    monkeypatch.setattr("node.training.build.device_of", lambda name: "cpu:0")
    sent, mine, theirs = serve(memory, spec, *commands), shared_with(memory, spec), shared_with(whole, spec)
    found, wanted = ([each for each in all_sent if "progress" not in each] for all_sent in (sent, expected))
    for each in (*found, *wanted):
        if isinstance(work := each["done"], dict):
            work.update(seconds=0, step_seconds=0)
    assert found == wanted, "but for the number of reports within a round, which depends on the time that they take"
    assert torch.equal(mine.local, theirs.local) and torch.equal(mine.anchor, theirs.anchor)
    mine.local.fill_(0.5)
    mine.attention = True
    assert serve(memory, spec, TRAIN | {"carried": 7})[-1]["done"]["tokens"] == 7, "the next worker takes the vectors"
    assert mine.local.eq(0.5).all()
    os.close(whole)


def test_loss_scale_outlives_worker_and_peer(memory: int, spec: WorkerSpec, tmp_path: Path) -> None:
    float16, none = replace(spec, precision="float16"), {"do": "load", "path": None, "position": 0, "threads": 0}
    saved = {each.precision: str(tmp_path / each.precision) for each in (float16, spec)}
    loads = {precision: none | {"path": path} for precision, path in saved.items()}
    serve(memory, float16, TRAIN)
    mine = shared_with(memory, spec)
    assert mine.loss_scale.tolist() == [65536, 4]
    mine.loss_scale[0] = 8
    serve(memory, float16, TRAIN | {"round": 1}, {"do": "save", "path": saved["float16"]})
    assert mine.loss_scale.tolist() == [8, 8], "the former worker's"
    serve(memory, spec, TRAIN, {"do": "save", "path": saved["auto"]})
    for precision, scale in (("float16", [8, 12]), ("auto", [65536, 4])):
        other = shared.create()
        done, *_ = serve(other, float16, loads[precision], TRAIN)
        assert done == {"done": None} and shared_with(other, spec).loss_scale.tolist() == scale
        assert serve(other, spec, loads[precision]) == [{"done": None}], "which has no scale"
        os.close(other)


def test_measured_thread_counts_are_reused(memory: int, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next worker, and after a restart from the checkpoint; a count that the user sets is not touched."""
    monkeypatch.setattr("node.training.worker.usable_cores", lambda: 8)
    monkeypatch.setattr("node.tasks.spec.usable_cores", lambda: 8)
    counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    spec = WorkerSpec(GPT, RECIPE, 3, 9, text, device="cpu", peers_here=2)
    load = {"do": "load", "path": None, "position": 0, "threads": 3}
    serve(memory, spec)
    mine = shared_with(memory, spec)
    assert mine.threads == 4, "its share of the cores, to begin with"
    serve(memory, spec, load)
    assert mine.threads == 3
    serve(memory, spec, TRAIN)
    assert mine.threads == counts[-1] == 3, "the former worker's count"
    monkeypatch.setattr(worker, "_CONFINE_SECONDS", 0.0)
    monkeypatch.setattr(worker, "workers_here", lambda: 4)
    serve(memory, spec, TRAIN)
    assert mine.threads == 2, "its share of the cores, now that there are four peers"
    serve(memory, replace(spec, threads=5), load, TRAIN)
    assert mine.threads == 5


def test_invalid_inner_state_is_rejected(memory: int, spec: WorkerSpec, tmp_path: Path) -> None:
    path = tmp_path / "inner.safetensors"
    save, load = {"do": "save", "path": str(path)}, {"do": "load", "path": str(path), "position": 7, "threads": 0}
    none, save_none, load_none = serve(memory, spec, load, save, load)
    assert none == {"refused": "the inner state cannot be read: No such file or directory"}
    assert save_none["done"] > 0 and load_none == {"done": None}, "before the first step there is none"
    tensors.write(path, {"exp_avg": torch.zeros(3)}, {})
    assert serve(memory, spec, load) == [
        {"refused": "the inner state cannot be read: its tensors are not those of this model and its optimiser"}
    ]
    path.unlink()
    path.mkdir()
    assert serve(memory, spec, save) == [{"refused": "the inner state cannot be written: Is a directory"}]


def test_generation_uses_the_outer_parameters(memory: int, spec: WorkerSpec) -> None:
    (first,) = serve(memory, spec, GENERATE)
    shared_with(memory, spec).local.fill_(0.5)
    assert serve(memory, spec, GENERATE) == [first] and len(base64.b64decode(first["done"])) == 5
    assert serve(memory, spec, GENERATE | {"prompt": ""}) == [{"refused": "the prompt is empty"}]
    assert serve(memory, spec, {"do": "dance"}) == [{"refused": "no command 'dance'"}]


def test_paced_task_has_no_text(memory: int) -> None:
    spec = WorkerSpec(PacedValues(100, step_seconds=0.0), RECIPE, 3, threads=1)
    sent = serve(memory, spec, {"do": "held_out"}, GENERATE)
    assert sent == [{"done": ""}, {"refused": "this task generates no text"}]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"data": Path("/absent")}, "there is no file or folder /absent"),
        ({"held_out": Path("/absent")}, "cannot read /absent: No such file or directory"),
        ({"device": "mps"}, "no device mps on this machine that this build of torch can use: try --device auto"),
        ({"values": PacedValues(10**14)}, "not enough memory for this task: "),
    ],
)
def test_unavailable_resource_gives_one_line_error(
    memory: int, spec: WorkerSpec, change: dict[str, Any], message: str
) -> None:
    spec = replace(spec, device="auto")
    if torch.backends.mps.is_available() and "device" in change:
        return
    (sent,) = serve(memory, replace(spec, **change))
    assert sent["refused"].startswith(message) and "\n" not in sent["refused"]


def test_bfloat16_is_used_where_it_pays(text: Path) -> None:
    wide = GptValues(GptConfig(layers=1, width=192, heads=2, context=16), rows=2)
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for values, precision, low in [
        (GPT, "auto", False),
        (wide, "auto", supported),
        (wide, "float32", False),
        (GPT, "bfloat16", True),
    ]:
        spec = WorkerSpec(values, RECIPE, 3, 9, text, device="cpu", precision=precision)
        exact = build(replace(spec, precision="float32"), torch.empty, False).learner
        learner = build(spec, torch.empty, False).learner
        losses = [each.step(0, 0).loss for each in (exact, learner)]
        assert (losses[0] != losses[1]) == low and losses[0] == pytest.approx(losses[1], rel=0.02)
        assert learner.vector.dtype == torch.float32


def test_gpu_with_a_number_becomes_the_present_one(
    memory: int, spec: WorkerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(device: str) -> None:
        raise ValueError(f"{device} is chosen")

    monkeypatch.setattr("node.training.build.device_of", lambda name: "cuda:1")
    monkeypatch.setattr(torch.cuda, "set_device", chosen)
    assert serve(memory, spec) == [{"refused": "cuda:1 is chosen"}]


def test_gpu_with_bfloat16_uses_it_for_wide_models(monkeypatch: pytest.MonkeyPatch) -> None:
    for supported, expected in ((True, torch.bfloat16), (False, None)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, it=supported: it)
        assert _autocast("auto", "cuda", 192) == _autocast("auto", "cuda:1", 192) == expected
    assert _autocast("auto", "cuda", 96) is _autocast("float32", "cuda", 192) is _autocast("auto", "mps", 192) is None


def test_hf_trains_in_float16_where_bfloat16_is_emulated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for supported, expected in ((True, "bfloat16"), (False, "float16")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, it=supported: it)
        assert hf_precision("cuda:1", tells=True) == expected
        assert bool(capsys.readouterr().err) != supported
    assert hf_precision("cpu", tells=True) == "float32"
