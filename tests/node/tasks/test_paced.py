"""The paced task: the same bits everywhere, at no cost."""

import hashlib

import pytest
import torch

from node.tasks.paced import SLICE, Paced


def digest(task: Paced) -> str:
    return hashlib.sha256(bytes(task.vector.view(torch.uint8).tolist())).hexdigest()[:16]


def walk(seed: int, elements: int = 3 * SLICE + 5, steps: int = 10) -> Paced:
    task = Paced(elements, seed)
    for step in range(steps):
        task.step(step // 4, step % 4)
    return task


def test_walk_depends_only_on_its_inputs() -> None:
    """On seed, round and step; a change of any of them changes it."""
    assert digest(Paced(1000, seed=1)) == digest(Paced(1000, seed=2)) == "5b92e754aec91d10"
    assert digest(walk(1)) == digest(walk(1)) == "d48321d4b9ba9888"
    assert digest(walk(2)) != digest(walk(1))
    moves = set()
    for seed, number, step in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        task = Paced(100, seed)
        done = task.step(number, step)
        assert done.loss == pytest.approx(float(task.vector.square().mean())) and done.tokens == 1024
        moves.add(digest(task))
    assert len(moves) == 4


def test_bad_values_give_one_line_error() -> None:
    with pytest.raises(ValueError, match="needs elements and tokens, not 0 and 1024"):
        Paced(0, 0)
    with pytest.raises(ValueError, match="not 5 and 0"):
        Paced(5, 0, tokens_per_step=0)


def test_walk_resumes_from_a_given_vector() -> None:
    task = Paced(1000, seed=1, allocate=lambda elements: torch.full((elements,), 0.5), resume=True)
    assert task.vector.eq(0.5).all() and task.position == 0
    task.step(0, 0)
    assert task.position == 1
    filled = Paced(1000, seed=1, allocate=lambda elements: torch.full((elements,), 0.5))
    assert digest(filled) == digest(Paced(1000, seed=1))
