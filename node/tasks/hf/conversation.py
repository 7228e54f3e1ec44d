"""Conversations as rows of data hold them, brought into the one form that chat templates take.

    {"messages": [{"role": …, "content": …}, …], "tools": […]}      OpenAI's form, with calls and weights
    {"conversations": [{"from": "human", "value": …}, …]}           ShareGPT's
    {"prompt": …, "completion": …}                                  texts, or lists of messages

What a person has written is handed to the template, honoured, or refused by name: nothing is dropped without a word.
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from node.tasks.hf.settings import ModelError

Conversation: TypeAlias = dict[str, Any]
"""`messages`, and `tools` and `chat_template_kwargs` if there are some: JSON that `conversation_of` reads again."""

MAX_MESSAGES = 4096
FIELDS = ("messages", "conversations", "prompt", "completion", "tools", "system", "chat_template_kwargs")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_SENDERS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "system": "system", "tool": "tool",
    "observation": "tool", "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
"""ShareGPT's names of roles."""
_REFUSED = {
    "function_call": "is an older form: write it as tool_calls",
    "refusal": "is an answer of another kind: write it as content, or leave the conversation out",
    "audio": "is not trained: leave the conversation out",
}

_NO_OPTIONS = frozenset({
    "conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
})  # fmt: skip
"""What says how a template is applied, and is not a variable of it."""


def conversation_of(fields: dict[str, Any], where: str, instead: str = "") -> tuple[Conversation, tuple[str, ...]]:
    """The conversation in a row, and the names of the row's other fields, which are not used."""
    messages, *used = _listed(fields, where)
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        instead = instead if messages is None else ""
        raise ModelError(f'{where}: has no "messages", a list of 1 to {MAX_MESSAGES}{instead}')
    found: Conversation = {"messages": [_message(each, where) for each in messages]}
    if system := fields.get("system"):
        _put_system(found["messages"], system, where)
    if tools := _tools(fields.get("tools"), where):
        found["tools"] = tools
    if options := fields.get("chat_template_kwargs"):
        if not isinstance(options, dict):
            raise ModelError(f"{where}: chat_template_kwargs must be an object")
        if reserved := sorted(_NO_OPTIONS & options.keys()):
            raise ModelError(f"{where}: {reserved[0]} of chat_template_kwargs is not for the template: remove it")
        found["chat_template_kwargs"] = options
    if fields.get("functions"):
        raise ModelError(f'{where}: its "functions" are an older form: write them as "tools"')
    used += ["system", "tools", "chat_template_kwargs"]
    _require_json(found, where)
    return found, tuple(name for name, value in fields.items() if name not in used and value not in (None, [], {}))


def _require_json(conversation: Conversation, where: str) -> None:
    """Columns of parquet may hold times, decimals and bytes, which JSON and templates do not."""
    fields = [*conversation.items(), *(each for message in conversation["messages"] for each in message.items())]
    for name, value in reversed(fields):  # those of messages first, since they say more
        try:
            json.dumps(value)
        except TypeError as error:
            raise ModelError(f"{where}: {name[:40]} is not JSON ({error}): write it as a text, or remove it") from None


def _put_system(messages: list[dict[str, Any]], system: Any, where: str) -> None:
    if not isinstance(system, str):
        raise ModelError(f'{where}: its "system" is not a text')
    if messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": encodable(system)})
    elif messages[0]["content"] != encodable(system):
        raise ModelError(f'{where}: its "system" differs from its first message, of role system: keep one of them')


def _listed(fields: dict[str, Any], where: str) -> tuple[Any, ...]:
    """The messages, and the names of the fields that hold them."""
    for name in ("messages", "conversations"):
        if (found := fields.get(name)) is not None:
            text = f"{where}: its {name} are not a list in JSON"
            return from_json(found, text) if isinstance(found, str) else found, name
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if prompt is None or completion is None:
        return (None,)
    if isinstance(prompt, list):  # what the assistant says in the prompt is not to be learnt
        prompt = [
            {**each, "weight": 0} if isinstance(each, dict) and _role(each) == "assistant" else each for each in prompt
        ]
    else:
        prompt = [{"role": "user", "content": prompt}]
    answer = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
    return prompt + answer, "prompt", "completion"


