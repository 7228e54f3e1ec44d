"""The path of the repository, for tests that start processes in it or read its files."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
