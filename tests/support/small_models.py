"""Real models of Hugging Face in small shapes, with a tokenizer of their own, written as folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

WORDS = 384
CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT_WITH_MARKS = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|end|>{% endgeneration %}{% else %}{{ message.content }}<|end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def shape(kind: str) -> Any:
    """Configuration of a small model of a kind."""
    import transformers  # takes a second, and only a few tests need it

    common = {"vocab_size": WORDS, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    wide = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    if kind == "qwen3":
        return transformers.Qwen3Config(**common, **wide, head_dim=8, tie_word_embeddings=True)
    if kind == "llama":
        return transformers.LlamaConfig(**common, **wide)
    if kind == "olmoe":
        return transformers.OlmoeConfig(**common, **wide, num_experts=4, num_experts_per_tok=2)
    return transformers.GPT2Config(**common, n_embd=32, n_layer=2, n_head=4, n_positions=128)


def empty_model(config: Any) -> Any:
    """A model of this configuration that takes no memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def saved_model(folder: Path, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **changes)


def saved_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def write_model(folder: Path, kind: str = "qwen3", seed: int = 0) -> Path:
    """Write a model with random weights and its tokenizer."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(shape(kind))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, template: str | None = CHAT, vocabulary: int = WORDS) -> None:
    """Write a byte-level tokenizer with a few merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(story(200).splitlines(), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    if template:
        fast.chat_template = template
    fast.save_pretrained(folder)


def story(lines: int, first: int = 0) -> str:
    """A text with something to learn in it."""
    names, things = ("Ann", "Bob", "Cem", "Dora", "Eli"), ("apples", "boats", "cats", "drums")
    return "".join(
        f"{number}. {names[number % 5]} has {number % 7 + 2} {things[number % 4]} and gives {number % 3} away.\n"
        for number in range(first, first + lines)
    )


def conversations(count: int) -> str:
    """Conversations as JSON lines."""
    return "".join(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"How many cats has {name}?"},
                    {"role": "assistant", "content": f"{name} has {number % 7} cats."},
                    {"role": "user", "content": "And drums?"},
                    {"role": "assistant", "content": f"{number % 5} drums."},
                ]
            }
        )
        + "\n"
        for number, name in enumerate(f"N{each}" for each in range(count))
    )
