"""The dataflow engine: ops with declared reads and writes, on streams, over arenas of memory.

A Program lists ops in order, and says nothing of waits. compile() derives the waits from what the
ops read and write, and returns a Schedule. A Run executes the Schedule on an Engine step after
step. Steps overlap as far as hazards allow. See python/examples/dataflow.py;
include/penstock/engine.h has the exact rules.
"""

import os
import time
import weakref
from dataclasses import dataclass
from math import prod

import numpy as np

from ._handle import ActiveHandle, Closable, Handle, Owner
from ._lib import callback, check, encode_path, error, ffi, lib, struct, text

PLACE_KINDS = {"host": 0, "device": 1}
BACKENDS = {"cpu": 0, "cuda": 1}
TRACE_DTYPE = np.dtype(
    [
        ("step", "u8"),
        ("op", "u8"),
        ("queued_ns", "u8"),
        ("start_ns", "u8"),
        ("end_ns", "u8"),
        ("stream", "u4"),
        ("reserved", "u4"),
    ]
)
assert TRACE_DTYPE.itemsize == ffi.sizeof("ps_trace_event")


def read_trace(function, handle: ActiveHandle) -> np.ndarray:
    """The events that function(ptr, events, room, n) copies, of a run or a trainer."""
    n = ffi.new("uint64_t *")
    with handle.turn():
        check(function(handle.ptr, ffi.NULL, 0, n))
        events = np.zeros(n[0], TRACE_DTYPE)
        check(function(handle.ptr, ffi.from_buffer("ps_trace_event[]", events), len(events), n))
    return events


def read_where(function, handle: ActiveHandle) -> str:
    """The text that function(ptr, text, room) writes, of a run or a trainer."""
    room = ffi.new("char[]", 4096)
    with handle.beside():
        function(handle.ptr, room, len(room))
    return text(room)


def _count(name: str, value: int) -> int:
    """@value, which the library takes as a number without a sign."""
    if value < 0:
        raise ValueError(f"{name} is {value}: give a whole number from 0 on")
    return value


def _one_of(name: str, value: str, choices: dict) -> int:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: give one of {', '.join(map(repr, choices))}")
    return choices[value]


@dataclass(frozen=True)
class Place:
    """The host, or a device: kind "host" or "device". Spaces lie at places, streams run there.

    backend         "cpu" or "cuda", of a device; `device` is which of the visible GPUs
    cap_bytes       what its spaces and overhead_bytes may take; 0: no cap
    """

    kind: str = "host"
    backend: str = "cpu"
    device: int = 0
    cap_bytes: int = 0
    overhead_bytes: int = 0


@dataclass(frozen=True)
class Link:
    """A way for copies from one place to another. `stream` runs its copies, and nothing else."""

    source: int
    target: int
    stream: int
    resource: int = 0


@dataclass(frozen=True)
class Space:
    """An arena: `bytes` of memory at a place."""

    bytes: int
    place: int = 0


@dataclass(frozen=True)
class Stream:
    """A queue of ops, which run at a place. Up to `threads` threads work on one op, each with
    `scratch_bytes` of scratch."""

    name: str
    place: int = 0
    threads: int = 1
    scratch_bytes: int = 0


