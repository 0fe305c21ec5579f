"""What a terminal may be sent: the escape sequences of names, which come from files, are shown and
not obeyed. The binary's ps_printable() shows them the same way."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and line ends


def printable(text: str) -> str:
    r"""The text with its control characters as \x1b."""
    return _CONTROLS.sub(lambda c: f"\\x{ord(c[0]):02x}", text)


def one_line(text: str) -> str:
    r"""Also with its tabs and line ends, as \x0a."""
    return printable(text).replace("\t", "\\x09").replace("\n", "\\x0a")


class _Stream:
    """A stream that is written printable()."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(printable(text))
        return len(text)

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


@contextlib.contextmanager
def printable_streams() -> Iterator[None]:
    """stdout and stderr are written printable() here."""
    with contextlib.redirect_stdout(_Stream(sys.stdout)):
        with contextlib.redirect_stderr(_Stream(sys.stderr)):
            yield


def raw(stream):
    """The stream without printable(), for a writer that sends the terminal its own sequences."""
    return stream.stream if isinstance(stream, _Stream) else stream


class Printable:
    """A renderable of the package rich whose text is printable()."""

    def __init__(self, content):
        self.content = content

    def __rich_console__(self, console, options):
        for part in console.render(self.content, options):
            yield part if part.control else part._replace(text=printable(part.text))


@contextlib.contextmanager
def progress(total: int, quiet: bool) -> Iterator[Callable[[str], Callable[[int], None]]]:
    """bar(what) is a function that counts bytes of `total` in a new bar on a terminal's stderr."""
    from rich import progress as rich
    from rich.console import Console

    console = Console(file=raw(sys.stderr), quiet=quiet or not sys.stderr.isatty())
    columns = (rich.TextColumn("{task.description:<20}"), rich.BarColumn(), rich.DownloadColumn())
    columns += (rich.TransferSpeedColumn(), rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=console, disable=console.quiet) as bars:

        def counter(what: str) -> Callable[[int], None]:
            task = bars.add_task(what, total=total)
            return lambda n: bars.advance(task, n)

        yield counter
