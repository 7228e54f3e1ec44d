"""The paced task: the same bits everywhere, at no cost."""

import hashlib
import itertools

import pytest
import torch

from node.tasks.paced import SLICE, Paced


def digest(task: Paced) -> str:
    return hashlib.sha256(bytes(task.vectors[0].view(torch.uint8).tolist())).hexdigest()[:16]


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
        task.step(number, step)
        moves.add(digest(task))
    assert len(moves) == 4


def test_steps_rotate_over_slices() -> None:
    task = Paced(3 * SLICE + 5, seed=3)
    touched = []
    for step in range(8):
        before = task.vectors[0].clone()
        result = task.step(0, step)
        moved = (task.vectors[0] != before).nonzero().flatten()
        assert len(moved) > 0 and int(moved[0]) // SLICE == int(moved[-1]) // SLICE
        touched.append(int(moved[0]) // SLICE)
        place = task.vectors[0][touched[-1] * SLICE : (touched[-1] + 1) * SLICE]
        assert result.loss == pytest.approx(float((place * place).mean())) and result.tokens == 1024
    assert [(after - before) % 4 for before, after in itertools.pairwise(touched)] == [1] * 7


def test_walk_stays_bounded_and_spread() -> None:
    vector = walk(5, elements=SLICE, steps=300).vectors[0]
    assert vector.abs().max() <= 1 and 0.2 < vector.std() < 0.5 and abs(vector.mean()) < 0.05
    start = Paced((1 << 20) + 7, 0).vectors[0]
    assert start.unique().numel() > 1_000_000 and abs(start.mean()) < 0.01 and start.min() >= -1


def test_bad_values_give_one_line_error() -> None:
    with pytest.raises(ValueError, match="needs elements and tokens, not 0 and 1024"):
        Paced(0, 0)
    with pytest.raises(ValueError, match="not 5 and 0"):
        Paced(5, 0, tokens_per_step=0)


def test_walk_resumes_from_a_given_vector() -> None:
    task = Paced(1000, seed=1, allocate=lambda elements: torch.full((elements,), 0.5), resume=True)
    assert task.vectors[0].eq(0.5).all() and task.position == 0
    task.step(0, 0)
    assert task.position == 1
    filled = Paced(1000, seed=1, allocate=lambda elements: torch.full((elements,), 0.5))
    assert digest(filled) == digest(Paced(1000, seed=1))
