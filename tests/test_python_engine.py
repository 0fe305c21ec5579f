"""The Python shell over the engine: programs with Python ops, errors inside them, traces, the
simulator, declarations."""

import gc
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import penstock
import pytest
from conftest import HANGS_S
from penstock import Engine, Place, Program, Region, Run, Space, Stream, _lib

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python/examples"))
TWO_STREAMS = [Stream("compute"), Stream("host")]


def one_space(n_floats=1024):
    return Engine([Space(4 * n_floats)], TWO_STREAMS)


def run_once(program, engine, n_steps=1):
    with Run(engine, program.compile()) as run:
        run.submit(n_steps)
        run.wait()


def test_every_public_struct_has_the_size_the_library_says():
    structs = [
        n
        for n in _lib.ffi.list_types()[0]
        if _lib.ffi.typeof(n).kind == "struct" and _lib.ffi.typeof(n).fields
    ]
    assert len(structs) >= 24
    for name in structs:
        assert _lib.lib.ps_abi_size(name.encode()) == _lib.ffi.sizeof(name), name


def test_a_drift_between_library_and_declarations_is_refused_in_one_sentence(tmp_path):
    built = _lib._library_path().resolve()
    for path in built.parent.glob("*.so*"):
        (tmp_path / path.name).symlink_to(path)
    declarations = built.with_name(_lib.DECLARATIONS).read_text()
    (tmp_path / _lib.DECLARATIONS).write_text(
        declarations.replace("uint64_t step;", "uint64_t step, step2;", 1)
    )
    done = subprocess.run(
        [sys.executable, "-c", "import penstock; penstock.version()"],
        capture_output=True,
        text=True,
        env={"PENSTOCK_LIB": str(tmp_path / built.name), "PYTHONPATH": str(ROOT / "python")},
    )
    assert done.returncode == 1
    assert re.search(
        r"ImportError: penstock: ps_\w+ has \d+ bytes in .* and \d+ in penstock.cdef: run `make`",
        done.stderr,
    )


def test_a_missing_library_says_what_to_run():
    done = subprocess.run(
        [sys.executable, "-c", "import penstock; penstock.version()"],
        capture_output=True,
        text=True,
        env={"PENSTOCK_BUILD": "no-such-folder", "PYTHONPATH": str(ROOT / "python")},
    )
    assert "libpenstock.so is missing: run `make`" in done.stderr


def test_python_ops_run_in_hazard_order_across_streams():
    a, b, c = (Region(0, 64 * i, 16) for i in range(3))
    program = Program(1, 2)
    program.call(0, lambda step, x: x.fill(step + 1), writes=[a])
    program.call(1, lambda step, x, y: np.multiply(x, 10, out=y), reads=[a], writes=[b])
    program.call(0, lambda step, x, y, z: np.add(x, y, out=z), reads=[a, b], writes=[c])
    with one_space() as engine:
        run_once(program, engine, 5)
        assert (engine.array(c) == 55).all()


def test_arrays_of_reads_are_not_writeable():
    program = Program(1, 2)
    program.call(0, lambda step, x: x.fill(1), reads=[Region(0, 0, 4)])
    with one_space() as engine, pytest.raises(ValueError, match="read-only"):
        run_once(program, engine)


def test_an_exception_in_a_python_op_is_raised_again_and_stops_the_run():
    class Mine(Exception):
        pass

    def fail(step, x):
        if step == 2:
            raise Mine("step two")

    program = Program(1, 2)
    program.call(1, fail, updates=[Region(0, 0, 4)], name="fragile")
    with one_space() as engine:
        with Run(engine, program.compile()) as run:
            run.submit(4)
            with pytest.raises(Mine, match="step two") as caught:
                run.wait()
            assert "fragile" in str(caught.value.__cause__)
            assert run.steps_done == 2
        run_once_ok = Program(1, 2)
        run_once_ok.call(0, lambda step, x: x.fill(7), writes=[Region(0, 0, 4)])
        run_once(run_once_ok, engine)  # the engine is free again
        assert (engine.array(Region(0, 0, 4)) == 7).all()


def test_where_says_what_each_stream_waits_for():
    begun, go = threading.Event(), threading.Event()

    def hold(step, x):
        begun.set()
        assert go.wait(HANGS_S)

    program = Program(1, 2)
    program.call(0, hold, writes=[Region(0, 0, 4)], name="slow", layer=3)
    program.call(1, lambda step, x: None, reads=[Region(0, 0, 4)], name="patient")
    with one_space() as engine, Run(engine, program.compile()) as run:
        run.submit()
        assert begun.wait(HANGS_S)
        first, second = run.where().splitlines()
        assert first == "compute: step 1, 0 of 1 ops ended, then slow, layer 3, which runs"
        assert "0 of 1 ops ended, then patient; waits for" in second and "to end 1 more" in second
        go.set()
        run.wait()
        ended = "all of the 1 submitted steps ended"
        assert run.where().splitlines() == [f"compute: {ended}", f"host: {ended}"]


def test_where_of_long_names_that_are_not_ascii():
    begun, go = threading.Event(), threading.Event()

    def hold(step, x):
        begun.set()
        assert go.wait(HANGS_S)

    program = Program(1, 2)
    program.call(0, hold, writes=[Region(0, 0, 4)], name="é" * 3000)
    with Engine([Space(4096)], [Stream("日本語"), Stream("host")]) as engine:
        with Run(engine, program.compile()) as run:
            run.submit()
            assert begun.wait(HANGS_S)
            assert run.where().startswith("日本語: step 1, 0 of 1 ops ended, then é")
            go.set()


