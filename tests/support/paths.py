"""The path of the repository, for tests that start processes in it or read its files."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def documented_task(page: str = "docs/tasks.md") -> str:
    found = re.search("```python\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL)
    assert found
    return found[1]
