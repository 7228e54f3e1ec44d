"""A small Llama-style language model over bytes, and the task that trains it.

RMSNorm, rotary positions, SwiGLU (Touvron et al. 2023). State-dict keys, the halves of rotary pairs and the order of
operations are those of `LlamaForCausalLM` in Hugging Face transformers. So its weights load there unchanged, with
`tie_word_embeddings=False`, `rope_theta=10000` and `rms_norm_eps` of `RMS_EPS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from node.tasks.base import Batch
from node.tasks.gpt_presets import VOCABULARY, GptConfig, Preset
from node.tasks.text import Text

RMS_EPS = 1e-5
ROPE_THETA = 10_000.0
EVALUATION_TOKENS = 8192
_EVALUATION_ROWS = 16


class Linear(nn.Linear):
    """A linear layer without bias, left uninitialised: `Gpt` draws all weights from its own generator."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        pass


def rotary(context: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of RoPE (Su et al. 2021), each float32 (context, head); a row's two halves are equal."""
    inverse = ROPE_THETA ** -(torch.arange(0, head, 2, dtype=torch.float32) / head)
    angles = torch.outer(torch.arange(context, dtype=torch.float32), inverse).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to (…, positions, head). Element i forms a pair with i + head/2 (`rotate_half`)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _Attention(nn.Module):
    def __init__(self, shape: GptConfig) -> None:
        super().__init__()
        self.width = shape.width // shape.heads  # of a head
        self.q_proj = Linear(shape.width, shape.width)
        self.k_proj = Linear(shape.width, shape.width)
        self.v_proj = Linear(shape.width, shape.width)
        self.o_proj = Linear(shape.width, shape.width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, positions, _ = x.shape
        q, k, v = (
            project(x).view(rows, positions, -1, self.width).transpose(1, 2)  # a rank may hold some of the heads
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, positions, -1))
        return out


class _Mlp(nn.Module):
    def __init__(self, shape: GptConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.width, shape.hidden)
        self.up_proj = Linear(shape.width, shape.hidden)
        self.down_proj = Linear(shape.hidden, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class TransformerLayer(nn.Module):
    def __init__(self, shape: GptConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(shape)
        self.mlp = _Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.width, RMS_EPS)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, RMS_EPS)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class GptBody(nn.Module):
    """Blocks [low, high): the embedding, then the layers, keyed by their number in the whole model, last the norm."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, shape: GptConfig, low: int, high: int) -> None:
        super().__init__()
        if low == 0:
            self.embed_tokens = nn.Embedding(VOCABULARY, shape.width, _weight=torch.empty(VOCABULARY, shape.width))
        layers = range(max(low, 1) - 1, min(high, shape.layers + 1) - 1)
        self.layers = nn.ModuleDict({str(number): TransformerLayer(shape) for number in layers})
        if high == shape.layers + 2:
            self.norm = nn.RMSNorm(shape.width, RMS_EPS)
        cos, sin = rotary(shape.context, shape.width // shape.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "embed_tokens"):
            x = self.embed_tokens(x)
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        return self.norm(x) if hasattr(self, "norm") else x


class Gpt(nn.Module):
    """The model: int64 bytes (rows, positions), positions <= context, to float32 logits (rows, positions, 256).

    The weights depend only on `seed`, with torch's default distributions. After 400 steps of w128 these gave 1.81 nats
    per byte, where a normal distribution of 0.02 for all weights gave 2.06 (one seed each). The weights are not the
    same bits on every CPU, so a run's founder draws them once, and all other peers download them.
    """

    def __init__(self, shape: GptConfig, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.model = GptBody(shape, 0, shape.layers + 2)
        self.lm_head = Linear(shape.width, VOCABULARY)
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, generator=generator)
            elif isinstance(module, nn.Linear):
                bound = module.in_features**-0.5
                nn.init.uniform_(module.weight, -bound, bound, generator=generator)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.model(tokens))
        return logits

    def generate(self, prompt: bytes, tokens: int, temperature: float = 0.0, seed: int = 0) -> bytes:
        return bytes(self.stream(prompt, tokens, temperature, seed))

    def stream(self, prompt: bytes, tokens: int, temperature: float = 0.0, seed: int = 0) -> Iterator[int]:
        """Continue the end of `prompt` by `tokens` bytes: the likeliest ones, or drawn at a temperature above 0."""
        if not prompt:
            raise ValueError("the prompt is empty")
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt[-self.shape.context :])
        for _ in range(tokens):
            text.append(next_token(self._next(text), temperature, generator))
            yield text[-1]

    @torch.no_grad()
    def _next(self, text: Sequence[int]) -> torch.Tensor:
        """Logits (256) of the byte after `text`, on the CPU."""
        seen = torch.tensor([text[-self.shape.context :]], device=self.lm_head.weight.device)
        logits: torch.Tensor = self(seen)[0, -1].cpu()
        return logits


def next_token(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    """The likeliest token, or one drawn by the generator at a temperature above 0. `logits` are on the CPU."""
    if temperature > 0:
        odds = torch.softmax((logits - logits.max()) / temperature, dim=-1)
        return int(torch.multinomial(odds, 1, generator=generator))
    return int(logits.argmax())


class GptTask:
    module: Gpt

    def __init__(self, preset: Preset, text: Text, seed: int = 0, device: str = "cpu") -> None:
        self.module = Gpt(preset.shape, seed).to(device)
        self.device = device
        self.independent_rows, self._width = preset.rows, preset.shape.context + 1
        self._text = text
        text.require(self._width)

    def tensor_parallel_plan(self, ranks: int) -> Mapping[str, str]:
        """How each layer is divided among ranks, in the words of transformers; ValueError if it cannot be."""
        heads = self.module.shape.heads
        if heads % ranks:
            raise ValueError(f"{heads} attention heads cannot be divided among {ranks} ranks: take a divisor")
        inside = {f"self_attn.{each}_proj": "colwise" for each in "qkv"} | {"self_attn.o_proj": "rowwise"}
        inside |= {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
        return {f"model.layers.*.{name}": how for name, how in inside.items()}

    def batch(self, seed: int, position: int) -> Batch:
        """Inputs and targets, each int64 (rows, context)."""
        windows = self._text.windows(seed, position, self.independent_rows, self._width)
        return windows[:, :-1], windows[:, 1:]

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        inputs, targets = (each.to(self.device) for each in batch)
        return functional.cross_entropy(self.module(inputs).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def evaluate(self) -> float:
        """Nats per byte over about `EVALUATION_TOKENS` bytes, in windows spread evenly over the held-out text."""
        windows = self._text.held_out_windows(max(1, EVALUATION_TOKENS // (self._width - 1)), self._width)
        total = 0.0
        for low in range(0, len(windows), _EVALUATION_ROWS):
            rows = windows[low : low + _EVALUATION_ROWS]
            total += float(self.loss(rows[:, :-1], rows[:, 1:])) * len(rows)
        return total / len(windows)
