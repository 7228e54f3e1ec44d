"""What ranks take, measured, beside what is computed."""

from __future__ import annotations

import pytest

from benchmarks.ranks_memory import CASES, Case, run
from node.ranks.memory import rank_bytes

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(300)]
TOLERANCE = 0.1
ZERO3_SHARE = 0.3
"""Of one process's tensors, over four ranks."""
MEASURED = [case for case in CASES if case.name in ("cpu-zero2-4", "device-zero2-4-offload", "device-zero3-4")]


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case.name)
def test_ranks_take_what_is_computed(case: Case) -> None:
    found = run(case, layers=(1, 4), peaks=False).after_step
    expected = case.expected()
    assert found == pytest.approx([expected, expected, case.ranks * expected], rel=TOLERANCE)
    if case.shard == "zero3":
        assert max(found[:2]) <= ZERO3_SHARE * rank_bytes("one", 1).device
