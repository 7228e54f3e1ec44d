"""Models and data sets from the hub, which a small server plays: at one commit, and only the needed files."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch

from tests.support.paths import REPOSITORY
from tests.support.program import run

COMMIT = "0123456789abcdef0123456789abcdef01234567"
EVIL = [{"rfilename": name, "size": 9} for name in ("a.jsonl", "../x.jsonl")]
PROGRAM = """
import json, sys
from node.tasks.hf.settings import HfSettings, ModelError
from node.tasks.hf.source import find_model
try:
    folder = find_model(sys.argv[1], weights=sys.argv[2] == "weights")
except ModelError as error:
    print(json.dumps({"error": str(error)}))
else:
    names = sorted(each.name for each in folder.path.iterdir())
    print(json.dumps({"base": folder.base, "names": names, "type": folder.config["model_type"]}))
"""


TRAINING = """
import sys, torch
from pathlib import Path
from node.config.run_config import load_run
from node.tasks.hf import streamed
from node.tasks.hf.settings import HfMachine, HfSettings, HfValues, ModelError
from node.tasks.spec import WorkerSpec
from node.training.build import build
streamed.WINDOW_BYTES, streamed.RETRY_SECONDS = 6000, ()
recipe = load_run(None, {"task": "hf"}, ["butterfly"]).recipe
values = HfValues(HfSettings("full", context=32, rows=2), HfMachine(sys.argv[1]))
for name in sys.argv[2:]:
    try:
        job = build(WorkerSpec(values, recipe, 5, data=Path(name), device="cpu", threads=1), torch.empty, False)
        batches = [job.learner._task.batch(5, position)[0] for position in range(100)]  # of all four windows
        print(job.learner.step(0, 0).tokens > 0, len({str(each) for each in batches}) > 30, len(job.held_out) > 100)
    except ModelError as error:
        print(error)
"""


RANKS = """
import asyncio, sys, torch
from pathlib import Path
from node.runtime.compute import ThreadCompute
from node.tasks.hf.settings import HfMachine, HfSettings, HfValues
from node.tasks.recipe import Recipe
from node.tasks.spec import WorkerSpec
from node.training import process
from node.training.remote import RemoteTrainer
from tests.support.rank_groups import round_of, vector

process._program = lambda spec: "tests.support.small_windows"
values = HfValues(HfSettings("full", context=32, rows=2), HfMachine(sys.argv[1]))
recipe = Recipe(15, 5, 1e-3, 0.9, 0.5, warmup_steps=4, batches=4, mean="token", decay="matrices")
devices = ("cpu",) * int(sys.argv[2])
spec = WorkerSpec(values, recipe, 5, data=Path("hub:org/texts@main:data/*"), devices=devices, threads=1)

async def trained():
    async with ThreadCompute() as compute, RemoteTrainer(spec, compute) as trainer:
        begun, work = await vector(trainer), await round_of(trainer, 0)
        torch.save((begun, await vector(trainer), work.tokens, trainer.restarts), sys.argv[3])