@dataclass(frozen=True)
class Region:
    """A typed range of a space: `shape` elements of `dtype` from byte `offset` on."""

    space: int
    offset: int
    shape: tuple
    dtype: np.dtype

    def __init__(self, space: int, offset: int, shape, dtype="f4"):
        object.__setattr__(self, "space", space)
        object.__setattr__(self, "offset", offset)
        object.__setattr__(self, "shape", (shape,) if isinstance(shape, int) else tuple(shape))
        object.__setattr__(self, "dtype", np.dtype(dtype))
        if self.dtype.hasobject:
            raise ValueError(
                f"dtype {self.dtype} holds Python objects: a region holds numbers alone"
            )

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Engine(Closable):
    """Owns the spaces' memory and the streams' threads. Places, links, spaces and streams are
    known by their index in these lists; without `places` all is on the host.

    Engine([Space(1 << 20, 0), Space(1 << 24, 1)], [Stream("compute", 0), Stream("h2d", 0)],
           [Place("device"), Place("host")], [Link(1, 0, stream=1)])

    Raises InvalidError, BudgetError, OutOfMemoryError, DeviceError.
    """

    def __init__(
        self,
        spaces: list[Space],
        streams: list[Stream],
        places: list[Place] = (Place(),),
        links: list[Link] = (),
    ):
        given = {"place": places, "link": links, "space": spaces, "stream": streams}
        cfg = struct("ps_engine_config", **{f"n_{k}s": len(v) for k, v in given.items()})
        for name, entries in given.items():
            most = len(getattr(cfg, name))
            if len(entries) > most:
                raise ValueError(f"{len(entries)} {name}s: at most {most} are possible")
        for to, place in zip(cfg.place, places):
            to.kind = _one_of("a place's kind", place.kind, PLACE_KINDS)
            to.backend = _one_of("a place's backend", place.backend, BACKENDS)
            to.device = _count("a place's device", place.device)
            to.cap_bytes = _count("a place's cap_bytes", place.cap_bytes)
            to.overhead_bytes = _count("a place's overhead_bytes", place.overhead_bytes)
        for to, link in zip(cfg.link, links):
            to.stream = _count("a link's stream", link.stream)
            to.resource = _count("a link's resource", link.resource)
            setattr(to, "from", _count("a link's source", link.source))
            to.to = _count("a link's target", link.target)
        for to, space in zip(cfg.space, spaces):
            to.bytes = _count("a space's bytes", space.bytes)
            to.place = _count("a space's place", space.place)
        for to, stream in zip(cfg.stream, streams):
            to.place = _count("a stream's place", stream.place)
            to.n_threads = _count("a stream's threads", stream.threads)
            to.scratch_bytes = _count("a stream's scratch_bytes", stream.scratch_bytes)
            name = stream.name.encode()
            if len(name) >= len(to.name):
                raise ValueError(
                    f"the stream's name {stream.name!r} has {len(name)} bytes: at most "
                    f"{len(to.name) - 1} are possible"
                )
            to.name = name
        out = ffi.new("ps_engine **")
        check(lib.ps_engine_create(out, cfg))
        self._handle = _EngineHandle(out[0])
        self.spaces, self.streams = list(spaces), list(streams)

    def array(self, region: Region) -> np.ndarray:
        """The region's memory as an array of its shape, without a copy. Use the array while no
        steps are in flight, or inside a host op."""
        with self._handle.beside():
            size = lib.ps_engine_space_bytes(self._handle.ptr, region.space)
            base = _address(lib.ps_engine_space(self._handle.ptr, region.space))
            if base == 0 or region.offset < 0 or region.offset + region.bytes > size:
                raise ValueError(f"{region} lies outside its space of {size} bytes")
            return np.asarray(_Memory(self._handle, base + region.offset, region))

    def space_bytes(self, space: int) -> int:
        """The size of a space in bytes, rounded up to 2 MiB."""
        with self._handle.beside():
            return lib.ps_engine_space_bytes(self._handle.ptr, space)

    def space_peak(self, space: int) -> int:
        """Bytes up to the end of the highest page of the space that was ever used, as the operating
        system reports it."""
        out = ffi.new("uint64_t *")
        with self._handle.beside():
            check(lib.ps_engine_space_peak(self._handle.ptr, space, out))
        return out[0]

    def close(self) -> None:
        """Stop the threads, and release the memory when the last array of it is dropped. BusyError:
        a run of this engine is open."""
        self._handle.close()


class _Memory:
    """A region's address for numpy. It keeps the engine's memory while an array uses it, also after
    the op that the array was made for."""

    kind = "array"

    def __init__(self, engine: Handle, address: int, region: Region, read_only: bool = False):
        self._engine = engine
        self.__array_interface__ = {
            "data": (address, read_only),
            "shape": region.shape,
            "typestr": region.dtype.str,
            "descr": region.dtype.descr,
            "version": 3,
        }
        engine.hold(self)

    def __del__(self):
        self._engine.release(self)


def _address(pointer) -> int:
    return int(ffi.cast("uintptr_t", pointer))


