"""Tokens of texts and conversations, and which of them are targets: in conversations only the assistant's answers.

Each answer is trained as the model would give it: after the conversation up to it, as the template renders it together
with its request for an answer. Where a template renders earlier answers in another way once others follow, as those of
reasoning models do, such a conversation becomes several sequences. A template with `{% generation %}` says itself what
the answer is. With any other it is what follows the request, up to the token that ends it, without tags that the
template puts before it. What does not come out of the template as it went in is refused.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from node.tasks.hf.conversation import Conversation, tool_name
from node.tasks.hf.corpus import Document
from node.tasks.hf.settings import ModelError, foreign
from node.tasks.hf.tokens import ExactTokenizer, Marks, crossed

Sequence: TypeAlias = tuple[list[int], list[int]]  # tokens, and for each 1 if it is a target, else 0

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_PROBE = "Content."
_SHOWN_ELSEWHERE = frozenset({"role", "content", "weight", "tool_calls", "tool_call_id", *_THOUGHTS})


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer with all that comes before it, and what of this text it is, from and up to."""

    text: str
    spans: tuple[tuple[int, int], ...]


class Encoder:
    """Turns documents into tokens and masks, by the tokenizer of a model.

    `unused` names what conversations had and the template does not show; `empty` counts answers without content.
    """

    def __init__(self, tokenizer: Any, is_chat: bool) -> None:
        self._tokenizer, self._is_chat = tokenizer, is_chat
        first: list[int] = tokenizer("a")["input_ids"][:1]
        self._begin = first if first == [tokenizer.bos_token_id] else []  # many tokenizers add none
        if is_chat and not tokenizer.chat_template:
            raise ModelError(
                "this model has no chat template: take its chat version, give one by hf.template, or hf.format = text"
            )
        self._exact = ExactTokenizer(tokenizer)
        self.unused, self.empty = set[str](), 0

    def begin(self) -> None:
        self.unused.clear()
        self.empty = 0

    def encode(self, document: Document) -> list[Sequence]:
        """The sequences of a document: one of a text, none to several of a conversation."""
        content, end = document.content, self._tokenizer.eos_token_id
        if not isinstance(content, str):
            self.unused.update(document.unused)
            return self._conversation(content, document.where)
        ids = [*self._begin, *self._exact.encode(content)[0]] if document.begins else self._exact.encode_on(content)[0]
        ids += [end] if document.ends and end is not None else []
        return [(ids, [1] * len(ids))]

    def prompt(self, text: str) -> list[int]:
        """Tokens of a prompt: of a chat, a message of the user and the beginning of the answer."""
        if not text:
            raise ValueError("the prompt is empty")
        if not self._is_chat:
            return [*self._begin, *self._exact.encode(text)[0]]
        question: Conversation = {"messages": [{"role": "user", "content": text}]}
        talk = _Talk(self._tokenizer, self._exact.marks, question, "the prompt")
        return self._exact.encode_marked(talk.render(1, ask=True))[0]

    def _conversation(self, conversation: Conversation, where: str) -> list[Sequence]:
        talk = _Talk(self._tokenizer, self._exact.marks, conversation, where)
        answers = []
        for index, message in enumerate(talk.messages):
            if message["role"] != "assistant" or conversation["messages"][index].get("weight") == 0:
                continue
            if not message["content"] and not message.get("tool_calls"):
                self.empty += 1
                continue
            answers.append(talk.answer(index, self._exact.special))
        if answers:
            self.unused.update(talk.check())
        return [sequence for group in _grouped(answers) for sequence in self._sequences(group)]

    def _sequences(self, answers: list[_Answer]) -> list[Sequence]:
        """One sequence with all these answers as targets, or one for each if an earlier one has other tokens there.

        An answer is generated after the tokens of its request. In the request for a later one, a token may reach across
        the place where the earlier answer began.
        """
        wanted, mask, at = [each for answer in answers for each in answer.spans], list[int](), 0
        ids, spans = self._exact.encode_marked(answers[-1].text, [begin for begin, _ in answers[-1].spans])
        earlier = [begin for answer in answers[:-1] for begin, _ in answer.spans]
        if any(crossed(begin, spans) for begin in earlier):
            return [sequence for answer in answers for sequence in self._sequences([answer])]
        for low, high in spans:
            while at < len(wanted) and wanted[at][1] <= low:
                at += 1
            mask.append(int(at < len(wanted) and wanted[at][0] <= low < high))
        return [(ids, mask)]