asyncio.run(trained())
"""


class Hub(ThreadingHTTPServer):
    """The endpoints of the hub that a download uses, for one model and one data set.

    Attributes:
        texts: the files of the data set.
        asked: paths of all requests.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.folder, self.asked = folder, [""]
        words = [f"word{number % 37} is not word{number % 11}.\n" for number in range(400)]
        lines = [json.dumps({"text": "".join(words[low : low + 9])}) + "\n" for low in range(0, 391, 3)]
        self.texts = {f"data/part-{part}.jsonl": "".join(lines[part::8]).encode() for part in range(8)}
        self.texts |= {"README.md": b"of the data set", "data/image.png": b"\0", "old/part.jsonl": b"{}"}


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        if path in (f"/api/models/org/tiny/revision/{name}" for name in ("main", COMMIT)):
            files = [
                {"rfilename": each.name, "size": each.stat().st_size} for each in sorted(self.server.folder.iterdir())
            ]
            self.answer(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": files}).encode())
        elif path == f"/api/models/org/tiny/tree/{COMMIT}":
            names = [
                {"type": "file", "path": each.name, "size": each.stat().st_size, "oid": "0" * 40}
                for each in sorted(self.server.folder.iterdir())
            ]
            self.answer(json.dumps(names).encode())
        elif path == "/api/datasets/org/evil/revision/main":
            self.answer(json.dumps({"id": "org/evil", "sha": COMMIT, "siblings": EVIL}).encode())
        elif path == "/api/datasets/org/texts/revision/main":
            texts = [{"rfilename": name, "size": len(content)} for name, content in self.server.texts.items()]
            self.answer(json.dumps({"id": "org/texts", "sha": COMMIT, "siblings": texts}).encode())
        elif path.startswith(start := f"/datasets/org/texts/resolve/{COMMIT}/"):
            self.answer(self.server.texts[path.removeprefix(start)])
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            self.answer((self.server.folder / path.rpartition("/")[2]).read_bytes())
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET

    def answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{len(content)}-{hash(content)}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(made: Path) -> Iterator[Hub]:
    (made / "llama" / "pytorch_model.bin").write_bytes(b"pickle")
    for name in ("modeling_evil.py", "tokenizer_evil.py", "consolidated.safetensors"):
        (made / "llama" / name).write_text("1 / 0")
    server = Hub(made / "llama")
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def found(hub: Hub | None, model: str, what: str, home: Path) -> tuple[dict[str, str], str]:
    """What `find_model` finds, and what it says meanwhile. Without a hub, nothing listens at its address."""
    said, warnings = told(hub, PROGRAM, model, what, home=home)
    return json.loads(said), warnings


def told(hub: Hub | None, program: str, *arguments: str, home: Path) -> tuple[str, str]:
    """What a program prints and warns of."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1] if hub else 1}",
        "HF_HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }
    return run(program, *arguments, environment=environment)


def test_model_of_the_hub_is_fetched_at_its_commit(hub: Hub, tmp_path: Path) -> None:
    answer, said = found(hub, "org/tiny@main", "weights", tmp_path)
    assert answer["base"] == f"org/tiny@{COMMIT}" and answer["type"] == "llama"
    assert "model.safetensors" in answer["names"] and "tokenizer.json" in answer["names"]
    assert not {"pytorch_model.bin", "modeling_evil.py"} & set(answer["names"])
    assert f"org/tiny@{COMMIT}: 0.00 GB to have on this machine" in said
    assert not [path for path in hub.asked if path.endswith((".bin", ".py", "consolidated.safetensors"))]
    again, said = found(None, f"org/tiny@{COMMIT}", "weights", tmp_path)
    assert again == answer and f"warning: org/tiny@{COMMIT} cannot be fetched from the hub: " in said
    lacking, _ = found(None, "org/tiny@main", "weights", tmp_path / "empty")
    assert "cannot be fetched from the hub: ConnectError: " in lacking["error"]


def test_joiner_of_a_full_run_fetches_no_weights(hub: Hub, tmp_path: Path) -> None:
    answer, _ = found(hub, f"org/tiny@{COMMIT}", "", tmp_path)
    assert "config.json" in answer["names"] and "model.safetensors" not in answer["names"]


UNUSABLE = {
    "hub:org/absent": "the data set org/absent cannot be found on the hub: RepositoryNotFoundError: ",
    "hub:org/texts@main:*.zst": "the data set org/texts has no files whose names match *.zst that end in ",
    "hub:org/texts@main:old/*": 'has no "text"',
    "hub:org/evil@main": "the hub names a file '../x.jsonl', not the name of a file: nothing is fetched",
}


@pytest.mark.long
def test_data_set_of_the_hub_is_trained_on_in_windows_or_refused(hub: Hub, made: Path, tmp_path: Path) -> None:
    said, warnings = told(hub, TRAINING, str(made / "llama"), "hub:org/texts@main:data/*", *UNUSABLE, home=tmp_path)
    trained, *refused = said.splitlines()
    assert trained == "True True True"
    assert f"org/texts@{COMMIT}: 0.00 GB in 8 files" in warnings
    fetched = [path.rpartition("/")[2] for path in hub.asked if "/resolve" in path and "/data/" in path]
    assert {f"part-{part}.jsonl" for part in range(8)} == set(fetched)
    for line, why in zip(refused, UNUSABLE.values(), strict=True):
        assert why in line


@pytest.mark.long
@pytest.mark.real
def test_ranks_train_on_the_same_windows_and_fetch_each_once(hub: Hub, made: Path, tmp_path: Path) -> None:
    """As one process does. Two requests for a file: whether it is there, and what it holds."""
    found = []
    for ranks in (1, 3):
        hub.asked.clear()
        told(hub, RANKS, str(made / "qwen3"), str(ranks), str(tmp_path / "found"), home=tmp_path / str(ranks))
        found.append(torch.load(tmp_path / "found"))
        asked = Counter(path for path in hub.asked if "/resolve/" in path and "/data/" in path)
        assert len(asked) >= 6 and max(asked.values()) == 2
    (begun, one, tokens, _), (_, group, tokens_of_group, _) = found
    assert tokens == tokens_of_group > 0 and not any(restarts for *_, restarts in found)
    assert float((group - one).norm() / (one - begun).norm()) < 1e-4
