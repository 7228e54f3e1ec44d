"""Small tokenizers of each kind that models use, and chat templates like those of well-known models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from tests.support.small_models import story

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL = ["<unk>", "</s>", "<|start|>", "<|end|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
KINDS = ("byte-level", "llama", "unigram", "wordpiece")
TEXT = story(80) + 'def f(x):\n    return {"a": x ** 2}\n\n\n# naïve café\n\n* one\n* two\n'

CHATML = """
{%- if tools %}<|start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|end|>
{% endif %}
{%- for message in messages %}<|start|>{{ message.role }}
{% if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% endif %}"""
"""As Qwen2.5's: with tools."""
REASONING = """
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content or '' %}
{%- set thoughts = message.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}<|start|>{{ message.role }}
{% if message.role == 'assistant' and loop.index0 > ns.last and (loop.last or thoughts) %}<think>
{{ thoughts }}
</think>

{% endif %}{{ content }}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
"""As Qwen3's: an earlier turn's thoughts are left out, and an answer without thoughts gets empty ones."""
STRICT = """
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set content = message.content.strip() %}
{%- if message.role == 'user' %}[INST] {{ content }} [/INST]{% else %} {{ content }}</s>{% endif %}
{%- endfor %}"""
"""As Mistral's: no system message, user and assistant in turn."""
MARKED = """
{%- for message in messages %}<|start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}
{% else %}{{ message.content }}<|end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% endif %}"""
BLANK = """
{%- for message in messages %}{{ message.role }}: {{ message.content }}<|end|>
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""
"""As Vicuna's: its request for an answer ends in a blank, with which a tokenizer begins the next word."""
TEMPLATES = {"chatml": CHATML, "reasoning": REASONING, "strict": STRICT, "marked": MARKED, "blank": BLANK}


@cache
def tokenizer(kind: str) -> Any:
    """A tokenizer of a kind; ask for another template by `with_template`."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    made, trainer = _untrained(kind)
    made.train_from_iterator(TEXT.splitlines(keepends=kind != "llama"), trainer)
    unknown = None if kind == "byte-level" else "<unk>"
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token=unknown)
    fast.add_tokens([AddedToken(each, normalized=False) for each in TAGS])
    return fast


def with_template(kind: str, template: Any) -> Any:
    found = tokenizer(kind)
    found.chat_template = template
    return found


def _untrained(kind: str) -> tuple[Tokenizer, Any]:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if kind == "byte-level":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        return made, trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL[1:], initial_alphabet=alphabet)
    if kind == "llama":
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        return made, trainers.BpeTrainer(
            vocab_size=800, special_tokens=[*SPECIAL, *(f"<0x{n:02X}>" for n in range(256))]
        )
    if kind == "unigram":
        made = Tokenizer(models.Unigram())
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        return made, trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>")
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made, trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL)


def specials(ids: list[int], kind: str) -> Iterator[str]:
    names = tokenizer(kind).convert_ids_to_tokens(ids)
    return (each for each in names if each in SPECIAL[1:])
