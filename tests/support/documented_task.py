"""The users' own tasks that the documents show."""

from __future__ import annotations

import re

from tests.support.paths import REPOSITORY


def documented_task(page: str = "docs/tasks.md") -> str:
    found = re.search("```python\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL)
    assert found
    return found[1]
