"""Limits that mean the same in more than one protocol."""

from __future__ import annotations

import torch

LARGEST_FLOAT32 = torch.finfo(torch.float32).max
SMALLEST_NORMAL_FLOAT32 = torch.finfo(torch.float32).tiny

DISTRUST_SECONDS = 60.0
"""A peer that broke a rule, or showed what it could not prove, is left alone for so long."""
REQUESTER_IDLE_SECONDS = 30.0
"""A peer that asks for nothing on an open stream, or takes nothing of what it asked for, for so long is sent away."""
SLOWEST_BYTES_PER_SECOND = 65_536.0
"""A peer that fetches bulk data waits at most as long as the data takes at this rate."""
