"""A round report with a value in every field, for tests of files and messages that carry reports."""

from __future__ import annotations

import math

from node.reporting.report import RoundReport

REPORT = RoundReport(
    "r", "p", 1, 0, "a", "b", "anchor0", "committed", ("p", "q"), {"q": ("a", 1, 2)}, {"q": "late"}, True, 0.5, 100,
    math.nan, "h", 2.0, 0.1, 0.2, 5, 6, 0.0,
)  # fmt: skip