class _EngineHandle(ActiveHandle):
    """An engine's handle, which the engine's ops can find."""

    # address -> handle. A handle refers to no object of the user's, so that the garbage collector
    # still finds engines in cycles.
    of = {}

    def __init__(self, ptr):
        super().__init__("engine", ptr, self._close)
        self.run = None  # a weak reference to its run's handle
        self.of[_address(ptr)] = self

    @classmethod
    def _close(cls, ptr) -> int:
        del cls.of[_address(ptr)]
        return lib.ps_engine_close(ptr)

    @classmethod
    def of_this_op(cls) -> "_EngineHandle":
        return cls.of[_address(lib.ps_op_engine())]


class _RunHandle(ActiveHandle):
    def __init__(self, ptr, engine: _EngineHandle, schedule: Handle, keep):
        super().__init__(
            "run",
            ptr,
            lib.ps_run_destroy,
            (engine, schedule),
            lib.ps_run_cancel,
            lib.ps_run_at_rest,
            keep,
        )
        self.failures = []  # exceptions of its Python ops
        engine.run = weakref.ref(self)

    def close(self) -> None:
        """The library's own wait would let no signal handler run: this one waits first."""
        if self._turn._is_owned() or self._process != os.getpid() or lib.ps_op_engine():
            return super().close()
        try:
            with self.turn():
                while self._box and not self._at_rest(self._box[0]):
                    time.sleep(0.002)
        except BaseException:
            self.cancel()
            super().close()
            raise
        super().close()


class Program(Owner):
    """One step's ops in program order, over `n_spaces` spaces and `n_streams` streams."""

    def __init__(self, n_spaces: int, n_streams: int):
        out = ffi.new("ps_program **")
        check(
            lib.ps_program_create(out, _count("n_spaces", n_spaces), _count("n_streams", n_streams))
        )
        self._handle = Handle("program", out[0], lib.ps_program_destroy)
        self._keep = []  # kernels and callbacks; schedules refer to them too

    def __len__(self) -> int:
        """Number of ops."""
        return lib.ps_program_n_ops(self._handle.ptr)

    def copy(
        self, stream: int, src: Region, dst: Region, *, layer=-1, round=-1, chunk=-1, phase=0
    ) -> int:
        """Append a copy of src to dst, which have the same size. Returns the op's index."""
        return self._add(
            ffi.NULL,
            stream,
            [(src, lib.PS_READ), (dst, lib.PS_WRITE)],
            (layer, round, chunk, phase),
        )

    def call(
        self,
        stream: int,
        fn,
        *,
        reads=(),
        writes=(),
        updates=(),
        name=None,
        layer=-1,
        round=-1,
        chunk=-1,
        phase=0,
    ) -> int:
        """Append a Python callable as an op. Returns the op's index.

        fn(step, *arrays) gets an array for each region of reads, writes and updates, in this order.
        Arrays of reads are read-only. A thread of the stream calls fn. An exception stops the run,
        and Run.wait() raises it again."""
        accesses = (
            [(r, lib.PS_READ) for r in reads]
            + [(r, lib.PS_WRITE) for r in writes]
            + [(r, lib.PS_READ_WRITE) for r in updates]
        )
        return self._add(
            self._kernel(fn, accesses, name), stream, accesses, (layer, round, chunk, phase)
        )

    def _kernel(self, fn, accesses, name):
        if not callable(fn):
            raise TypeError(f"{fn!r} is no function: an op calls one")

        def on_error(_type, exc, _traceback):
            run = _EngineHandle.of_this_op().run()
            if run is not None:  # else nobody refers to the run, and nobody will ask
                run.failures.append(exc)

        @ffi.callback("ps_op_fn", error=lib.PS_EINVAL, onerror=on_error)
        def run(launch):
            engine = _EngineHandle.of_this_op()
            fn(
                launch.step,
                *(
                    np.asarray(
                        _Memory(
                            engine, _address(launch.ptr[i]), region, read_only=mode == lib.PS_READ
                        )
                    )
                    for i, (region, mode) in enumerate(accesses)
                ),
            )
            return lib.PS_OK

        label = ffi.new("char[]", (name or getattr(fn, "__name__", "call")).encode())
        kernel = ffi.new("ps_kernel *", {"name": label, "op_class": lib.PS_CLASS_OTHER})
        kernel.fn[lib.PS_BACKEND_CPU] = run
        self._keep += [run, label, kernel]
        return kernel

    def _add(self, kernel, stream, accesses, tag) -> int:
        access = ffi.new(
            "ps_access[]",
            [
                {
                    "space": _count("a region's space", r.space),
                    "mode": mode,
                    "offset": _count("a region's offset", r.offset),
                    "bytes": r.bytes,
                }
                for r, mode in accesses
            ],
        )
        op = ffi.new(
            "ps_op *",
            {
                "kernel": kernel,
                "stream": _count("stream", stream),
                "access": access,
                "n_access": len(accesses),
                "tag": dict(zip(("layer", "round", "chunk", "phase"), tag)),
            },
        )
        idx = ffi.new("uint64_t *")
        check(lib.ps_program_add(self._handle.ptr, op, idx))
        return idx[0]

    def compile(self) -> "Schedule":
        """Derive the waits of the program, executed step after step."""
        out = ffi.new("ps_schedule **")
        check(lib.ps_schedule_compile(out, self._handle.ptr))
        return Schedule(Handle("schedule", out[0], lib.ps_schedule_destroy), self._keep)


