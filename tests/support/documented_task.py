"""The user's own task that docs/tasks.md shows."""

from __future__ import annotations

import re

from tests.support.paths import REPOSITORY


def documented_task() -> str:
    """The source of the module in docs/tasks.md."""
    found = re.search("```python\n(.*?)```", (REPOSITORY / "docs" / "tasks.md").read_text(), re.DOTALL)
    assert found
    return found[1]