def test_an_op_that_fails_is_not_blamed_with_anothers_message():
    """One op's call fails and the op goes on; the other op of its thread sets no message."""
    ffi, lib = _lib.ffi, _lib.lib

    @ffi.callback("ps_op_fn")
    def ignores(launch):
        return 0 if lib.ps_program_create(ffi.new("ps_program **"), 99, 1) < 0 else -12

    program = Program(1, 2)
    program.call(0, lambda step, x: None, writes=[Region(0, 0, 4)])
    mute = ffi.callback("ps_op_fn", lambda launch: lib.PS_EIO)
    for name, fn in (("careless", ignores), ("mute", mute)):
        label = ffi.new("char[]", name.encode())
        kernel = ffi.new("ps_kernel *", {"name": label})
        kernel.fn[lib.PS_BACKEND_CPU] = fn
        program._keep += [label, kernel, fn]
        program._add(kernel, 0, [(Region(0, 0, 4), lib.PS_READ_WRITE)], (-1, -1, -1, 0))
    with one_space() as engine, Run(engine, program.compile()) as run:
        run.submit()
        with pytest.raises(penstock.PenstockError, match=r"^PS_EIO \(op 2, mute"):
            run.wait()


@pytest.mark.parametrize(
    "call,says",
    [
        (lambda: Program(-1, 2), "n_spaces is -1"),
        (lambda: Program(1, 2).copy(-1, Region(0, 0, 4), Region(0, 16, 4)), "stream is -1"),
        (lambda: Program(1, 2).copy(0, Region(0, -4, 4), Region(0, 16, 4)), "offset is -4"),
        (lambda: Program(1, 2).call(0, None), "None is no function"),
        (lambda: Engine([Space(64)], TWO_STREAMS, [Place("gpu")]), "kind is 'gpu': give one of"),
        (lambda: Engine([Space(64)], TWO_STREAMS, [Place(backend="x")]), "backend is 'x'"),
        (lambda: Engine([Space(-1)], TWO_STREAMS), "a space's bytes is -1"),
        (lambda: Engine([Space(64)], [Stream("é" * 20)]), "has 40 bytes: at most 31"),
        (lambda: Program(1, 1).compile().write_trace("x", np.zeros(3), ["a"]), "dtype float64"),
    ],
)
def test_arguments_are_refused_by_name(call, says):
    with pytest.raises((ValueError, TypeError), match=says):
        call()


def test_callbacks_live_as_long_as_the_schedule_needs_them():
    def build():
        program = Program(1, 2)
        program.call(0, lambda step, x: np.add(x, 1, out=x), updates=[Region(0, 0, 4)])
        return program.compile()

    schedule = build()
    gc.collect()
    with one_space() as engine, Run(engine, schedule) as run:
        run.submit(50)
        run.wait()
        assert (engine.array(Region(0, 0, 4)) == 50).all()


@pytest.mark.parametrize(
    "build,error",
    [
        (lambda p: p.copy(0, Region(0, 0, 4), Region(0, 64, 5)), "equal"),
        (lambda p: p.copy(7, Region(0, 0, 4), Region(0, 64, 4)), "stream"),
        (lambda p: p.copy(0, Region(3, 0, 4), Region(0, 64, 4)), "space"),
    ],
)
def test_what_the_library_refuses_is_an_invalid_error(build, error):
    with pytest.raises(penstock.InvalidError, match=error) as caught:
        build(Program(1, 2))
    assert caught.value.code == -1


def test_trace_holds_the_kept_steps_in_order_with_times():
    program = Program(1, 2)
    for i in range(3):
        program.call(i % 2, lambda step, x: None, updates=[Region(0, 0, 4)])
    with one_space() as engine, Run(engine, program.compile(), trace_steps=2) as run:
        run.submit(5)
        run.wait()
        trace = run.trace()
    assert trace["step"].tolist() == [3, 3, 3, 4, 4, 4] and trace["op"].tolist() == [
        0,
        1,
        2,
        0,
        1,
        2,
    ]
    assert (trace["queued_ns"] <= trace["start_ns"]).all() and (
        trace["start_ns"] <= trace["end_ns"]
    ).all()
    assert (np.diff(trace["start_ns"].astype(np.int64)) > 0).all()  # each op needs the one before


def test_simulation_follows_the_given_costs():
    program = Program(1, 2)
    for stream in (0, 1):  # a producer of 100 ns and a consumer of 50 ns in a chain
        program.call(stream, lambda step, x: None, updates=[Region(0, 0, 4)], name=f"op{stream}")
    events, ends = program.compile().simulate(
        lambda op: 100 if op["name"] == "op0" else 50, n_steps=3
    )
    assert ends.tolist() == [150, 300, 450] and len(events) == 6


def test_an_exception_in_a_cost_function_is_raised():
    program = Program(1, 2)
    program.call(0, lambda step, x: None, updates=[Region(0, 0, 4)])
    with pytest.raises(ZeroDivisionError):
        program.compile().simulate(lambda op: 1 / 0)


def test_the_dataflow_example_computes_and_writes_its_timeline(tmp_path):
    import dataflow
    from penstock import trace

    result = dataflow.main(str(tmp_path / "timeline.json"))
    expected = np.arange(dataflow.N, dtype=np.float64)
    for _ in range(dataflow.STEPS):
        expected = 2 * expected + 1
    assert result.tolist() == expected.tolist()
    timeline = trace.load(tmp_path / "timeline.json")
    assert timeline.streams == ["compute", "h2d", "d2h"] and len(timeline.events) == 3 * dataflow.N
    by_name = {s.name: s for s in trace.stream_times(timeline)}
    assert all(0 < s.busy <= 1 and 0 <= s.busy + s.waiting <= 1.001 for s in by_name.values())
    trace.plot(timeline, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes()[:4] == b"\x89PNG"


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    from penstock import trace

    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(ValueError, match="not a trace"):
        trace.load(tmp_path / "x.json")
