"""Two scripts with transformers' own loop, each with a real peer: one starts a run, one joins it, and they agree.

`test_page_real` plays the other libraries' loops.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.paths import REPOSITORY
from tests.support.real_swarm import RealPeer, RealSwarm, wait
from tests.support.warm import MARK

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(300)]
ROUNDS, SECONDS = 6, 120.0

BEGIN = f"""
import sys, time, warnings
from pathlib import Path
import torch
warnings.simplefilter("ignore")
home, name, address = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
options = ["--listen", "/ip4/127.0.0.1/tcp/0", "--no-nat", "--nickname", name]
given = {{"state_dir": home / name, "options": options}}
if address:
    given |= {{"bootstrap": address}}
else:
    given |= {{"inner_steps": 4, "rounds": {ROUNDS}}}
torch.manual_seed(len(address))


class Rows(torch.utils.data.Dataset):
    "Rows to learn, once both scripts are in the run."

    def __len__(self):
        return 10_000

    def __getitem__(self, place):
        while not (home / "together").exists():
            time.sleep(0.02)
        time.sleep(0.01)
        ids = torch.arange(place, place + 8) % 20
        return {{"input_ids": ids, "labels": ids}}


def adapted(kind):
    return kind(**given) if address else kind.start(**given)


def done(model):
    torch.save(torch.cat([each.detach().flatten() for each in model.parameters()]), home / f"{{name}}.pt")
"""

TRANSFORMERS = """
from transformers import AutoModelForCausalLM, Qwen3Config, Trainer, TrainingArguments
from node.library.transformers import SwarmCallback

config = Qwen3Config(
    vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=16,
)
model = AutoModelForCausalLM.from_config(config)
settings = TrainingArguments(
    output_dir=home / f"{name}-out", use_cpu=True, report_to="none", per_device_train_batch_size=2,
    gradient_accumulation_steps=2, max_steps=2000, save_strategy="no", logging_steps=4,
)
trainer = Trainer(model=model, args=settings, train_dataset=Rows(), callbacks=[adapted(SwarmCallback)])
trainer.train()
assert trainer.state.global_step < 2000
assert any(each.get("swarm/peers") == 2 for each in trainer.state.log_history)
done(model)
"""


def start(swarm: RealSwarm, name: str, address: str = "") -> RealPeer:
    """Run the script. Its peer's directory has the name."""
    peer = swarm.peer(name)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NODE_")}
    environment |= {MARK: peer._mark, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with peer._log.open("wb") as log:
        peer._process = subprocess.Popen(
            [sys.executable, "-P", "-c", BEGIN + TRANSFORMERS, str(swarm.home), name, address],
            env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    wait(f"{name} is in the run", lambda: not peer.running or peer.meet(), SECONDS)
    assert peer.running, peer.said()
    return peer


def test_two_scripts_train_together_and_agree(tmp_path: Path) -> None:
    with RealSwarm(tmp_path) as swarm:
        a = start(swarm, "a")
        b = start(swarm, "b", a.address)
        wait("each sees the other", lambda: a.sees(b) and b.sees(a), SECONDS)
        (tmp_path / "together").touch()
        for peer in (a, b):
            assert peer.ends(SECONDS) == 0, peer.said()
        assert swarm.all_in_one_mean([a, b]), "no mean has the work of both"
        assert a.last()["round"] == b.last()["round"]
        rounds = [report["outcome"] for report in a.reports()]  # one that admits the other while a waits has no mean
        assert sum(each in ("alone", "committed") for each in rounds) == ROUNDS, rounds
        mine, theirs = (torch.load(tmp_path / f"{name}.pt") for name in "ab")
        assert torch.equal(mine, theirs)
