"""Conversations as text: a tokenizer's own chat template, and where the answers are in it.

The templates are those of the tokenizer's directory: chat_template.jinja and the files of
additional_chat_templates, or "chat_template" in tokenizer_config.json. They run in a sandbox
(penstock.sandbox), with the filters, functions and variables that transformers gives them. The text
is that of apply_chat_template().

This module needs jinja2 and not transformers."""

from __future__ import annotations

import datetime
import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from .conversation import Call, check_variables, is_trained
from .files import DataError, open_input
from .sandbox import MAX_CHARS, Spans, TooLong, environment, limit, sentence

SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
TARGETS = ("answers", "last", "all")
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of it in data sets
_REASONING = frozenset(REASONING)
MORE_TEMPLATES = "additional_chat_templates"  # the folder of transformers 5
RENDER_S = 30.0  # of this process's CPU time, the most that a record may take


def _read(path: Path) -> str | None:
    try:
        with open_input(path, "r", encoding="utf-8") as f:
            return f.read()
    except (FileNotFoundError, NotADirectoryError):
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
    """The special tokens that the directory names: {"eos_token": "</s>", ...}; also those of the
    model alone, such as "eot_token", where transformers has them."""
    config = read_config(folder)
    named = {**read_config(folder, "special_tokens_map.json"), **config}
    for more in (config.get("model_specific_special_tokens"), config.get("extra_special_tokens")):
        named.update(more if isinstance(more, dict) else {})
    tokens = {}
    for name, token in named.items():
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and (name in SPECIAL_TOKENS or name.endswith("_token")):
            tokens[name] = token
    return tokens


def template_files(folder: Path) -> list[str]:
    """The names of the directory's further templates."""
    return [f"{MORE_TEMPLATES}/{p.name}" for p in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))]


def _find_template(folder: Path, tools: bool) -> str | None:
    named = {"default": _read(folder / "chat_template.jinja")}
    named |= {Path(name).stem: _read(folder / name) for name in template_files(folder)}
    if named == {"default": None}:
        found = read_config(folder).get("chat_template")
        if isinstance(found, list):  # several, with names
            found = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        named = found if isinstance(found, dict) else {"default": found}
    found = tools and named.get("tool_use") or named.get("default")
    return found if isinstance(found, str) else None


# ---- the template --------------------------------------------------------------------------------


def _shared(a: str, b: str, tokens: re.Pattern) -> int:
    """How many characters a and b have in common at their beginning, without a part of a token."""
    n = len(a) if b.startswith(a) else len(os.path.commonprefix((a, b)))
    for text in (a, b):
        around = tokens.finditer(text, max(0, n - 256), n + 256)
        n = min([n, *(m.start() for m in around if m.start() < n < m.end())])
    return n


_REWRITTEN = "the chat template writes message {} in another way where other messages follow it: "
_BEGUN = (
    "the chat template begins message {} in another way than its generation prompt: give its "
    "variables with --chat-template-kwargs (such as enable_thinking), mark answers in the template "
    "by {{% generation %}}, or train on all with --targets all"
)
_ADVICE = {
    "answers": "train on the last answer with --targets last, or mark answers in the template by "
    "{% generation %}",
    "last": "leave out the messages after the last answer, mark answers in the template by "
    "{% generation %}, or train on all with --targets all",
}


