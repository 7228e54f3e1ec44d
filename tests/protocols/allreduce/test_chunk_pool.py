"""Recycled memory: never two users at once, whoever holds it and on whatever thread; and how much stays free."""

from __future__ import annotations

import gc
import random
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.allreduce import parts
from protocols.allreduce.parts import ChunkPool

GRANULE = 64
SIZES = (1, GRANULE, GRANULE + 1, 2 * GRANULE)


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "GRANULE_BYTES", GRANULE)
        yield


def holders(memory: memoryview) -> list[Any]:
    """All ways in which a user may hold memory: none of them keeps the others' objects alive."""
    return [memory, memory[len(memory) // 2 :], memory.cast("B"), torch.frombuffer(memory, dtype=torch.uint8)[:1]]


class User:
    """Holds memory in one way only, and knows what it has written."""

    def __init__(self, memory: memoryview, way: int, stamp: int) -> None:
        self.stamp = stamp
        memory[:] = bytes([stamp]) * len(memory)
        self.held = holders(memory)[way]

    def check(self) -> None:
        assert {*self.held.tolist()} == {self.stamp}, "another user has written to this memory"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 255)), max_size=60))
def test_memory_in_use_is_never_lent_again(steps: list[tuple[int, int, int]]) -> None:
    pool, users = ChunkPool(), list[User]()
    for action, choice, stamp in steps:
        if action <= 2:
            users.append(User(pool.take(SIZES[choice]), stamp % 4, stamp))
        elif action <= 4 and users:
            users.pop(stamp % len(users))
        else:
            pool.next_round()
        for user in users:
            user.check()


def test_threads_that_take_and_drop_never_share_memory() -> None:
    """Views vanish on any thread: each leaves some of its memory to the others, which drop it."""
    pool, passed = ChunkPool(), deque[User]()

    def hammer(number: int) -> None:
        chance, users = random.Random(number), list[User]()
        for step in range(3000):
            users.append(User(pool.take(GRANULE), chance.randrange(4), (3 * step + number) % 256))
            if len(users) > 20:
                user = users.pop(chance.randrange(len(users)))
                user.check()
                passed.append(user)
            if chance.random() < 0.9:
                with suppress(IndexError):
                    passed.popleft().check()
            if chance.random() < 0.01:
                pool.next_round()

    switch_seconds = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(hammer, range(3)))
    finally:
        sys.setswitchinterval(switch_seconds)


@pytest.mark.parametrize("size", (100, 5 * GRANULE))
def test_unused_memory_is_released(size: int) -> None:
    """After two rounds without use, or of other sizes; and never more stays than a round has taken."""
    pool = ChunkPool()
    held = [pool.take(GRANULE) for _ in range(8)]
    pool.next_round()
    few = [pool.take(GRANULE) for _ in range(3)]
    held.clear()
    assert pool.free_bytes == 8 * GRANULE
    pool.next_round()
    assert pool.free_bytes == 3 * GRANULE
    few.clear()
    assert pool.free_bytes == 3 * GRANULE
    pool.next_round()
    other = [pool.take(size + GRANULE) for _ in range(2)]
    del other
    pool.next_round()
    pool.next_round()
    assert pool.free_bytes == 0


def test_memory_outlives_its_pool() -> None:
    pool = ChunkPool()
    view = pool.take(1000)[10:20]
    view[:] = b"0123456789"
    del pool
    gc.collect()
    assert bytes(view) == b"0123456789"
