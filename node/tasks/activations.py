"""How activations and their gradients may travel between the stages of a model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

ACTIVATION_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"bf16": torch.bfloat16, "fp32": torch.float32})
"""Name in the run's configuration -> dtype."""
