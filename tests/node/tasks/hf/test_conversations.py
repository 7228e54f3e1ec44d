"""Conversations: their forms, what is refused by name, and answers that are trained as they are given at inference."""

from __future__ import annotations

import json
from datetime import date
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import processors

from node.export.fine_tuned import FineTuned
from node.tasks.hf import tokens
from node.tasks.hf.chat import Encoder
from node.tasks.hf.conversation import conversation_of
from node.tasks.hf.corpus import Document, document_of
from node.tasks.hf.model import load_model, read_template
from node.tasks.hf.rows import RowCounts, RowWriter
from node.tasks.hf.settings import HfSettings, ModelError
from tests.support.refusals import one_line
from tests.support.small_models import CHAT_WITH_MARKS, saved_tokenizer
from tests.support.tokenizers import (
    CHATML,
    KINDS,
    REASONING,
    STRICT,
    TEMPLATES,
    TEXT,
    specials,
    tokenizer,
    with_template,
)

ASK = {"role": "user", "content": "How many cats?"}
ANSWER = {"role": "assistant", "content": "Two cats."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "count", "arguments": '{"what": "cats"}'}}],
}
FOUND = {"role": "tool", "tool_call_id": "1", "content": "2"}
TOOLS = [{"type": "function", "function": {"name": "count", "parameters": {}}}]


def talk(*messages: Any, **fields: Any) -> Document:
    return document_of({"messages": list(messages), **fields}, True, "a.jsonl:7")


def encoded(template: Any, document: Document, kind: str = "byte-level") -> list[tuple[str, list[str]]]:
    """(whole text, targets in one piece each) of each sequence of a document."""
    return _decoded(kind, Encoder(with_template(kind, template), True).encode(document))


def _decoded(kind: str, sequences: list[tuple[list[int], list[int]]]) -> list[tuple[str, list[str]]]:
    found, decode = [], tokenizer(kind).decode
    for ids, mask in sequences:
        runs = [
            [token for token, _ in run] for target, run in groupby(zip(ids, mask, strict=True), itemgetter(1)) if target
        ]
        found.append((decode(ids), list(map(decode, runs))))
    return found


# -- forms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [ASK, ANSWER]},
        {"conversations": [{"from": "human", "value": ASK["content"]}, {"from": "gpt", "value": ANSWER["content"]}]},
        {"prompt": ASK["content"], "completion": ANSWER["content"]},
        {"prompt": [ASK], "completion": [ANSWER]},
        {"messages": [{"from": "human", "value": ASK["content"], "role": None, "content": None}, ANSWER]},
        {
            "messages": [
                {**ASK, "content": [{"type": "text", "text": ASK["content"]}], "name": None},
                {**ANSWER, "weight": 1},
            ]
        },
    ],
)
def test_all_forms_of_a_conversation_are_one(fields: dict[str, Any]) -> None:
    found, unused = conversation_of({**fields, "id": 3, "tools": None}, "x")
    assert found == {"messages": [ASK, ANSWER]} and unused == ("id",)
    assert conversation_of(json.loads(Document(found).line()), "x")[0] == found


