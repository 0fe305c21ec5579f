"""Conversations of records: the fields, roles and formats in which data sets have them, as messages
that a chat template reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from .files import DataError

FIELDS = ("messages", "conversations", "conversation")
# of a question with its answer
PAIRS = (("instruction", "output"), ("instruction", "response"), ("question", "answer"))
# the roles of ShareGPT's "from", and what a chat template calls them
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "bot", "model", "assistant"), "assistant"),
    "function_call": "assistant",
    **dict.fromkeys(("observation", "function_response", "tool_response", "tool"), "tool"),
    **{name: name for name in ("system", "developer", "function", "ipython")},
}
# of "role": a template may know others, and these alone are certain
ALIASES = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bard", "bing"), "assistant")}
RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")


class Call(str):
    """The content of a message of ShareGPT's role "function_call": a call, as JSON."""


@dataclass
class Conversation:
    messages: list[dict]
    tools: list[dict] | None = None
    variables: Mapping[str, object] = field(default_factory=dict)  # of the template
    first: int = 0  # answers before this message are no targets


def is_conversation(record: dict) -> bool:
    return any(name in record for name in FIELDS) or _pair(record) is not None


def read_conversation(record: dict, what: str) -> Conversation:
    """The conversation of a record: a list of messages, or a question with its answer. DataError
    begins with `what`."""
    given = [name for name in FIELDS if name in record]
    pair = None if given else _pair(record)
    if pair:
        messages = _of_pair(record, pair, what)
    else:
        name = next((name for name in given if record[name] is not None), FIELDS[0])
        messages = _messages(record, name, what)
        system = record.get("system")  # beside ShareGPT's messages
        if name != FIELDS[0] and isinstance(system, str) and messages[0]["role"] != "system":
            messages[:0] = [{"role": "system", "content": system}] if system else []
    return Conversation(messages, *_settings(record, what))


def read_completion(record: dict, what: str) -> Conversation:
    """Of "prompt" and "completion", lists of messages. The answers of the second are targets."""
    prompt = _messages(record, "prompt", what)
    completion = _messages(record, "completion", what)
    return Conversation([*prompt, *completion], *_settings(record, what), len(prompt))


def is_trained(message: dict) -> bool:
    """The record does not exclude this answer from the targets."""
    return message.get("weight") != 0 and not any(
        message.get(k) is False for k in ("train", "loss")
    )


def text_of(message: dict) -> str:
    """What a message says, for people: its text, or that of its parts."""
    content = message.get("content", "")
    if isinstance(content, (list, tuple)):
        parts = (part.get("text", "") if isinstance(part, dict) else part for part in content)
        content = "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def check_variables(found, what: str) -> dict:
    """Template variables by name, without those that are null. DataError begins with `what`."""
    if not isinstance(found, dict):
        raise DataError(f'{what} is no object of template variables, such as {{"x": true}}')
    for name in RESERVED:
        if name in found:
            raise DataError(f"{what} names {name!r}, which is no variable: leave it out")
    return {name: value for name, value in found.items() if value is not None}


def fields_of(record) -> str:
    """The names of a record's fields, for a message."""
    names = [str(name) for name in record] if isinstance(record, dict) else []
    shown = ", ".join(repr(name) for name in names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _decode(value, name: str, what: str):
    """A value that may be JSON text, as data sets of one schema have it."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as e:
        why = e if isinstance(e, ValueError) else "it is nested too deeply"
        raise DataError(f"{what}: {name!r} is text that is no JSON ({why})") from e


def _settings(record: dict, what: str) -> tuple[list[dict] | None, dict]:
    """The tools and the template variables of a record."""
    tools, variables = record.get("tools"), record.get("chat_template_kwargs")
    if not tools and not variables:
        return None, {}
    tools = _decode(tools or None, "tools", what)
    if tools:
        if isinstance(tools, (list, tuple)):
            tools = [_decode(tool, "tools", what) for tool in tools]
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise DataError(f"{what}: 'tools' is no list of objects")
    name = "chat_template_kwargs"
    variables = _decode(variables or None, name, what)
    return tools or None, check_variables(variables, f"{what}: {name!r}") if variables else {}


def _messages(record: dict, name: str, what: str) -> list[dict]:
    messages = record.get(name)
    if isinstance(messages, str) and messages:
        messages = _decode(messages, name, what)
    if not isinstance(messages, (list, tuple)) or not messages:
        found = fields_of(record)
        raise DataError(
            f"{what} has no list of messages in {name!r}" + (f": it has {found}" if found else "")
        )
    return [_message(m, what, i) for i, m in enumerate(messages, 1)]


def _message(message, what: str, number: int) -> dict:
    """As transformers 5 does, what is null is left out: templates would write it as a word."""
    if isinstance(message, dict):
        if None in message.values():
            message = {name: value for name, value in message.items() if value is not None}
        if "from" in message and "role" not in message:
            message = _from_sharegpt(message, f"{what}: message {number}")
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise DataError(f"{what}: message {number} is no object with a 'role'")
    if role in ALIASES:
        message = {**message, "role": ALIASES[role]}
    if "weight" in message and message["weight"] not in (0, 1):
        weight = message["weight"]
        raise DataError(f"{what}: message {number} has the weight {weight!r}: give 0 or 1")
    return message


def _from_sharegpt(message: dict, what: str) -> dict:
    """With "role" and "content" in place of "from" and "value"."""
    role, content = message["from"], message.get("value", message.get("content"))
    if not isinstance(role, str):
        raise DataError(f"{what} is no object with a 'role'")
    if role not in ROLES:
        raise DataError(f"{what} is from {role!r}: give one of {', '.join(ROLES)}")
    if role == "function_call" and isinstance(content, str):
        content = Call(content)
    rest = {k: v for k, v in message.items() if k not in ("from", "value", "content")}
    return {"role": ROLES[role], **({} if content is None else {"content": content}), **rest}


def _pair(record: dict) -> tuple[str, str] | None:
    pairs = PAIRS[:1] if "prompt" in record and "completion" in record else PAIRS
    return next((pair for pair in pairs if pair[0] in record and pair[1] in record), None)


def _of_pair(record: dict, pair: tuple[str, str], what: str) -> list[dict]:
    """Of Alpaca's fields, or of others like them. The question has `input` or `context` below it."""
    texts = {name: record.get(name) or "" for name in ("system", "input", "context", *pair)}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise DataError(f"{what} has no text in {name!r}")
    question, answer = (texts[name] for name in pair)
    below = texts["input"] or texts["context"]
    history = record.get("history") or []
    turns = [*history] if isinstance(history, (list, tuple)) else [history]
    turns.append((f"{question}\n{below}" if below else question, answer))
    messages = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    for turn in turns:
        if not (isinstance(turn, (list, tuple)) and [type(t) for t in turn] == [str, str]):
            raise DataError(f"{what}: 'history' is no list of pairs of texts")
        messages += (
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant"), turn, strict=True)
        )
    return messages
