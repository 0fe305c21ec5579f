"""C objects as Python holds them: who uses them, whose call they are in, when they end, and in
which process.

Python drops objects in any order: the finalizers of one garbage cycle may reach a plan before its
trainer. So no finalizer ends a C object that another one still uses; the last user's end does. Nor
does a finalizer wait for ops that run Python: it may strike on their own thread, or in one that has
a lock they need. What is dropped with steps in flight is ended by a thread for that.
"""

import _thread
import atexit
import os
import queue
import threading
import weakref

from ._lib import BusyError, StateError, error, lib


class Handle:
    """A C object: `ptr`, and `destroy(ptr)`, which answers a ps_status or None. It holds the
    handles in `uses` until it has ended."""

    def __init__(self, kind: str, ptr, destroy, uses=()):
        self.kind, self._destroy, self._uses = kind, destroy, tuple(uses)
        self._box = [ptr]  # emptied by who ends it
        self._users = {}  # what keeps it: id -> kind
        self._dropped = False
        for used in self._uses:
            used.hold(self)

    @property
    def ptr(self):
        """The C pointer; StateError once it is closed."""
        box = self._box[:]
        if not box or self._dropped:
            raise StateError(
                f"the {self.kind} is closed: use it before close() and inside its `with` block"
            )
        return box[0]

    def hold(self, user) -> None:
        """`user`, which has a `kind`, needs this until release(user)."""
        self._users[id(user)] = user.kind

    def release(self, user) -> None:
        self._users.pop(id(user), None)
        self._settle()

    def wait_for_dropped(self) -> None:
        """Until users that were dropped with steps in flight have ended; not inside an op, which
        may be one of those steps."""
        for user in list(_dropped) if not lib.ps_op_engine() else ():
            if self in user._uses:
                user._settle()

    def drop(self) -> None:
        """Nobody in Python asks for it any more: it ends now, or with its last user."""
        self._dropped = True
        self._settle()

    def _settle(self) -> None:
        if self._dropped and not self._users:
            self._end()

    def _end(self) -> None:
        try:
            ptr = self._box.pop()
        except IndexError:
            return
        self._destroy(ptr)
        for used in self._uses:
            used.release(self)


class ActiveHandle(Handle):
    """A C object with threads of its own: an engine, a run, a trainer.

    It belongs to the process that made it. Calls of several threads take turns (`with
    handle.turn()`), but for those that any thread may make beside another's call (`with
    handle.beside()`); close() waits for both. `cancel(ptr)` stops what it runs, `at_rest(ptr)` says
    that it runs nothing, `keep` is what its ops use. Both locks are of C, so that a signal cannot
    strike between taking one and entering the `with` block.
    """

    def __init__(self, kind: str, ptr, destroy, uses=(), cancel=None, at_rest=None, keep=None):
        super().__init__(kind, ptr, destroy, uses)
        self._process, self._cancel, self._at_rest, self._keep = os.getpid(), cancel, at_rest, keep
        self._turn, self._beside = (
            threading.RLock(),
            threading.RLock(),
        )  # again in a signal handler that strikes inside a call
        _active.add(self)

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise StateError(
                f"the {self.kind} belongs to process {self._process}, of which this one, {os.getpid()}, is a fork without its "
                "threads: make a new one in this process"
            )

    def turn(self):
        """The lock of calls that take turns. Inside an op nobody waits for it: whoever has it may
        wait for that op."""
        self._check_process()
        return _AtOnce(self) if lib.ps_op_engine() else self._turn

    def beside(self):
        """The lock of short calls that any thread may make at any time."""
        self._check_process()
        return self._beside

    def cancel(self) -> None:
        with self.beside():
            if self._box:
                self._cancel(self._box[0])

    def close(self) -> None:
        """Wait for other threads' calls and end it; nothing where it has ended, or in a forked
        process."""
        if self._process != os.getpid() or not self._box:
            return
        if self._turn._is_owned() or self._beside._is_owned():
            raise StateError(
                f"close() inside another call of this {self.kind} on the same thread, as from a signal handler: close it when "
                "that call has returned"
            )
        self.wait_for_dropped()
        with self.turn():
            users = sorted(set(self._users.values()) - {"array"})
            if users:
                raise BusyError(f"the {self.kind} still has a {users[0]}: close that first")
            self._dropped = True  # arrays of its memory keep that until they go
            try:
                self._end()
            except StateError:  # inside its own op: it lives on
                self._dropped = False
                raise

    def drop(self) -> None:
        if _exiting or self._process != os.getpid():
            return
        self._dropped = True
        if self._at_rest and self._box and not self._at_rest(self._box[0]):
            _end_later(self)
        else:
            self._settle()

    def _settle(self) -> None:
        if not _exiting and self._process == os.getpid():
            super()._settle()

    def _end(self) -> None:
        with self._turn:
            with self._beside:
                if self._users or not self._box:
                    return
                ptr = self._box.pop()
            status = self._destroy(ptr)
            if status < 0:
                self._box.append(ptr)
                raise error(status)
            for used in self._uses:
                used.release(self)
            _dropped.discard(self)


class _AtOnce:
    """A handle's turn, for who must not wait for it."""

    def __init__(self, handle: ActiveHandle):
        self._handle = handle

    def __enter__(self):
        if not self._handle._turn.acquire(blocking=False):
            raise StateError(
                f"another thread is inside a call of this {self._handle.kind}, which may wait for the op or batch function that this "
                "call is made in: call only where(), cancel() and steps_done there"
            )

    def __exit__(self, *exc):
        self._handle._turn.release()


class Owner:
    """A Python object with a handle, which it drops when it goes."""

    _handle = None

    def __del__(self):
        if self._handle is not None:  # else its constructor failed
            self._handle.drop()


# ---- ending what was dropped with steps in flight, and all at exit -------------------------------

_active = weakref.WeakSet()
_dropped = set()  # with steps in flight, not ended yet
_queues = {}  # process id -> queue of the thread that ends what was dropped there
_exiting = False  # what still lives ends with the process


def _end_later(handle: ActiveHandle) -> None:
    """From finalizers: nothing here takes a lock of Python's that the finalizer's thread may
    have."""
    process = os.getpid()
    _dropped.add(handle)
    if process not in _queues:
        _queues[process] = queue.SimpleQueue()
        _thread.start_new_thread(_end_dropped, (_queues[process],))
    _queues[process].put(handle)


def _end_dropped(handles: queue.SimpleQueue) -> None:
    while True:
        handles.get()._settle()  # in one expression: no variable keeps it


def _at_exit() -> None:
    """Stop what runs while ops can still run Python: afterwards they would wait for an interpreter
    that is gone."""
    global _exiting
    for handle in {*_active, *_dropped}:
        if handle._cancel and handle._process == os.getpid():
            handle.cancel()
            handle.close()
    _exiting = True


atexit.register(_at_exit)