class Schedule(Owner):
    """A compiled step: the program with its waits. Program.compile() makes one, and a Plan has
    one."""

    def __init__(self, handle: Handle, keep=()):
        self._handle, self._keep = handle, keep

    @property
    def n_ops(self) -> int:
        return lib.ps_schedule_n_ops(self._handle.ptr)

    @property
    def n_waits(self) -> int:
        """The number of waits; those that others imply are left out."""
        return lib.ps_schedule_n_waits(self._handle.ptr)

    @property
    def n_streams(self) -> int:
        return lib.ps_schedule_n_streams(self._handle.ptr)

    def space_bytes(self, space: int) -> int:
        """The end of the highest byte range of a space that an op accesses."""
        return lib.ps_schedule_space_bytes(self._handle.ptr, space)

    def op(self, idx: int) -> dict:
        """One op as a dict: name, stream, position in its stream, waits as (stream, steps_back,
        value), tag, work."""
        view = ffi.new("ps_op_view *")
        check(lib.ps_schedule_op(self._handle.ptr, idx, view))
        return {
            "name": text(view.kernel.name) if view.kernel else "copy",
            "stream": view.stream,
            "position": view.position,
            "waits": [
                (w.stream, w.steps_back, w.value)
                for w in (view.wait[i] for i in range(view.n_wait))
            ],
            "tag": {
                "layer": view.tag.layer,
                "round": view.tag.round,
                "chunk": view.tag.chunk,
                "phase": view.tag.phase,
                "what": text(view.tag.what) if view.tag.what else None,
            },
            "work": {
                "flops": view.work.flops,
                "bytes": view.work.bytes,
                "model_flops": view.work.model_flops,
            },
        }

    def simulate(self, cost_ns, n_steps: int = 2):
        """Execute the schedule on a virtual clock, on which an op takes cost_ns(op: dict) ns.
        Returns the trace, and the end of each step in ns."""
        failures = []

        def cost(_user, view, out):
            name = text(view.kernel.name) if view.kernel else "copy"
            n_bytes = sum(view.access[i].bytes for i in range(view.n_access))
            out.ns = cost_ns(
                {"name": name, "stream": view.stream, "position": view.position, "bytes": n_bytes}
            )

        events = np.zeros(_count("n_steps", n_steps) * self.n_ops, TRACE_DTYPE)
        ends = np.zeros(n_steps)
        status = lib.ps_sim_run(
            self._handle.ptr,
            callback("ps_sim_cost_fn", cost, failures),
            ffi.NULL,
            n_steps,
            ffi.from_buffer("ps_trace_event[]", events),
            ffi.from_buffer("double[]", ends),
        )
        if failures:
            raise failures[0]
        check(status)
        return events, ends

    def write_trace(self, path, trace: np.ndarray, stream_names: list[str]) -> None:
        """Write a trace as Chrome / Perfetto JSON, with a track for each stream."""
        if len(stream_names) != self.n_streams:
            raise ValueError(f"{len(stream_names)} stream names for {self.n_streams} streams")
        if np.asarray(trace).dtype != TRACE_DTYPE:
            raise ValueError(f"the trace has dtype {np.asarray(trace).dtype}: give Run.trace()'s")
        names = [ffi.new("char[]", name.encode()) for name in stream_names]
        events = np.ascontiguousarray(trace, TRACE_DTYPE)
        check(
            lib.ps_trace_write_json(
                encode_path(path),
                self._handle.ptr,
                ffi.from_buffer("ps_trace_event[]", events),
                len(events),
                ffi.new("char *[]", names),
                ffi.NULL,
                0,
            )
        )


