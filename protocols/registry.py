"""The names that a run's configuration chooses from, without the code behind them: that needs PyTorch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final, cast

from protocols.base import CHUNK_BYTES

REPLICATED_PROTOCOLS: Final = {"butterfly": "protocols.butterfly.averager:Butterfly"}
"""The protocols with replicated state: name -> module and class (or function) that makes the averager."""
INDEPENDENT_PROTOCOLS: Final = {
    "gossip": "protocols.pairwise.gossip:Gossip",
    "moshpit": "protocols.moshpit.averager:Moshpit",
    "push_sum": "protocols.pairwise.push_sum:PushSum",
    "data_parallel": "protocols.baselines.algorithms:data_parallel",
    "ring": "protocols.baselines.algorithms:ring",
    "parameter_server": "protocols.baselines.algorithms:parameter_server",
    "parameter_server_async": "protocols.baselines.async_parameter_server:AsyncParameterServer",
}
"""The same for independent state."""
CODECS: Final = ("fp32", "fp16", "bf16", "int8", "int4", "e3m0", "topk")
ROBUST_RULES: Final = ("mean", "centered_clip", "trimmed_mean", "median", "krum", "multi_krum")
SCHEDULES: Final = ("random", "ring", "exponential", "one-peer-exponential")
ACTIVATION_CODECS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {"bf16": (2, 0), "fp32": (4, 0), "int8": (1, 4)}
)
"""How activations and their gradients may travel between stages: bytes of an element, and more for each token."""

CHUNK_ELEMENTS: Final = CHUNK_BYTES // 4
TOPK_GRAIN: Final = 4096
"""Elements of which codec topk sends the largest; vectors may only be cut at multiples of this number."""


def activation_bytes(codec: str, tokens: int, width: int) -> int:
    of_element, of_token = ACTIVATION_CODECS[codec]
    return tokens * (width * of_element + of_token)


def load_averager(name: str) -> Callable[..., Any]:
    """What creates the averager of this protocol from a `Host` and `Settings`."""
    module, _, factory = {**REPLICATED_PROTOCOLS, **INDEPENDENT_PROTOCOLS}[name].partition(":")
    return cast("Callable[..., Any]", getattr(import_module(module), factory))


def require_known(kind: str, name: str, names: Collection[str]) -> str:
    """Return the name if it is one of these; else raise a `ValueError` whose one line lists them."""
    if name in names:
        return name
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown {kind} {name[:40]!r}: there are {', '.join(names)}{hint}")
