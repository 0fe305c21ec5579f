"""What the commands that are written in Python share: how they refuse and fail."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator

from . import _fields
from .conversation import check_variables
from .errors import BudgetError, FormatError, InvalidError, PenstockError
from .files import DataError, rust_failure
from .terminal import one_line, printable, printable_streams, raw

OK, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130


def whole(least: int, most: int) -> Callable[[str], int]:
    """The type of an option: a whole number from least to most."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is given, and a whole number from {least} to {most} is needed"
            )
        return value

    return parse


def variables(text: str) -> dict:
    """The type of --chat-template-kwargs."""
    try:
        return check_variables(json.loads(text), repr(text))
    except (ValueError, DataError) as e:
        why = e if isinstance(e, DataError) else f"{text!r} is no JSON ({e})"
        raise argparse.ArgumentTypeError(str(why)) from e


def date(text: str) -> datetime.datetime:
    """The type of --date: a day, or also a time."""
    try:
        return datetime.datetime.fromisoformat(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(
            f"{text!r} is given, and a day such as 2026-01-31 is needed"
        ) from e


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one sentence, with exit code 2."""

    def error(self, message: str):
        self.exit(REFUSED, f"{self.prog}: {one_line(message)}\n")

    def count(self, name: str, least: int, most: int, help: str, default: int | None = 0) -> None:
        """An option that takes a whole number from least to most."""
        self.add_argument(name, type=whole(least, most), default=default, metavar="N", help=help)

    def caps(self) -> None:
        """--device-mem and --host-mem."""
        for place in ("device", "host"):
            what = f"cap of {place} memory, such as 6GiB (default: none)"
            self.add_argument(f"--{place}-mem", metavar="SIZE", help=what)

    def template(self) -> None:
        """--chat-template-kwargs and --date."""
        self.add_argument(
            "--chat-template-kwargs",
            type=variables,
            default={},
            metavar="JSON",
            help="variables of the chat template, such as '{\"enable_thinking\": false}'; those of a "
            "record's own chat_template_kwargs come before them",
        )
        self.add_argument(
            "--date",
            type=date,
            metavar="DAY",
            help="the day that the chat template's strftime_now() tells, such as 2026-01-31 "
            "(default: now)",
        )

    def backend(self, default: str) -> None:
        self.add_argument(
            "--backend",
            choices=("auto", "cpu", "cuda"),
            default=default,
            help=f"cuda, cpu or auto, which is cuda where there is a GPU (default: {default})",
        )


def given(option: str, read: Callable, path):
    """read(path), whose message begins with the option that gave the path."""
    try:
        return read(path)
    except DataError as e:
        raise DataError(f"{option} {e}") from e


def put(text: str, end: str = "\n") -> None:
    """print() that writes at once, and whose error says that stdout failed. A terminal gets the
    text printable(), a file as it is."""
    out = raw(sys.stdout)
    try:
        print(printable(text) if out.isatty() else text, end=end, flush=True, file=out)
    except OSError as e:
        raise OSError(f"stdout cannot be written: {e.strerror}") from e


def _stdout_failure() -> str | None:
    """Why the rest of stdout cannot be written; None: it can. After a failure Python's own attempt
    at its end goes nowhere."""
    try:
        put("", end="")
    except OSError as e:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return str(e)
    return None


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where it ends the process outside (__main__.py)."""
    alone = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    if alone:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if alone:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(
    name: str, function: Callable[[], int], stopped: str = "stopped; nothing was written"
) -> int:
    """The exit code of function(). Its errors become one sentence on stderr. stopped: the sentence
    after Ctrl-C."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed: nobody reads it
            setattr(sys, stream, open(os.devnull, "w"))
    code, message = FAILED, None
    if hasattr(sys.stdout, "reconfigure"):  # a character that stdout has not is no error
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with printable_streams(), _interruptible(), _fields.as_options():
            code = function()
    except (DataError, InvalidError, FormatError, BudgetError) as e:
        code, message = REFUSED, str(e)
    except (PenstockError, OSError) as e:
        message = str(e)
    except RecursionError:
        code, message = REFUSED, "the input has JSON that is nested too deeply: give flat records"
    except MemoryError:
        message = "host memory ran out"
    except KeyboardInterrupt:
        code, message = INTERRUPTED, stopped
    except BaseException as e:
        code, message = REFUSED, f"the tokenizer fails: {rust_failure(e)}"
        if not rust_failure(e):
            raise
    failure = _stdout_failure()
    if failure and code in (OK, FAILED):
        code, message = FAILED, failure
    if message:
        print(f"{name}: {one_line(message)}", file=sys.stderr)
    return code