class Run(Owner):
    """One execution of a schedule on an engine, step after step. An engine has one run at a time.
    The trace keeps the last `trace_steps` steps.

    with Run(engine, schedule, trace_steps=1) as run:
        run.submit(10); run.wait(); trace = run.trace()

    Threads: calls of several threads take turns. Any thread may call cancel(), where() and
    steps_done at any time, also inside an op.

    A run that is not closed ends when it is dropped and its steps are done. One that still runs at
    the interpreter's exit is cancelled.
    """

    def __init__(self, engine: Engine, schedule: Schedule, trace_steps: int = 0):
        cfg = struct("ps_run_config", trace_steps=trace_steps)
        out = ffi.new("ps_run **")
        engine._handle.wait_for_dropped()
        with engine._handle.beside():
            check(lib.ps_run_create(out, engine._handle.ptr, schedule._handle.ptr, cfg))
            self._handle = _RunHandle(out[0], engine._handle, schedule._handle, schedule._keep)
        self._submitted = 0

    def submit(self, n_steps: int = 1) -> None:
        """Let the streams execute n_steps more steps. Returns at once."""
        with self._handle.turn():
            self._check(lib.ps_run_submit(self._handle.ptr, _count("n_steps", n_steps)))
            self._submitted += n_steps

    def wait(self, n_steps: int | None = None) -> None:
        """Wait until n_steps steps, counted from the run's start, are complete; by default all that
        were submitted. Raises the run's first error; of a Python op this is the op's own exception.
        StateError: called inside an op. Ctrl-C ends the wait after a step, and the run goes on."""
        with self._handle.turn():
            n = self._submitted if n_steps is None else _count("n_steps", n_steps)
            self._wait_in_parts(min(n, self._submitted))
            self._check(lib.ps_run_wait(self._handle.ptr, n))

    def _wait_in_parts(self, n: int) -> None:
        """Wait for most of n steps, some 0.1 s at a time, between which signal handlers run."""
        at, part = lib.ps_run_steps_done(self._handle.ptr), 1
        while at + part < n:
            at, began = at + part, time.monotonic()
            self._check(lib.ps_run_wait(self._handle.ptr, at))
            part = part * 2 if time.monotonic() - began < 0.05 else 1

    def _check(self, status: int) -> None:
        if (
            status < 0
            and status not in (lib.PS_ECANCELLED, lib.PS_ESTATE)
            and self._handle.failures
        ):
            raise self._handle.failures[0] from error(status)
        check(status)

    def cancel(self) -> None:
        """Stop at the next op of every stream; wait() then raises CancelledError. Any thread may
        call it. Does nothing once the run is closed."""
        self._handle.cancel()

    @property
    def steps_done(self) -> int:
        with self._handle.beside():
            return lib.ps_run_steps_done(self._handle.ptr)

    def where(self) -> str:
        """What each stream has done and what its next op waits for, a line a stream. It shows why
        nothing moves."""
        return read_where(lib.ps_run_where, self._handle)

    def trace(self) -> np.ndarray:
        """The traced events, an array of TRACE_DTYPE with times in ns since the run's start.
        StateError: steps are in flight."""
        return read_trace(lib.ps_run_trace, self._handle)

    def close(self) -> None:
        """Wait for the steps in flight, and release the run. Its engine can then be closed. Ctrl-C
        cancels the run, and so does a KeyboardInterrupt that leaves its `with` block.
        StateError: called inside an op of the run."""
        self._handle.close()
        self._handle.failures.clear()

    def __enter__(self):
        return self

    def __exit__(self, kind, *exc):
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self.cancel()
        self.close()
