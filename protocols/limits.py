"""Limits that mean the same in more than one protocol."""

from __future__ import annotations

import torch

LARGEST_FLOAT32 = torch.finfo(torch.float32).max
SMALLEST_NORMAL_FLOAT32 = torch.finfo(torch.float32).tiny

DISTRUST_SECONDS = 60.0
"""A peer that broke a rule, or could not prove its claim, is not asked again for this time."""
REQUESTER_IDLE_SECONDS = 30.0
"""A stream is closed if its requester asks for nothing, or takes nothing of what it asked for, for this time."""
SLOWEST_BYTES_PER_SECOND = 65_536.0
"""A peer waits for bulk data at most as long as the data takes at this rate."""
