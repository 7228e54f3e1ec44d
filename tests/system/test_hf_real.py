"""Two real peers fine-tune a model of Hugging Face together; a third with another base is refused; the export loads."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch

from node.cli.app import main
from node.export.fine_tuned import load_fine_tuned
from node.export.trained_model import load_trained
from node.tasks.hf.settings import ModelError
from protocols.sync.snapshot import SnapshotIndex
from tests.support.real_swarm import START_SECONDS, RealPeer, RealSwarm, wait
from tests.support.small_models import conversations, saved_model, saved_tokenizer, story, write_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
RUN = """
task = "hf"
[hf]
context = 64
train = "{train}"
format = "{format}"
[recipe]
inner_steps = 8
rounds = 10000
learning_rate = 2e-3
"""
IDS = torch.tensor([[9, 11, 40, 7, 300, 12, 77, 5]])


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_model(tmp_path / "base")
    write_model(tmp_path / "other", seed=1)
    (tmp_path / "text").mkdir()
    for number in range(2):
        (tmp_path / "text" / f"{number}.txt").write_text(story(800, 1000 * number))
    (tmp_path / "chat.jsonl").write_text(conversations(80))
    return tmp_path


def trained_by_two(home: Path, train: str, kind: str, joiners: Path) -> tuple[RealPeer, set[str]]:
    """Train with two peers until a checkpoint holds work of both; peers that must not train are refused meanwhile.

    Returns:
        The first peer, and the hashes of the parameters that the other has reported.
    """
    data = str(home / ("chat.jsonl" if kind == "chat" else "text"))

    def prepare(peer: RealPeer) -> None:
        peer.modules = ("transformers.models.auto", "peft")
        peer.environment |= {"XDG_CACHE_HOME": str(home / "cache"), "NODE_CHECKPOINT_EVERY": "1", "NODE_NICE": "0"}

    with RealSwarm(home, RUN.format(train=train, format=kind), prepare) as swarm:
        mine = ("--model", str(home / "base"), "--data", data)
        a = swarm.found("a", *mine, "--wait-for", "2", seconds=2 * START_SECONDS)
        assert "--task hf --model MODEL --data FILE\n" in a.said()
        asked = ("--bootstrap", a.address, "--data", data)
        c = swarm.peer("c").start(*asked)
        assert c.ends(START_SECONDS) == 2
        assert "which its founder calls base (" in c.said() and "join with --task hf --model" in c.said()
        if train == "lora":
            d = swarm.peer("d").start(*asked, "--task", "hf", "--model", str(home / "other"))
            assert d.ends(START_SECONDS) == 2 and not d.reports()
            assert "has other weights than the run's model (weights " in d.said().splitlines()[-1]
        b = swarm.peer("b").start(*asked, "--task", "hf", "--model", str(joiners))
        wait("b gets into the run", b.meet, 2 * START_SECONDS)
        mean = wait("both are in one mean", lambda: swarm.all_in_one_mean([a, b]), 2 * START_SECONDS)
        wait("a checkpoint of it", lambda: rounds_of(a) > mean["round"], 2 * START_SECONDS)
        fetched = home / "fetched"
        given = ["--bootstrap", a.address, "--model", str(home / "base"), "--out", str(fetched), "--no-check"]
        assert main(["export", *given]) == 0
        a.strike()
        last = root(load_trained([a.directory]).tensors)
        wait("b says that it has what a keeps", lambda: last in hashes(b), START_SECONDS)
    return a, hashes(b)


def hashes(peer: RealPeer) -> set[str]:
    return {each["params_hash"] for each in peer.reports()}


def rounds_of(peer: RealPeer) -> int:
    """Rounds before the peer's newest checkpoint."""
    try:
        return load_trained([peer.directory]).checkpoints[0].round
    except ModelError:
        return 0


def exported(peer: RealPeer, out: Path, model: Path, *more: str) -> Path:
    given = ["--state-dir", str(peer.directory), "--out", str(out), "--model", str(model), "--no-check", *more]
    assert main(["export", *given]) == 0
    return out


def root(tensors: Mapping[str, torch.Tensor]) -> str:
    vector = torch.cat([each.detach().flatten() for each in tensors.values()])
    return SnapshotIndex.of(vector, torch.zeros_like(vector)).parameters_root.hex()


def logits(module: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = module(input_ids=IDS).logits
        return found


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft's own use of transformers
def test_adapters_are_trained_and_exported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    before = (home / "base" / "model.safetensors").read_bytes()
    peer, agreed = trained_by_two(home, "lora", "text", Path(shutil.copytree(home / "base", home / "copy")))
    trained = load_trained([peer.directory])
    tuned = load_fine_tuned(trained, str(home / "base"))
    assert sum(each.numel() for each in tuned.module.parameters() if each.requires_grad) == sum(
        trained.manifest.elements
    )
    assert trained.manifest.model and peer.reports()[-1]["held_out_loss"] < trained.manifest.model.base_loss
    here = logits(tuned.module)

    import peft

    adapter = exported(peer, home / "adapter", home / "base")
    base = saved_model(home / "base")
    loaded = peft.PeftModel.from_pretrained(base, adapter)
    found = {name: each for name, each in loaded.named_parameters() if "lora_" in name}
    assert root(found) in agreed, "bit for bit what the peers have agreed on"
    fetched = safetensors.torch.load_file(home / "fetched" / "adapter_model.safetensors")
    assert {name: each.shape for name, each in fetched.items()} == {
        name.replace(".default.", "."): each.shape for name, each in found.items()
    }
    named = {name.replace(".default.", "."): name for name in found}
    assert root({named[name]: fetched[name] for name in named}) in agreed, "and so is what a stranger fetches"
    assert torch.equal(logits(loaded), here)
    merged = saved_model(exported(peer, home / "m", home / "base", "--merge"))
    assert float((logits(merged) - here).abs().max()) < 1e-5
    assert (home / "base" / "model.safetensors").read_bytes() == before
    assert float((logits(saved_model(home / "base")) - here).abs().max()) > 1e-3


@pytest.mark.long
def test_whole_model_is_trained_and_exported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    light = Path(shutil.copytree(home / "base", home / "light"))
    (light / "model.safetensors").unlink()
    peer, agreed = trained_by_two(home, "full", "chat", light)
    assert not (peer.directory / "held-out.bin").exists(), "private chats do not travel"
    out = exported(peer, home / "out", light)
    model, info = saved_model(out, output_loading_info=True)
    assert not any(info[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert root(dict(model.named_parameters())) in agreed
    stranger = saved_model(home / "fetched")
    assert root(dict(stranger.named_parameters())) in agreed
    assert model.lm_head.weight is model.model.embed_tokens.weight, "still tied"
    tuned = load_fine_tuned(load_trained([peer.directory]), str(light))
    assert torch.equal(logits(model), logits(tuned.module))
    tokenizer = saved_tokenizer(out)
    assert tokenizer.decode(tokenizer("Ann has")["input_ids"]) == "Ann has" and tokenizer.chat_template