@pytest.mark.parametrize(
    "messages, fields, words",
    [
        ([{**ASK, "role": "USER"}], {}, "a.jsonl:7: a message has the role 'USER', which is not known: write user"),
        ([{**ASK, "role": "narrator"}], {}, "the role 'narrator', which is not known: the roles are system,"),
        ([{"role": "assistant", "content": None}], {}, "a message of role assistant has neither content nor calls"),
        ([{**ANSWER, "function_call": {"name": "f"}}], {}, "function_call of a message is an older form"),
        ([{"role": "assistant", "refusal": "no"}], {}, "refusal of a message is an answer of another kind"),
        ([{**ASK, "content": [{"type": "image_url"}]}], {}, "content of the kind image_url is not trained"),
        ([{**ANSWER, "weight": 0.5}], {}, "a weight is 0 (not trained) or 1, not 0.5"),
        ([{**ASK, "weight": 0}], {}, "a weight is of an assistant's message, not of role user"),
        ([{**CALL, "tool_calls": [{"function": {"arguments": "{}"}}]}], {}, "a call needs the name of its function"),
        (
            [{**CALL, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            {},
            "of a call of 'f' are not an object",
        ),
        ([ASK], {"tools": [{"type": "function"}]}, "its tools must be a list of functions, each with a name"),
        ([{**ASK, "at": date(2026, 1, 2)}], {}, "at is not JSON (Object of type date is not JSON serializable): write"),
        (
            [ASK],
            {"chat_template_kwargs": {"tokenize": True}},
            "tokenize of chat_template_kwargs is not for the template",
        ),
        ([ASK], {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template of chat_template_kwargs is not for"),
        ([ASK], {"functions": [1]}, 'its "functions" are an older form'),
        ([ASK], {"system": ["Be kind."]}, 'its "system" is not a text'),
        ([{"role": "system", "content": "Be rude."}], {"system": "Be kind."}, "differs from its first message"),
    ],
)
def test_what_cannot_be_trained_is_named(messages: list[Any], fields: dict[str, Any], words: str) -> None:
    line = one_line(ModelError, talk, *messages, **fields)
    assert line.startswith("a.jsonl:7: ") and words in line


def test_second_form_of_a_conversation_is_named() -> None:
    twice = {**ANSWER, "from": "human", "value": "Three."}
    found, unused = conversation_of({"messages": [ASK, twice], "prompt": "a", "completion": "b"}, "x")
    assert found == {"messages": [ASK, twice]} and unused == ("prompt", "completion")


# -- targets ----------------------------------------------------------------------------------------------------------


def test_calls_are_targets_and_tools_are_shown() -> None:
    ((whole, targets),) = encoded(CHATML, talk(ASK, CALL, FOUND, ANSWER, tools=TOOLS))
    assert targets == [
        '<tool_call>\n{"name": "count", "arguments": {"what": "cats"}}\n</tool_call><|end|>',
        "Two cats.<|end|>",
    ]
    assert whole.startswith('<|start|>system\n{"type": "function", "function": {"name": "count"')
    named = {"default": STRICT, "tool_use": CHATML}  # a model may keep several
    assert encoded(named, talk(ASK, CALL, FOUND, ANSWER, tools=TOOLS)) == [(whole, targets)]
    assert encoded(named, talk(ASK, ANSWER))[0][1] == [" Two cats.</s>"]


def test_weight_0_and_empty_answers_are_no_targets() -> None:
    document = talk(ASK, {**ANSWER, "weight": 0}, ASK, {"role": "assistant", "content": ""}, ASK, ANSWER)
    for template in ("chatml", "marked"):
        ((whole, targets),) = encoded(TEMPLATES[template], document)
        assert targets == ["Two cats.<|end|>"] and whole.count("Two cats.") == 2
    prompted = document_of({"prompt": [ASK, ANSWER, ASK], "completion": [ANSWER]}, True, "x")
    assert [targets for _, targets in encoded(CHATML, prompted)] == [["Two cats.<|end|>"]]
    assert encoded(CHATML, talk(ASK)) == []


def test_each_answer_of_a_reasoning_model_is_as_at_inference() -> None:
    thought = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nThree."}
    sequences = encoded(REASONING, talk(ASK, thought, ASK, ANSWER))
    start = "<|start|>user\nHow many cats?<|end|>\n<|start|>assistant\n"
    assert sequences == [
        (f"{start}<think>\nHm.\n</think>\n\nThree.<|end|>\n", ["<think>\nHm.\n</think>\n\nThree.<|end|>"]),
        (f"{start}Three.<|end|>\n{start}<think>\n\n</think>\n\nTwo cats.<|end|>\n", ["Two cats.<|end|>"]),
    ]
    apart = {"role": "assistant", "content": "Three.", "reasoning_content": "Hm."}
    assert encoded(REASONING, talk(ASK, apart)) == sequences[:1]
    said = REASONING.replace("enable_thinking is defined and not enable_thinking", "false")
    calls = said.replace(
        "{{ content }}<|end|>", "{{ content }}{% if message.tool_calls %}{{ message.tool_calls }}{% endif %}<|end|>"
    )
    for answer, begin in ((ANSWER, "Two cats"), (CALL, "[{")):
        ((whole, (target,)),) = encoded(calls, talk(ASK, answer))
        assert "<think>" in whole and target.startswith(begin), "tags that only the template writes are no targets"


SYSTEM = {"role": "system", "content": "Be kind."}
THINKS_FIRST = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


@pytest.mark.parametrize(
    "template, messages, fields, words",
    [
        (STRICT, [SYSTEM, ASK, ANSWER], {}, "refuses the roles system, user.*alternate"),
        (CHATML.replace("{{ message.content }}", ""), [ASK, ANSWER], {}, "leaves out a message of role user"),
        (REASONING, [ASK, CALL, FOUND, ANSWER], {}, r"leaves out a message of role assistant \(its calls\)"),
        (REASONING, [ASK, ANSWER], {"tools": TOOLS}, "does not show the tools"),
        (REASONING, [{**ASK, "content": "count!"}, ANSWER], {"tools": TOOLS}, "does not show the tools"),
        (REASONING, [{**ASK, "content": "count!"}, CALL], {}, r"role assistant \(its calls\)"),
        (CHATML, [{**ASK, "content": "a\U000f0001b"}, ANSWER], {}, "characters of the private use area"),
        (THINKS_FIRST, [ASK, ANSWER], {}, "does not say which"),
    ],
)
def test_template_that_drops_something_is_refused(
    template: str, messages: list[Any], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=f"^a.jsonl:7: .*{words}"):
        encoded(template, talk(*messages, **fields))


def test_fields_that_are_not_shown_are_told() -> None:
    encoder = Encoder(with_template("byte-level", CHATML), True)
    encoder.encode(talk({**ASK, "name": "Ann", "mood": "How"}, {**ANSWER, "reasoning_content": "Hm."}, source="web"))
    assert encoder.unused == {"name", "mood", "reasoning_content", "source"}
    shown = Encoder(
        with_template("byte-level", CHATML.replace("{{ message.role }}", "{{ message.role }}{{ message.name }}")), True
    )
    shown.encode(talk({**ASK, "name": "Ann"}, ANSWER))
    assert not shown.unused


# -- special tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_spelled_special_tokens_stay_text(kind: str) -> None:
    forged = "yes<|end|>\n<|start|>assistant\nNo.</s> <think>"
    encoder = Encoder(with_template(kind, CHATML), True)
    ((ids, mask),) = encoder.encode(talk({**ASK, "content": forged}, {**ANSWER, "content": f"I say </s>{forged}"}))
    assert list(specials(ids, kind)) == ["<|start|>", "<|end|>"] * 2
    names = tokenizer(kind).convert_ids_to_tokens(ids)
    assert names.count("<think>") == 1 and mask[names.index("<think>")], "an answer may hold the model's own tags"
    assert list(specials(encoder.prompt(forged), kind)) == ["<|start|>", "<|end|>", "<|start|>"]
    for ids in (
        Encoder(tokenizer(kind), False).encode(Document(forged))[0][0],
        Encoder(tokenizer(kind), False).prompt(forged),
    ):
        assert list(specials(ids, kind)) == (["</s>"] if ids[-1] == tokenizer(kind).eos_token_id else [])
        if kind in ("byte-level", "llama"):
            assert tokenizer(kind).decode(ids).removesuffix("</s>") == forged.removesuffix("</s>")


def test_blanks_of_an_answer_are_targets_although_a_tokenizer_trims_them() -> None:
    """As those of GPT-2 and of Llama 3 do: a token that is a blank alone then stands for nothing."""
    backend = tokenizer("byte-level").backend_tokenizer
    before, backend.post_processor = backend.post_processor, processors.ByteLevel(trim_offsets=True)
    try:
        ((_, targets),) = encoded(CHATML, talk(ASK, {**ANSWER, "content": "if x:\n    y   =  1"}))
    finally:
        backend.post_processor = before
    assert targets == ["if x:\n    y   =  1<|end|>"]


TWO_ENDS = CHATML.replace("{%- if add_generation_prompt %}", "{%- if not add_generation_prompt %}</s>{% else %}")
PARTS = """
{%- for message in messages %}<|start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}<think>{{ message.reasoning_content }}</think>{% endgeneration %}
{% generation %}{{ message.content }}<|end|>{% endgeneration %}{% else %}{{ message.content }}<|end|>{% endif %}
{% endfor %}{% if add_generation_prompt %}<|start|>assistant
{% endif %}"""


def test_whole_answer_is_a_target_whatever_follows_it() -> None:
    for short in ("n", "end", "/s"):  # parts of the tokens that follow
        ((_, targets),) = encoded(TWO_ENDS, talk(ASK, {**ANSWER, "content": short}))
        assert targets == [f"{short}<|end|>"]
    thought = talk(ASK, {**ANSWER, "reasoning_content": "Hm."}, ASK, {**ANSWER, "reasoning_content": "So."})
    ((_, targets),) = encoded(PARTS, thought)
    assert targets == ["<think>Hm.</think>Two cats.<|end|>", "<think>So.</think>Two cats.<|end|>"]


def test_many_spelled_tokens_are_no_burden() -> None:
    encoder = Encoder(with_template("unigram", CHATML), True)
    ((ids, _),) = encoder.encode(talk({**ASK, "content": "<think>" * 3000}, ANSWER))
    assert list(specials(ids, "unigram")) == ["<|start|>", "<|end|>"] * 2


# -- families ---------------------------------------------------------------------------------------------------------

WORDS = st.text("ab \n.é🙂", max_size=8).map(lambda text: f"x{text}y") | st.sampled_from(["<|end|>", "a</s>"])
TURNS = st.lists(st.tuples(WORDS, WORDS, st.booleans()), min_size=1, max_size=4)


@settings(max_examples=25)
@example([("xy", "x y", True), ("xy", "xy", True)], "blank", KINDS[0])
@example([("xy", "x y", True), ("xy", "xy", True)], "blank", KINDS[1])
@given(TURNS, st.sampled_from([*TEMPLATES]), st.sampled_from(KINDS[:2]))
def test_random_chats_are_trained_as_rendered_at_inference(
    turns: list[tuple[str, str, bool]], template: str, kind: str
) -> None:
    """The targets are the answers, and what comes before the last one are the tokens of a prompt at inference."""
    messages = [
        each
        for ask, answer, counts in turns
        for each in ({"role": "user", "content": ask}, {"role": "assistant", "content": answer, "weight": int(counts)})
    ]
    found, expected = with_template(kind, TEMPLATES[template]), [answer for _, answer, counts in turns if counts]
    sequences = Encoder(found, True).encode(talk(*messages))
    targets = [each for _, targets in _decoded(kind, sequences) for each in targets]
    end = "</s>" if template == "strict" else "<|end|>"
    assert [each.lstrip(" ") for each in targets] == [f"{each}{end}" for each in expected]
    if expected:
        ids, mask = sequences[-1]
        count = 2 * max(at for at, (*_, counts) in enumerate(turns) if counts) + 1
        last = next(at for at in range(len(mask) - 1, -1, -1) if mask[at])
        first = next(at for at in range(last, -1, -1) if not mask[at]) + 1
        assert ids[:first] == _asked(found, messages[:count])


def _asked(found: Any, messages: list[dict[str, Any]]) -> list[int]:
    exact = tokens.ExactTokenizer(found)
    shown = [
        {"role": each["role"], "content": exact.marks.put(each["content"], each["role"] == "user")} for each in messages
    ]
    how = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    return exact.encode_marked(found.apply_chat_template(shown, **how))[0]


@settings(max_examples=40)
@given(st.text() | st.text("ab \n\t.<|>/s", max_size=400), st.sampled_from(KINDS[:2]))
def test_any_text_survives_its_tokens(text: str, kind: str) -> None:
    found = tokenizer(kind)
    ids = tokens.ExactTokenizer(found).encode(text)[0]
    assert found.decode(ids) == text and not list(specials(ids, kind))
    assert found.decode(tokens.ExactTokenizer(found).encode_on(text)[0]) == text.removeprefix(
        " " if kind == "llama" else ""
    )


@pytest.mark.parametrize("kind", KINDS)
def test_text_in_parts_has_the_tokens_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, text = tokens.ExactTokenizer(tokenizer(kind)), TEXT + "\n\n   " + TEXT[::-1] + " " * 300 + TEXT
    whole = exact.encode(text)
    monkeypatch.setattr(tokens, "WINDOW", 700)
    monkeypatch.setattr(tokens, "OVERLAP", 100)
    monkeypatch.setattr(tokens, "_AGREED", 6)
    assert exact.encode(text) == whole
    lines = TEXT.splitlines(keepends=True)
    assert [exact.encode_on(each)[0] for each in lines] == [
        exact.encode(f"a\n{each}")[0][len(exact.encode("a\n")[0]) :] for each in lines
    ]


def test_template_of_a_file_replaces_the_models(made: Path, tmp_path: Path) -> None:
    """In the digests that peers compare, and in an export."""
    file, settings = tmp_path / "mine.jinja", HfSettings(context=64, format="chat", train="full")
    file.write_bytes(b"\xef\xbb\xbf" + CHAT_WITH_MARKS.encode())
    arguments = (str(made / "qwen3"), settings)
    own = load_model(*arguments, None, "cpu", torch.float32)
    other = load_model(*arguments, None, "cpu", torch.float32, template=str(file))
    assert other.tokenizer.chat_template == CHAT_WITH_MARKS and own.pins.template != other.pins.template
    with pytest.raises(ModelError, match=r"another chat template .* give the founder's by hf.template or --template"):
        load_model(*arguments, other.pins, "cpu", torch.float32)
    FineTuned(other, settings, has_template=True).write(tmp_path, False)
    assert saved_tokenizer(tmp_path).chat_template == CHAT_WITH_MARKS
    for content, words in ((None, "cannot be read"), (b"", "is empty"), (b"\xff\xfe{", "is not text in UTF-8")):
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        with pytest.raises(ModelError, match=words):
            read_template(file)


# -- what is cut ------------------------------------------------------------------------------------------------------


def test_cut_and_lost_conversations_are_told() -> None:
    writer = RowWriter(HfSettings(context=16, rows=1, format="chat"), lambda tokens, flags: None)
    for length, target in ((10, 5), (30, 5), (40, 20), (12, 99), (20, 99)):
        writer.add([(list(range(length)), [int(at == target) for at in range(length)])])
    writer.add([])
    counts = writer.counts
    assert (counts.skipped, counts.cut, counts.lost, counts.longest) == (4, 2, 1, 40)
    lines = RowCounts(cut=2, lost=1, longest=40, empty=3, unused="name").lines(16)
    assert lines[-3:] == [
        "cut         2 conversations, of which 1 lost all their targets: hf.context = 40 would keep all of them whole",
        "empty       3 answers without content: they are not targets",
        "not used    name: fields that the chat template does not show",
    ]
