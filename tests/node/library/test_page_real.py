"""The scripts of docs/own-loop.md, as they stand in the page: two peers each, that agree at the end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from node.storage.statedir import is_over
from tests.support.paths import REPOSITORY
from tests.support.real_swarm import LISTEN, START_SECONDS, RealPeer, RealSwarm, wait

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(300)]
SCRIPTS = ("plain", "trainer", "accelerate", "lightning")
RUN = "[recipe]\ninner_steps = 10\nrounds = 4\n"


def scripts() -> dict[str, str]:
    blocks = re.findall("```python\n(.*?)```", (REPOSITORY / "docs/own-loop.md").read_text(), re.DOTALL)
    return dict(zip(("mine", *SCRIPTS), blocks, strict=True))


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_of_the_page_runs_as_two_peers(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    if name == "lightning":
        pytest.importorskip("lightning")
    for each in ("mine", name):
        (tmp_path / f"{each}_.py".replace("mine_", "mine")).write_text(scripts()[each])
    with RealSwarm(tmp_path, RUN) as swarm:
        a = swarm.peer("a").start("--own-loop", "--run", str(tmp_path / "run.toml"), "--wait-for", "2", threads=False)
        first = run(tmp_path, name, a, {"NODE_ATTACH": str(a.directory)})
        wait("others can join", a.meet, START_SECONDS)
        b = swarm.peer("b")
        joins = {"NODE_BOOTSTRAP": a.address, "NODE_STATE_DIR": str(b.directory), "NODE_LISTEN": LISTEN}
        second = run(tmp_path, name, b, {**joins, "NODE_NAT": "false"})
        for process, peer in ((first, a), (second, b)):
            assert process.wait(200) == 0, log(tmp_path, peer).read_text()[-2000:]
        wait("the peer that the script started has ended", lambda: not b.left(), 20)
        assert a.ends(20) == 0
        assert is_over(a.directory) and is_over(b.directory)
        last = [each.last() for each in (a, b)]
        assert last[0]["params_hash"] == last[1]["params_hash"] and last[0]["tokens"] > 0 and last[1]["tokens"] > 0
        assert any(len(each["peers"]) == 2 for each in a.reports())  # a peer that stalls may miss the last round


def log(home: Path, peer: RealPeer) -> Path:
    return home / f"{peer.name}.script.log"


def run(home: Path, name: str, peer: RealPeer, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    usual = {key: value for key, value in os.environ.items() if not key.startswith("NODE_")}
    environment = {**usual, **variables, **peer.mark, "PYTHONPATH": f"{REPOSITORY}:{home}", "OMP_NUM_THREADS": "1"}
    with log(home, peer).open("wb") as output:
        command = [sys.executable, f"{home}/{name}_.py"]
        return subprocess.Popen(command, env=environment, cwd=home, stdout=output, stderr=output)