def _grouped(answers: list[_Answer]) -> list[list[_Answer]]:
    """Answers of one sequence together: those whose text is the beginning of a later one's."""
    groups: list[list[_Answer]] = []
    for answer in reversed(answers):
        home = next((each for each in groups if each[-1].text.startswith(answer.text)), None)
        if home is None:
            groups.insert(0, [answer])
        else:
            home.insert(0, answer)
    return groups


class _Talk:
    """One conversation, as the template renders its parts. Special tokens that its texts spell are marks."""

    def __init__(self, tokenizer: Any, marks: Marks, conversation: Conversation, where: str) -> None:
        self._tokenizer, self._where = tokenizer, where
        if not marks.texts.keys().isdisjoint(json.dumps(conversation, ensure_ascii=False, default=str)):
            raise ModelError(f"{where}: it holds characters of the private use area (U+F0000 and on): remove them")
        self.messages: list[dict[str, Any]] = [
            {
                name: marks.put(value, all_tokens=message["role"] != "assistant")
                for name, value in message.items()
                if name != "weight"
            }
            for message in conversation["messages"]
        ]
        self._tools = marks.put(conversation.get("tools"), all_tokens=True)
        self._options = conversation.get("chat_template_kwargs", {})
        with foreign(f"{where}: the chat template"):
            self._template = tokenizer.get_chat_template(tools=self._tools)
        self._says = bool(_GENERATION.search(self._template))
        self._rendered: dict[int, str] = {}

    def render(self, count: int, ask: bool = False, **options: Any) -> str:
        """The first messages, and with `ask` the request for an answer."""
        roles = ", ".join(each["role"] for each in self.messages[:count])
        with foreign(f"{self._where}: the chat template refuses the roles {roles[:100]}"):
            return self._applied(self.messages[:count], self._tools, add_generation_prompt=ask, **options)

    def _altered(self, messages: list[dict[str, Any]], tools: Any) -> str:
        """Other messages or tools than there are, rendered; empty if the template refuses them."""
        with suppress(ModelError), foreign(""):
            return self._applied(messages, tools)
        return ""

    def _applied(self, messages: list[dict[str, Any]], tools: Any, **options: Any) -> str:
        found: str = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, **(self._options | options)
        )
        return found

    def _without_calls(self, count: int, content: str) -> str:
        """The first messages, with a content in place of the last one's calls."""
        last = {name: value for name, value in self.messages[count - 1].items() if name != "tool_calls"}
        return self._altered([*self.messages[: count - 1], last | {"content": content}], self._tools)

    def answer(self, index: int, ends: list[str]) -> _Answer:
        if self._says:
            text, found = self._marked_answer(index)
        else:
            text = self.render(index + 1)
            content_end, end = _end(text, ends)
            found = ((self._begin(index, text, content_end), end),)
        self._rendered[index] = text
        return _Answer(text, found)

    def _marked_answer(self, index: int) -> tuple[str, tuple[tuple[int, int], ...]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        with foreign(f"{self._where}: the chat template refuses this conversation"):
            found: Any = render_jinja_template(
                conversations=[
                    [{k: v for k, v in each.items() if v is not None} for each in self.messages[: index + 1]]
                ],
                tools=self._tools,
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
                **self._options,
            )
        rendered, spans = found
        if not spans[0]:
            raise ModelError(f"{self._where}: the chat template marks no answer by {{% generation %}}")
        text, asked = str(rendered[0]), self.render(index, ask=True) if index else ""
        low = len(asked) if text.startswith(asked) else int(spans[0][-1][0])  # a message may have several marked parts
        return text, tuple((int(begin), int(end)) for begin, end in spans[0] if begin >= low) or (tuple(spans[0][-1]),)

    def _begin(self, index: int, text: str, content_end: int) -> int:
        """Where the answer begins: after the request for it, and after tags that only the template has put there."""
        message = self.messages[index]
        asked = self.render(index, ask=True) if index else ""
        if not text.startswith(asked):
            raise ModelError(
                f"{self._where}: the chat template does not say which tokens are the assistant's: it renders an answer "
                "in another way than its request for one; take a template with {% generation %} by hf.template"
            )
        if index:  # a template that thinks by default asks in another way for an answer without thoughts
            quiet = self.render(index, ask=True, enable_thinking=False)
            if len(quiet) > len(asked) and text.startswith(quiet):
                return len(quiet)
        if any(message.get(name) for name in _THOUGHTS):
            return len(asked)
        first = (message["content"] or "").strip()
        if not first:
            if not index:
                raise self._refused("the template asks for no first answer")
            tags = self._without_calls(index + 1, _PROBE).partition(_PROBE)[0]
            return len(tags) if text.startswith(tags) and tags.startswith(asked) else len(asked)
        if index and text[len(asked) :].lstrip().startswith(first):
            return len(asked)
        finds = text.find if message.get("tool_calls") else text.rfind
        at = finds(first, len(asked), content_end)
        if at < 0 and not index:
            raise self._refused("the template changes the first answer")
        if at < 0:
            return len(asked)
        return at if text[len(asked) : at].strip() else len(asked)

    def _refused(self, why: str) -> ModelError:
        what = "the conversation begins with an answer"
        return ModelError(f"{self._where}: {what}, and {why}: begin with a message of the user")

    def check(self) -> set[str]:
        """Check that the template shows everything; returns the names of fields that it does not show."""
        last = max(self._rendered)
        whole = self._rendered[last]
        unused = set[str]()
        for index, message in enumerate(self.messages[: last + 1]):
            if message["role"] == "assistant" and index not in self._rendered:
                continue  # it is not trained, and thoughts of earlier turns may be left out
            text = self._rendered[index] if message["role"] == "assistant" else whole
            unused |= self._require(text, index)
            unused |= {name for name in _THOUGHTS if (value := message.get(name)) and not _shows(text, str(value))}
        messages, text = self.messages[: last + 1], self.render(last + 1) if self._says else whole
        for name in {name for each in messages for name, value in each.items() if value} - _SHOWN_ELSEWHERE:
            others = [{key: value for key, value in each.items() if key != name} for each in messages]
            if self._altered(others, self._tools) == text:
                unused.add(name)
        shows = all(tool_name(each) in whole for each in self._tools or ())
        if self._tools and not (shows and self._altered(messages, None) != text):
            raise ModelError(
                f"{self._where}: the chat template does not show the tools: give one that does by hf.template, or "
                "leave the tools out"
            )
        return unused

    def _require(self, text: str, index: int) -> set[str]:
        message = self.messages[index]
        content, role, calls = message["content"], message["role"], message.get("tool_calls", ())
        hidden = bool(content) and not _shows(text, content)
        left_out = "its content" if hidden and not calls else ""
        shows = all(tool_name(each) in text for each in calls)
        if calls and not (shows and self._without_calls(index + 1, content or "") != self.render(index + 1)):
            left_out = "its calls"
        if left_out:
            raise ModelError(
                f"{self._where}: the chat template leaves out a message of role {role} ({left_out}): give a template "
                "that shows it by hf.template, or change the message"
            )
        return {"content beside calls"} if hidden else set()


def _shows(text: str, content: str) -> bool:
    """Whether a rendered text has a content, as it is or in JSON; space may differ."""
    if content in text:
        return True
    squeezed, words = "".join(text.split()), "".join(content.split())
    return words in squeezed or "".join(json.dumps(content, ensure_ascii=False)[1:-1].split()) in squeezed


def _end(text: str, ends: list[str]) -> tuple[int, int]:
    """Where the content of an answer ends, and where the answer does: after the first token that ends it."""
    content_end = end = len(text)
    while True:
        stripped = text[:content_end].rstrip()
        last = next((each for each in ends if stripped.endswith(each)), "")
        if not last:
            return content_end, end
        content_end, end = len(stripped) - len(last), len(stripped)
