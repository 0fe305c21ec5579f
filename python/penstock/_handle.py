"""The lifetime of C objects that Python holds: their users, their locks, their process.

Python drops objects in any order: the finalizers of a garbage cycle may reach a plan before its
trainer. Three rules follow:

- A finalizer ends no C object that another one still uses. The end of the last user ends it.
- A finalizer does not wait for ops that run Python. It may itself run on the thread of such an op,
  or on a thread that holds a lock which the op needs.
- An object that is dropped with steps in flight is ended by a thread of its own.
"""

import _thread
import atexit
import os
import queue
import threading
import weakref

from ._lib import error, lib
from .errors import BusyError, StateError


class Handle:
    """A C object: `ptr`, and `destroy(ptr)`, which returns a ps_status or None. The handle keeps
    the handles in `uses` alive until it has ended."""

    def __init__(self, kind: str, ptr, destroy, uses=()):
        self.kind, self._destroy, self._uses = kind, destroy, tuple(uses)
        self._box = [ptr]  # empty once the object has ended
        self._users = {}  # id -> kind of each user that keeps it alive
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
        """Stay alive for `user`, which has a `kind`, until release(user)."""
        self._users[id(user)] = user.kind

    def release(self, user) -> None:
        self._users.pop(id(user), None)
        self._settle()

    def exchange(self, used, other) -> None:
        """Use `other` in place of `used`, which may end then."""
        other.hold(self)
        self._uses = tuple(other if each is used else each for each in self._uses)
        used.release(self)

    def wait_for_dropped(self) -> None:
        """Wait for the end of users that were dropped with steps in flight. Inside an op, which may
        belong to one of those steps, this returns at once."""
        for user in list(_dropped) if not lib.ps_op_engine() else ():
            if self in user._uses:
                user._settle()

    def drop(self) -> None:
        """Python has no reference any more: end now, or with the last user."""
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
    handle.turn()`). Short calls that any thread may make during another's call have a lock of their
    own (`with handle.beside()`). close() waits for both. Both locks are written in C, so that no
    signal handler runs between taking one and entering the `with` block.

    cancel(ptr) stops the object's ops. at_rest(ptr) says that no op runs. `keep` holds references
    to what the ops use.
    """

    def __init__(self, kind: str, ptr, destroy, uses=(), cancel=None, at_rest=None, keep=None):
        super().__init__(kind, ptr, destroy, uses)
        self._process, self._cancel, self._at_rest, self._keep = os.getpid(), cancel, at_rest, keep
        # reentrant, for a signal handler that makes a call inside a call
        self._turn, self._beside = threading.RLock(), threading.RLock()
        _active.add(self)

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise StateError(
                f"the {self.kind} belongs to process {self._process}; this process, {os.getpid()}, "
                "is a fork of it and "
                "has none of its threads: make a new one here"
            )

    def turn(self):
        """The lock of calls that take turns. Inside an op it is not waited for, because its holder
        may wait for that op."""
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
        """Wait for other threads' calls, and end the object. Does nothing where it has ended, or in
        a forked process."""
        if self._process != os.getpid() or not self._box:
            return
        if self._turn._is_owned() or self._beside._is_owned():
            raise StateError(
                f"close() was called inside another call of this {self.kind} on the same thread, "
                "as by a signal handler: "
                "close it when that call has returned"
            )
        self.wait_for_dropped()
        with self.turn():
            users = sorted(set(self._users.values()) - {"array"})
            if users:
                raise BusyError(f"the {self.kind} still has a {users[0]}: close that first")
            self._dropped = True  # arrays keep its memory until they are dropped
            try:
                self._end()
            except StateError:  # called inside an op of its own: it stays open
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
    """A handle's turn, taken at once or refused."""

    def __init__(self, handle: ActiveHandle):
        self._handle = handle

    def __enter__(self):
        if not self._handle._turn.acquire(blocking=False):
            raise StateError(
                f"another thread is inside a call of this {self._handle.kind} and may wait for the "
                "op or batch function "
                "that makes this call: call only where(), cancel() and steps_done there"
            )

    def __exit__(self, *exc):
        self._handle._turn.release()


class Owner:
    """A Python object with a handle, which the object's finalizer drops."""

    _handle = None

    def __del__(self):
        if self._handle is not None:  # else its constructor failed
            self._handle.drop()


class Closable(Owner):
    """An owner that ends at close(), or with its `with` block."""

    def close(self) -> None:
        self._handle.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


# ---- objects dropped with steps in flight, and the interpreter's exit ----------------------------

_active = weakref.WeakSet()
_dropped = set()  # handles with steps in flight that have not ended yet
_queues = {}  # process id -> queue of the thread that ends them
_exiting = False  # from now on objects end with the process


def _end_later(handle: ActiveHandle) -> None:
    """Called by finalizers: takes no Python lock, as the finalizer's thread may hold it."""
    process = os.getpid()
    _dropped.add(handle)
    if process not in _queues:
        _queues[process] = queue.SimpleQueue()
        _thread.start_new_thread(_end_dropped, (_queues[process],))
    _queues[process].put(handle)


def _end_dropped(handles: queue.SimpleQueue) -> None:
    while True:
        handles.get()._settle()  # one expression: no variable keeps the handle


def _at_exit() -> None:
    """Stop all runs while ops can still call Python. Later they would wait for an interpreter that
    no longer exists."""
    global _exiting
    for handle in {*_active, *_dropped}:
        if handle._cancel and handle._process == os.getpid():
            handle.cancel()
            handle.close()
    _exiting = True


atexit.register(_at_exit)
