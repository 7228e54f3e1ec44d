"""The names that a run's configuration chooses from, without the code behind them: that needs PyTorch."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

from protocols.base import CHUNK_BYTES

REPLICATED_PROTOCOLS: Final = ("butterfly",)
INDEPENDENT_PROTOCOLS: Final = (
    *("gossip", "moshpit", "push_sum"),
    *("data_parallel", "ring", "parameter_server", "parameter_server_async"),
)
CODECS: Final = ("fp32", "fp16", "bf16", "int8", "int4", "e3m0", "topk")
ROBUST_RULES: Final = ("mean", "centered_clip", "trimmed_mean", "median", "krum", "multi_krum")
SCHEDULES: Final = ("random", "ring", "exponential", "one-peer-exponential")
ACTIVATION_CODECS: Final[Mapping[str, int]] = MappingProxyType({"bf16": 2, "fp32": 4})
"""How activations and their gradients may travel between the stages of a model, and the bytes of an element."""

CHUNK_ELEMENTS: Final = CHUNK_BYTES // 4
TOPK_GRAIN: Final = 4096
"""Elements of which codec topk sends the largest; vectors may only be cut at multiples of this number."""


def require_known(kind: str, name: str, names: Collection[str]) -> str:
    """The name, if it is one of these.

    Args:
        kind: of name, for the message.

    Raises:
        ValueError: it is not. The one-line message lists the names.
    """
    if name in names:
        return name
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown {kind} {name[:40]!r}: there are {', '.join(names)}{hint}")