class ChatTemplate:
    """The chat template of a tokenizer's directory. DataError: it has none, or a broken one.

    variables: of the template, such as {"enable_thinking": False}. now: the time that the
    template's strftime_now() tells; None: that of this call. limit_s: CPU time for a conversation.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        variables: Mapping[str, object] | None = None,
        now: datetime.datetime | None = None,
        limit_s: float = RENDER_S,
    ):
        self.folder, self.limit_s = Path(folder), limit_s
        self.variables = check_variables(dict(variables or {}), "the template's variables")
        self.now = (now or datetime.datetime.now()).replace(microsecond=0)
        self._tokens = special_tokens(self.folder)
        self._spans = Spans()
        self._takes_parts: dict[tuple[str, bool], bool] = {}
        env = environment(self._spans, self.now)
        self._template, self._text, self._marks = {}, {}, {}
        for tools in (False, True):
            text = self._text[tools] = _find_template(self.folder, tools)
            if text is None:
                raise DataError(
                    f"{self.folder}: has no chat template (chat_template.jinja, or chat_template "
                    "in tokenizer_config.json): give the tokenizer of a chat model"
                )
            self._marks[tools] = re.search(r"\{%[-+]?\s*generation\b", text) is not None
            try:
                with limit(limit_s):
                    self._template[tools] = env.from_string(text)
            except DataError:
                raise
            except Exception as e:
                raise DataError(
                    f"{self.folder}: its chat template is no jinja2: {sentence(e)}"
                ) from e

    @property
    def settings(self) -> tuple:
        """The arguments that make this template again, in another process."""
        return self.folder, self.variables, self.now, self.limit_s

    @property
    def about(self) -> dict:
        """What the text depends on beside the files: for dataset.json."""
        about = {"chat_template_kwargs": self.variables} if self.variables else {}
        if any("strftime_now" in text for text in self._text.values()):
            about["date"] = self.now.isoformat()
        return about

    def render(
        self,
        messages: list,
        tools: list | None = None,
        prompt: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The conversation as text. prompt: with the beginning of the next answer. variables: of
        this conversation, beside the template's own."""
        with limit(self.limit_s):
            return self._writer(messages, tools, variables)(len(messages), prompt)

    def render_targets(
        self,
        messages: list,
        tools: list | None = None,
        targets: str = "answers",
        first: int = 0,
        variables: Mapping[str, object] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and the characters that are targets: [(begin, end)].

        targets: "answers", all that the assistant says; "last", the last answer; "all", the whole
        text. first: answers before this message are no targets, and neither are those whose message
        says so (is_trained). An answer begins where the template's generation prompt ends, and it
        ends with the template's text of its message. A template with {% generation %} blocks says
        itself where answers are."""
        with limit(self.limit_s):
            write = self._writer(messages, tools, variables)
            text = write(len(messages))
            marked = list(self._spans)
            if targets == "all":
                return text, [(0, len(text))]
            answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first]
            if targets == "last":
                answers = answers[-1:]
            trained = [i for i in answers if is_trained(messages[i])]
            advice = _ADVICE[targets]
            if self._marks[bool(tools)]:
                left_out = [i for i in range(len(messages)) if i not in trained]
                if not any(messages[i]["role"] == "assistant" for i in left_out):
                    return text, marked
                return text, self._marked(text, write, trained, marked, len(messages))
            last = len(messages) - 1
            ends = (
                self._span(text, write, i, messages[i] if i == last else None, advice)
                for i in trained
            )
            return text, list(ends)

    def end_of_turn(self, added: Mapping[str, int]) -> int | None:
        """The id of the token with which the template ends an answer, of the tokenizer's `added`
        tokens; None: an answer ends with none of them."""
        mark = "penstock"
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
        try:
            _, found, end = self.render(turns).rpartition(mark)
        except DataError:
            return None
        end = end.lstrip()
        tokens = [t for t in added if found and t.strip() and end.startswith(t)]
        return added[max(tokens, key=len)] if tokens else None

    def _writer(self, messages: list, tools: list | None, variables) -> Callable[..., str]:
        """write(n, prompt): the text of the first n messages."""
        if any(type(m.get("content")) is not str or _REASONING & m.keys() for m in messages):
            messages = [self._prepare(i, m, bool(tools)) for i, m in enumerate(messages, 1)]
        more = {"documents": None, **self._tokens, **self.variables, **(variables or {})}
        return lambda n, prompt=False: self._write(messages[:n], tools, prompt, more)

    def _write(self, messages: list, tools: list | None, prompt: bool, variables: dict) -> str:
        self._spans.clear()
        self._spans.done = 0
        parts = []
        try:
            for part in self._template[bool(tools)].generate(
                messages=messages, tools=tools, add_generation_prompt=prompt, **variables
            ):
                parts.append(part)
                self._spans.done += len(part)
                if self._spans.done > MAX_CHARS:
                    raise OverflowError(f"it writes more than {MAX_CHARS:,} characters")
        except TooLong:
            raise
        except Exception as e:  # of the template's own code, anything
            raise DataError(f"the chat template fails: {sentence(e)}") from e
        return "".join(parts)

    # ---- contents --------------------------------------------------------------------------------

    def _prepare(self, number: int, message: dict, tools: bool) -> dict:
        """The message as this template takes it: with the text of a list of parts where it takes
        text alone, with a call as "tool_calls" where it reads these, with what the assistant thought
        under the names that templates read."""
        thought = next((message[name] for name in REASONING if message.get(name) is not None), None)
        if thought is not None:  # as transformers 5 does
            message = {"thinking": thought, **message, "reasoning_content": thought}
        content = message.get("content")
        if isinstance(content, Call):
            return self._with_call(message, tools)
        if not isinstance(content, (list, tuple)):
            return message
        if self._takes_text_alone(message["role"], tools):
            return {**message, "content": _join(content, f"message {number}")}
        return message

    def _with_call(self, message: dict, tools: bool) -> dict:
        try:
            calls = json.loads(message["content"])
        except ValueError:
            return message
        calls = calls if isinstance(calls, list) else [calls]
        whole = calls and all(isinstance(c, dict) and isinstance(c.get("name"), str) for c in calls)
        if not whole or "tool_calls" not in self._text[tools]:
            return message
        calls = [{"type": "function", "function": call} for call in calls]
        return {**message, "content": "", "tool_calls": calls}

    def _takes_text_alone(self, role: str, tools: bool) -> bool:
        """Of a list of parts in this role's content, the template does not write the text, or it
        writes the list itself. Asked once, of a conversation that any record may have."""
        if (role, tools) not in self._takes_parts:
            part = {"type": "text", "text": "penstock-text", "other": "penstock-other"}
            probe = {"role": role, "content": [part]}
            user = {"role": "user", "content": "?"}
            call = {
                "type": "function",
                "id": "penstock1",
                "function": {"name": "f", "arguments": {}},
            }
            calls = {"role": "assistant", "content": "", "tool_calls": [call]}
            turns = {
                "user": [probe],
                "assistant": [user, probe],
                "system": [probe, user],
                "developer": [probe, user],
            }.get(role, [user, calls, {**probe, "name": "f", "tool_call_id": "penstock1"}])
            definition = {"type": "function", "function": {"name": "f", "parameters": {}}}
            variables = {"documents": None, **self._tokens, **self.variables}
            try:
                text = self._write(turns, [definition] if tools else None, False, variables)
            except DataError:
                text = ""
            takes = "penstock-text" in text and "penstock-other" not in text
            self._takes_parts[role, tools] = takes
        return not self._takes_parts[role, tools]

    # ---- answers ---------------------------------------------------------------------------------

    @functools.cached_property
    def _added(self) -> re.Pattern:
        """The tokenizer's added tokens, of which ends are made."""
        decoder = read_config(self.folder).get("added_tokens_decoder")
        added = read_config(self.folder, "tokenizer.json").get("added_tokens")
        tokens = [*decoder.values()] if isinstance(decoder, dict) else []
        tokens += added if isinstance(added, list) else []
        texts = [t.get("content") for t in tokens if isinstance(t, dict)]
        texts += self._tokens.values()
        found = {t for t in texts if isinstance(t, str) and t.strip()}
        return re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True))) or "(?!)")

    def _is_end(self, text: str) -> bool:
        """Added tokens and white space alone."""
        return not text or not self._added.sub("", text).strip()

    def _span(
        self, text: str, write: Callable[..., str], i: int, last: dict | None, advice: str
    ) -> tuple[int, int]:
        """Of the answer in message i; last: that message where it is the conversation's last."""
        before, is_last = write(i, True), last is not None
        if is_last and not text.startswith(before):
            begin = self._begin(text, write, i, before, last)
            if begin is not None:
                return begin, len(text)
        end = None
        if text.startswith(before):
            upto = text if is_last else write(i + 1)
            end = len(upto) if text.startswith(upto) else self._end(text, write, i, before, upto)
        if end is None or end < len(before):
            text = _BEGUN.format(i + 1) if is_last else _REWRITTEN.format(i + 1) + advice
            raise DataError(text)
        return len(before), end

    def _begin(
        self, text: str, write: Callable[..., str], i: int, before: str, message: dict
    ) -> int | None:
        """Where the last answer, message i, begins in a text whose earlier messages are written in
        another way than without it: gpt-oss leaves out what was thought before a tool's call. It
        begins after the last generation prompt that another end of the text has too. None: it
        cannot be told."""
        try:
            plain, followed = write(i), write(i + 1, True)
        except DataError:
            return None
        prompt = before[_shared(plain, before, self._added) :]
        at = text.rfind(prompt, 0, _shared(text, followed, self._added))
        said = json.dumps(message, ensure_ascii=False, default=str)
        if not prompt.strip() or at < 0 or json.dumps(prompt, ensure_ascii=False)[1:-1] in said:
            return None
        return at + len(prompt)

    def _end(
        self, text: str, write: Callable[..., str], i: int, before: str, closed: str
    ) -> int | None:
        """Where the answer of message i ends in a text that goes on otherwise than `closed`, its own
        text up to this message. Templates may end a text in a way of its own, where they ask for
        no answer; then the answer is the same up to that end. None: it is another one."""
        try:
            plain, followed = write(i), write(i + 1, True)
        except DataError:  # a template may refuse where no answer can follow
            return None
        n = _shared(plain, before, self._added)
        prompt = before[n:]
        if not prompt or not self._is_end(plain[n:]) or not followed.endswith(prompt):
            return None
        answer = followed[: -len(prompt)]
        if not text.startswith(answer):
            return None
        n = _shared(answer, closed, self._added)
        return n if self._is_end(answer[n:]) and self._is_end(closed[n:]) else None

    def _marked(
        self,
        text: str,
        write: Callable[..., str],
        trained: list[int],
        marked: list[tuple[int, int]],
        n: int,
    ) -> list[tuple[int, int]]:
        """The marks that are in the messages `trained`, of n messages."""

        @functools.cache
        def begin(i: int) -> int:
            if i == n:
                return len(text)
            before = write(i)
            at = _shared(before, text, self._added)
            if not self._is_end(before[at:]):
                advice = "train on all answers with --targets answers, or on all with --targets all"
                raise DataError(_REWRITTEN.format(i) + advice)
            return at

        ranges = [(begin(i), begin(i + 1)) for i in trained]
        return [s for s in marked if any(a <= s[0] < b for a, b in ranges)]


def _join(parts, what: str) -> str:
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    for part, text in zip(parts, texts, strict=True):
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise DataError(
                f"{what} has a part of type {kind!r}, and the chat template takes text alone"
            )
    return "".join(texts)
