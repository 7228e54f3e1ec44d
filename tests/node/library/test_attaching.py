"""Scripts that attach: those that are refused or die at once leave the run's parameters as they are, and others may
come.
"""

from __future__ import annotations

import math
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from node.library import Swarm, SwarmError, peer
from node.library.link import Link
from node.library.parameters import keeping_modes
from node.library.shown import Messages
from tests.node.library.peer_side import Rounds


def model(hidden: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(4, hidden), nn.Linear(hidden, 2))


def join(directory: Path, module: nn.Module, **more: Any) -> Swarm:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    return Swarm.join(module, optimizer, attach=directory, quiet=True, **more)


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in module.parameters()])


def train(swarm: Swarm, module: nn.Module, rounds: int) -> None:
    ended = 0
    while ended < rounds:
        module(torch.randn(3, 4)).sum().backward()
        swarm._optimizer.step()
        ended += swarm.step(tokens=3).ended


def test_refused_and_dead_scripts_change_nothing(tmp_path: Path) -> None:
    with Rounds(tmp_path, round_seconds=0.3) as rounds:
        for _ in range(2):  # dies before it has said anything, and with the descriptors in its hands
            link = Link.connect(tmp_path)
            link.receive(2)
            link.close()
        first = model()
        with join(tmp_path, first, join_seconds=20) as swarm:
            train(swarm, first, 2)
        start = rounds.anchors[0]
        with pytest.raises(SwarmError, match=r"has 0\.weight of shape \(9, 4\) where the peer's run has 0\.weight of"):
            join(tmp_path, model(9), join_seconds=20)
        last = model()
        with join(tmp_path, last, join_seconds=20) as swarm:
            train(swarm, last, 1)
            number = swarm.step(tokens=0).round
        assert any(torch.allclose(flat(last), start + added, atol=1e-3) for added in range(number + 1)), (
            "the first script's, and the means"
        )


def test_steps_taken_alone_do_not_count_in_the_next_round(tmp_path: Path) -> None:
    with Rounds(tmp_path, inner_steps=5, round_seconds=30) as rounds:
        module = model()
        with join(tmp_path, module) as swarm:
            assert swarm._worker
            swarm._worker.drop()
            while True:
                swarm._optimizer.step()
                if swarm.step(tokens=3).ended:
                    break
            swarm._optimizer.step()
            swarm.step(tokens=3)
            assert swarm._worker.training.steps_left - swarm._counter.steps == 4 and len(rounds.anchors) == 1


def test_script_that_leaves_hands_over_its_part_of_the_round(tmp_path: Path) -> None:
    """The next script of the peer goes on from it, and the round has the work of both."""
    with Rounds(tmp_path, inner_steps=500, round_seconds=4) as rounds:
        left: list[torch.Tensor] = []
        for _ in range(2):
            module = model()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            with Swarm.join(module, optimizer, attach=tmp_path, quiet=True) as swarm:
                assert not left or torch.equal(flat(module), left[0])
                module(torch.randn(3, 4)).sum().backward()
                optimizer.step()
                swarm.step(tokens=3)
                left.append(flat(module))
        until = time.monotonic() + 20
        while not rounds.contributions and time.monotonic() < until:
            time.sleep(0.05)
        work, local = rounds.contributions[0]
        assert work.tokens == 6 and torch.equal(local, left[1]) and not torch.equal(*left)


def test_cell_that_attaches_may_be_run_again(tmp_path: Path) -> None:
    with Rounds(tmp_path, inner_steps=500, round_seconds=30):
        swarms = [join(tmp_path, model(), join_seconds=20) for _ in range(2)]
        assert [each.active for each in swarms] == [False, True]
        with pytest.raises(SwarmError, match="tokens=-1: give a whole number"):
            swarms[1].step(tokens=-1)
        assert swarms[1].active and not swarms[1].waits
        swarms[1].leave()


def test_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SwarmError, match="the optimizer trains no parameter of the model"):
        Swarm.join(model(), torch.optim.SGD(model().parameters(), lr=0.1), attach=tmp_path)


def test_relative_paths_stay_those_of_the_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer in place of one that died is one of the same state directory, though the script has gone elsewhere."""
    places: list[Path] = []
    monkeypatch.setattr(peer, "ChildPeer", lambda *given: places.append(given[4]))
    monkeypatch.chdir(tmp_path)
    own = peer.ScriptPeer(["--state-dir", "mine"], "", None, Messages(True))
    other = peer.ScriptPeer(None, "", Path("first"), Messages(True))
    (tmp_path / "else").mkdir()
    monkeypatch.chdir("else")
    own.connect(has_joined=False)
    assert places == [tmp_path] and other.state_dir == tmp_path / "first"


@pytest.mark.parametrize("name", ["attic 🌍", 'a "b"', "a\\b"])
def test_settings_are_read_as_they_were_given(name: str) -> None:
    assert tomllib.loads(peer.run_file({"name": name, "options": {name: 1}})) == {"name": name, "options": {name: 1}}


@pytest.mark.parametrize("settings", [{"task": "gpt"}, {"recipe": {"inner_steps": 7}}])
def test_settings_against_the_call_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SwarmError, match=r"settings: \w+ = .*, where this call has .*: leave it out"):
        Swarm.start(model(), inner_steps=5, rounds=5, settings=settings)


def test_join_says_for_what_it_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SwarmError, match=r"not in a run after 0\.1 s"):
        Swarm.join(model(), attach=tmp_path, join_seconds=0.1)
    assert f"waiting: no peer with --own-loop runs in {tmp_path}" in capsys.readouterr().err


def test_script_whose_training_is_not_finite_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Rounds(tmp_path, inner_steps=2, round_seconds=30):
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with Swarm.join(module, optimizer, attach=tmp_path, join_seconds=20) as swarm:
            for _ in range(2):
                (module(torch.randn(3, 4)).sum() * math.nan).backward()
                optimizer.step()
                swarm.step(tokens=3)
    assert "is not finite (NaN or infinity), and does not count" in capsys.readouterr().err


def test_evaluation_leaves_modules_in_their_modes() -> None:
    first, second = nn.Linear(2, 2), nn.Dropout().eval()
    module = nn.Sequential(first, second)

    def evaluate() -> float:
        module.eval()
        return 1.0 if not first.training else 1 / 0

    assert keeping_modes(module, evaluate)() == 1.0
    assert [each.training for each in module.modules()] == [True, True, False]
    with pytest.raises(ZeroDivisionError):
        keeping_modes(module, lambda: 1 / len([each for each in module.eval().modules() if each.training]))()
    assert module.training


@pytest.mark.parametrize(
    "more, words",
    [
        (nn.LazyLinear(2), r"0\.weight is without data: give it data"),
        (nn.Linear(2, 2, device="meta"), r"0\.weight is without data: give it data"),
        (nn.Linear(2, 2, dtype=torch.cfloat), r"0\.weight is torch\.complex64: only real numbers are averaged"),
    ],
)
def test_parameters_that_cannot_be_averaged_are_named(more: nn.Module, words: str, tmp_path: Path) -> None:
    with pytest.raises(SwarmError, match=words):
        Swarm.join(nn.Sequential(more), attach=tmp_path)
