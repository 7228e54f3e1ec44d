"""Scopes: which parameters a chain of rounds is about. A run without stages has one scope, `run`."""

from __future__ import annotations

MAX_STAGES = 32
"""Largest number of stages of a run."""
RUN_SCOPE = "run"
"""The scope of a whole model."""


def stage_scope(stage: int) -> str:
    """The scope in which the replicas of a stage average."""
    return f"{RUN_SCOPE}/stage/{stage}"
