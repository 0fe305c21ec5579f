"""The sandbox in which chat templates run: jinja2 as transformers sets it up, with limits of time
and of memory. A template comes with a model, from strangers."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import signal
import threading
from collections.abc import Iterator

from .files import DataError
from .terminal import printable

MAX_CHARS = 1 << 28  # the most that a template may write, or make of one text or number


def sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    text = printable(text[:400])
    return text if len(text) <= 300 else text[:300] + "..."


class TooLong(Exception):
    pass


@functools.cache
def _take_signal() -> None:
    """Once in a process, as it takes longer than to write a text."""

    def stop(*_):
        raise TooLong

    signal.signal(signal.SIGVTALRM, stop)


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """DataError after so much CPU time of this process. Signals reach the main thread alone: in
    others there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _take_signal()
    try:
        try:
            try:
                # again after a second, in case the first exception is lost in a destructor
                signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
                yield
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except TooLong as e:
        raise DataError(
            f"the chat template fails: it takes more than {seconds:g} s for one conversation: see "
            "whether its loops end"
        ) from e


def _check_product(operator: str, left, right) -> None:
    """Refuse a text or a number that would fill the memory, in one operation that no signal ends."""
    if operator == "+":
        texts = isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple))
        size = len(left) + len(right) if texts else 0
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        size = left.bit_length() * max(right, 0) // 8
    else:
        factors = (len(x) if isinstance(x, (str, list, tuple)) else x for x in (left, right))
        a, b = (x if isinstance(x, int) else 0 for x in factors)
        size = a * b if not isinstance(left, int) or not isinstance(right, int) else 0
    if size > MAX_CHARS:
        raise OverflowError(f"{operator} makes more than {MAX_CHARS:,} bytes")


def environment(spans: list, now: datetime.datetime):
    """jinja2 as transformers sets it up. `spans` gets the characters of {% generation %} blocks:
    [(begin, end)] of the text that generate() has yielded, which the caller counts in spans.done.
    `now` is the time that strftime_now() tells."""
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

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["*", "**", "+"])

        def call_binop(self, context, operator, left, right):
            _check_product(operator, left, right)
            return super().call_binop(context, operator, left, right)

    def refuse(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    env = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = now.strftime
    return env


class Spans(list):
    done = 0  # characters that were yielded before
