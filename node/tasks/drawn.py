"""Initial weights that are the same bits on every CPU: a function of (seed, tensor name, element index).

A run with stages pins the root of each stage's weights in its manifest, and any peer of a stage draws them itself.
torch's own generators promise no equal bits across versions and CPUs. Here integers are mixed, converted to float32
exactly, and multiplied once.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn

_PIECE = 1 << 20
_MASK = (1 << 31) - 1


def fill(tensor: torch.Tensor, seed: int, name: str, bound: float) -> None:
    """Fill a float32 tensor with numbers uniform in [-bound, bound), as this name has them for this seed."""
    digest = hashlib.sha256(f"starling weights/{seed}/{name}".encode()).digest()
    first, second = (int.from_bytes(digest[low : low + 4], "big") & _MASK for low in (0, 4))
    flat, scale = tensor.detach().view(-1), torch.tensor(bound / (1 << 23), dtype=torch.float32)
    for low in range(0, len(flat), _PIECE):
        piece = flat[low : low + _PIECE]
        x = torch.arange(low, low + len(piece), dtype=torch.int64) & _MASK
        x = (x * 0x2545F491) & _MASK
        x = (((x ^ (x >> 15)) ^ first) * 0x5BD1E995) & _MASK
        x = (((x ^ (x >> 13)) + second) * 0x27D4EB2F) & _MASK
        piece.copy_((((x ^ (x >> 16)) >> 7) - (1 << 23)).float() * scale)


def draw_weights(module: nn.Module, seed: int) -> None:
    """Draw all weights of a module: linear layers and embeddings as torch's defaults are spread, norms ones.

    A linear layer's weights lie within ±1/√inputs. An embedding's have standard deviation 1, uniform where torch's are
    normal.
    """
    for path, each in module.named_modules():
        if isinstance(each, nn.Linear):
            fill(each.weight, seed, f"{path}.weight", each.in_features**-0.5)
        elif isinstance(each, nn.Embedding):
            fill(each.weight, seed, f"{path}.weight", math.sqrt(3))
        elif isinstance(each, nn.RMSNorm):
            nn.init.ones_(each.weight)