def _role(message: dict[str, Any]) -> Any:
    if message.get("role") is None and isinstance(sender := message.get("from"), str):
        return _SENDERS.get(sender.lower(), sender)
    return message.get("role")


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ModelError(f"{where}: a message is an object with role and content")
    role = _role(message)
    if not isinstance(role, str):
        raise ModelError(f"{where}: a message needs a role, a text")
    if role not in ROLES:
        like = _SENDERS.get(role.lower(), role.lower())
        hint = f"write {like}" if like in ROLES else f"the roles are {', '.join(ROLES[:5])}"
        raise ModelError(f"{where}: a message has the role {role[:40]!a}, which is not known: {hint}")
    for name, why in _REFUSED.items():
        if message.get(name):
            raise ModelError(f"{where}: {name} of a message {why}")
    sender = "from" if message.get("role") is None else "role"
    body = "value" if message.get("content") is None else "content"
    content = _content(message.get(body), where, role)
    calls = _calls(message.get("tool_calls"), where, role)
    if content is None and not calls:
        raise ModelError(f"{where}: a message of role {role} has neither content nor calls: complete it, or remove it")
    known = (sender, body, "tool_calls")  # of two names for one thing, the other is only for the template
    others = {name: value for name, value in message.items() if name not in known and value is not None}
    found = {"role": role, "content": content, **others}
    if calls:
        found["tool_calls"] = calls
    if (weight := found.pop("weight", None)) is not None:
        found.update(_weight(weight, where, role))
    return {name: encodable(value) if isinstance(value, str) else value for name, value in found.items()}


def _content(content: Any, where: str, role: str) -> str | None:
    if isinstance(content, list):
        parts = [
            each.get("text") if isinstance(each, dict) and each.get("type") == "text" else None for each in content
        ]
        if not all(isinstance(each, str) for each in parts):
            kinds = sorted(
                {str(each.get("type", "?"))[:20] if isinstance(each, dict) else "?" for each in content} - {"text"}
            )
            raise ModelError(f"{where}: content of the kind {', '.join(kinds) or '?'} is not trained, only text")
        return "".join(each for each in parts if each is not None)
    if isinstance(content, dict) and role == "tool":
        return json.dumps(content, ensure_ascii=False)
    if content is not None and not isinstance(content, str):
        raise ModelError(f"{where}: a message of role {role} needs content, a text")
    return content


def _weight(weight: Any, where: str, role: str) -> dict[str, int]:
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ModelError(f"{where}: a weight is 0 (not trained) or 1, not {ascii(weight)[:40]}")
    if role != "assistant":
        raise ModelError(f"{where}: a weight is of an assistant's message, not of role {role}")
    return {"weight": 0} if weight == 0 else {}


def _calls(calls: Any, where: str, role: str) -> list[dict[str, Any]]:
    """Calls whose arguments are objects, as templates expect them. OpenAI writes them as JSON in a text."""
    if not calls:
        return []
    if role != "assistant":
        raise ModelError(f"{where}: tool_calls are of an assistant's message, not of role {role}")
    if not isinstance(calls, list) or not all(isinstance(each, dict) for each in calls):
        raise ModelError(f"{where}: tool_calls must be a list of objects")
    return [_call(each, where) for each in calls]


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    inner = call.get("function", call)
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise ModelError(f"{where}: a call needs the name of its function")
    arguments = inner.get("arguments") or {}
    why = f"{where}: the arguments of a call of {inner['name'][:40]!a} are not an object in JSON"
    if isinstance(arguments, str):
        arguments = from_json(arguments or "{}", why)
    if not isinstance(arguments, dict):
        raise ModelError(why)
    others = call if "function" in call else {}
    return {"type": "function", **others, "function": {**inner, "arguments": arguments}}


def _tools(tools: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(tools, str):
        tools = from_json(tools or "[]", f"{where}: its tools are a text that is not JSON")
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(each, dict) and tool_name(each) for each in tools):
        raise ModelError(f"{where}: its tools must be a list of functions, each with a name")
    return tools


def from_json(text: str, why: str) -> Any:
    """The value in a text; `ModelError` with this message if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ModelError(why) from None


def tool_name(tool: dict[str, Any]) -> str:
    """The name of a tool, or of the function that a call calls; empty if it has none."""
    inner = tool.get("function", tool)
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else ""


def encodable(text: str) -> str:
    """The text with U+FFFD for halves of surrogate pairs, which JSON may hold, and no tokenizer takes."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
