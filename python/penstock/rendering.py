"""Conversations of many records as text, in order, by several processes."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice

from .chat import ChatTemplate
from .conversation import read_completion, read_conversation
from .errors import PenstockError
from .files import DataError

BATCH = 256  # records that a process renders at once
AHEAD = 3  # batches a process that are read before the first of them is taken

# (where the record is, text or its DataError, characters that are targets)
Rendered = tuple[str, str | DataError, list[tuple[int, int]]]


def render_record(template: ChatTemplate, targets: str, kind: str, record, what: str) -> Rendered:
    """A record that is a conversation ("chat"), or a prompt and a completion that are lists of
    messages ("pair"). DataError begins with `what`."""
    if not isinstance(record, dict):
        raise DataError(f"{what} is no object with 'messages', as the file's first one is")
    c = (read_conversation if kind == "chat" else read_completion)(record, what)
    try:
        found = template.render_targets(c.messages, c.tools, targets, c.first, c.variables)
        return what, *found
    except DataError as e:
        raise DataError(f"{what}: {e}") from e


def _render(template: ChatTemplate, targets: str, job: tuple) -> Rendered:
    try:
        return render_record(template, targets, *job)
    except DataError as e:
        return job[2], e, []


_in_worker: tuple[ChatTemplate, str]


def _start_worker(settings: tuple, targets: str) -> None:
    global _in_worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
    _in_worker = ChatTemplate(*settings), targets


def _render_batch(jobs: list[tuple]) -> list[Rendered]:
    return [_render(*_in_worker, job) for job in jobs]


def _result(template: ChatTemplate, targets: str, sent: tuple[Future, list]) -> list[Rendered]:
    future, jobs = sent
    try:
        return future.result()
    except RecursionError:  # pickle takes half of the depth that json reads
        return [_render(template, targets, job) for job in jobs]
    except OSError as e:  # a batch that was on its way to a process when that one was killed
        raise BrokenProcessPool from e


def render_all(
    template: ChatTemplate, targets: str, jobs: Iterable[tuple], processes: int
) -> Iterator[Rendered]:
    """render_record() of each (kind, record, what), in their order; of a bad record its error. The
    first BATCH of them are rendered here, so that a small file starts no process. The processes are
    new ones, not copies of this one, which has threads."""
    jobs = iter(jobs)
    for job in islice(jobs, BATCH) if processes > 1 else jobs:
        yield _render(template, targets, job)
    batches = iter(lambda: list(islice(jobs, BATCH)), [])
    first = next(batches, None)
    if first is None:
        return
    pool = ProcessPoolExecutor(
        processes,
        multiprocessing.get_context("forkserver"),
        _start_worker,
        (template.settings, targets),
    )
    try:
        waiting = deque([(pool.submit(_render_batch, first), first)])
        for batch in batches:
            waiting.append((pool.submit(_render_batch, batch), batch))
            if len(waiting) >= AHEAD * processes:
                yield from _result(template, targets, waiting.popleft())
        while waiting:
            yield from _result(template, targets, waiting.popleft())
    except BrokenProcessPool as e:
        raise PenstockError(
            "a process that renders conversations was killed: see whether memory ran out"
        ) from e
    except BaseException:  # also Ctrl-C, and a reader that wants no more: nobody waits for the rest
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
