"""Conversations as text: a tokenizer's own chat template, and where the answers are in it.

The template is that of the tokenizer's directory: chat_template.jinja, or "chat_template" in
tokenizer_config.json. It runs in a sandbox, with the filters, functions and variables that
transformers gives it. The text is that of apply_chat_template().

This module needs jinja2 and not transformers."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

from .files import DataError, open_input

SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
TARGETS = ("answers", "last", "all")


def _read(path: Path) -> str | None:
    try:
        with open_input(path, "r", encoding="utf-8") as f:
            return f.read()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"{path}: cannot be read: {e}") from e


def read_config(folder: Path, name: str = "tokenizer_config.json") -> dict:
    """A JSON file of a tokenizer's directory; {}: it has none, or none that is an object."""
    try:
        config = json.loads(_read(folder / name) or "{}")
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that the directory names: {"eos_token": "</s>", ...}."""
    named = {**read_config(folder, "special_tokens_map.json"), **read_config(folder)}
    tokens = {}
    for name in SPECIAL_TOKENS:
        token = named.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _find_template(folder: Path, tools: bool) -> str | None:
    text = _read(folder / "chat_template.jinja")
    if text is not None:
        return text
    found = read_config(folder).get("chat_template")
    if isinstance(found, list):  # several, with names
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = tools and named.get("tool_use") or named.get("default")
    return found if isinstance(found, str) else None


def _environment(spans: list):
    """jinja2 as transformers sets it up. `spans` gets the characters of {% generation %} blocks:
    [(begin, end)] of the text that generate() has yielded, which the caller counts in spans.done.
    """
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError as e:
        raise DataError(
            "conversations need jinja2 for the chat template: pip install jinja2"
        ) from e

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_keep")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _keep(self, caller):
            text = caller()
            spans.append((spans.done, spans.done + len(text)))
            return text

    def refuse(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return env


class _Spans(list):
    done = 0  # characters that were yielded before


class ChatTemplate:
    """The chat template of a tokenizer's directory. DataError: it has none, or a broken one."""

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self._tokens = special_tokens(self.folder)
        self._spans = _Spans()
        env = _environment(self._spans)
        self._template = {}
        for tools in (False, True):
            text = _find_template(self.folder, tools)
            if text is None:
                raise DataError(
                    f"{self.folder}: has no chat template (chat_template.jinja, or chat_template "
                    "in tokenizer_config.json): give the tokenizer of a chat model"
                )
            try:
                self._template[tools] = env.from_string(text)
            except Exception as e:
                raise DataError(f"{self.folder}: its chat template is no jinja2: {e}") from e

    def render(self, messages: list, tools: list | None = None, prompt: bool = False) -> str:
        """The conversation as text. prompt: with the beginning of the next answer."""
        self._spans.clear()
        self._spans.done = 0
        parts = []
        try:
            for part in self._template[bool(tools)].generate(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self._tokens,
            ):
                parts.append(part)
                self._spans.done += len(part)
        except Exception as e:  # of the template's own code, anything
            text = " ".join(str(e).split())
            raise DataError(f"the chat template fails: {text or type(e).__name__}") from e
        return "".join(parts)

    def render_targets(
        self, messages: list, tools: list | None = None, targets: str = "answers", first: int = 0
    ) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and the characters that are targets: [(begin, end)].

        targets: "answers", all that the assistant says; "last", the last answer; "all", the whole
        text. first: answers before this message are no targets. An answer begins where the
        template's generation prompt ends, and it ends with the template's text of its message. A
        template with {% generation %} blocks says itself where answers are."""
        text = self.render(messages, tools)
        marked = list(self._spans)
        if targets == "all":
            return text, [(0, len(text))]
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first]
        if targets == "last":
            answers = answers[-1:]
        if marked:
            begin = len(self.render(messages[: answers[0]], tools)) if answers else len(text)
            return text, [s for s in marked if s[0] >= begin]
        return text, [self._span(text, messages, tools, i) for i in answers]

    def _span(self, text: str, messages: list, tools: list | None, i: int) -> tuple[int, int]:
        before = self.render(messages[:i], tools, prompt=True)
        upto = text if i == len(messages) - 1 else self.render(messages[: i + 1], tools)
        if not text.startswith(before) or not text.startswith(upto) or len(upto) < len(before):
            raise DataError(
                f"the chat template writes message {i + 1} in another way where other messages "
                "follow it: train on the last answer with --targets last, or mark answers in the "
                "template by {% generation %}"
            )
        return len(before), len(upto)


def read_messages(record: dict, field: str, what: str) -> list[dict]:
    """The messages of a record's field: objects with a role. In "conversations" ShareGPT's "from"
    and "value" are read too. DataError begins with `what`."""
    messages = record.get(field)
    if not isinstance(messages, (list, tuple)) or not messages:
        raise DataError(f"{what} has no list of messages in {field!r}")
    if field == "conversations":
        messages = [_from_sharegpt(m) for m in messages]
    for i, m in enumerate(messages, 1):
        if not isinstance(m, dict) or not isinstance(m.get("role"), str):
            raise DataError(f"{what}: message {i} is no object with a 'role'")
    return list(messages)


def read_conversation(record: dict, what: str) -> list[dict]:
    """The messages of a record: in "messages", in "conversations", or of Alpaca's fields."""
    if not is_alpaca(record):
        old = "conversations" in record and "messages" not in record
        return read_messages(record, "conversations" if old else "messages", what)
    texts = {name: record.get(name) or "" for name in ("system", "instruction", "input", "output")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise DataError(f"{what} has no text in {name!r}")
    turns = [*(record.get("history") or ()), (texts["instruction"], texts["output"])]
    if texts["input"]:
        turns[-1] = (f"{texts['instruction']}\n{texts['input']}", texts["output"])
    messages = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    for turn in turns:
        if not (isinstance(turn, (list, tuple)) and [type(t) for t in turn] == [str, str]):
            raise DataError(f"{what}: 'history' is no list of pairs of texts")
        messages += (
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant"), turn, strict=True)
        )
    return messages


def is_alpaca(record: dict) -> bool:
    other = "messages" in record or "conversations" in record
    return "instruction" in record and "output" in record and not other


def _from_sharegpt(message):
    if not isinstance(message, dict) or "from" not in message:
        return message
    role = message["from"]
    if isinstance(role, str):
        role = {"human": "user", "gpt": "assistant"}.get(role, role)
    return {"role": role, "content": message.get("value")}
