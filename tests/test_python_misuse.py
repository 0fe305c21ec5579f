"""Misuse of the Python API, each case in a process of its own: an exception that says what to do,
or what is needed stays alive; never a signal, a hang or a leak."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANGS_S

ROOT = Path(__file__).resolve().parent.parent
PRELUDE = '''
import ctypes, gc, os, signal, sys, threading, time
import numpy as np
import penstock
from penstock import Dataset, Engine, Hardware, ModelConfig, Plan, Program, Region, Run, Space, StateError, Stream, Trainer, _lib

MODEL_DIR, SHARD = sys.argv[1:]
SEQ, X, Q_PROJ = 16, Region(0, 0, 4), "model.layers.1.self_attn.q_proj.weight"
HARDWARE = Hardware.estimate(1, "cpu")
internals = ctypes.CDLL(str(_lib._library_path()))
internals.ps__live_allocations.restype = ctypes.c_int64
gc.disable()  # it runs where a case says so


def refused(call, text, error=StateError):
    try:
        call()
    except error as caught:
        assert text in str(caught), caught
    else:
        raise AssertionError("not refused")


def engine():
    return Engine([Space(4096)], [Stream("compute"), Stream("host")])


def run_of(*ops, on=None):
    program = Program(1, 2)
    for i, op in enumerate(ops):
        program.call(i, op, updates=[Region(0, 64 * i, 4)])
    return Run(on or engine(), program.compile(), trace_steps=1)


def plan():
    return Plan(ModelConfig.read(MODEL_DIR), seq_len=SEQ, tokens_per_step=4 * SEQ, recipe="fp32", chunk_tokens=SEQ, chunks_per_round=4, hardware=HARDWARE)


def batch(step):
    return np.full(4 * SEQ, step % 7), np.full(4 * SEQ, 1)


def until_closed(call):
    """Call until the object is closed: by whom and when is the other thread's business."""
    try:
        while True:
            try:
                call()
            except StateError as caught:
                if "closed" in str(caught):
                    return
    except BaseException as unexpected:
        outcome.append(unexpected)


outcome = []


def beside(*calls):
    threads = [threading.Thread(target=until_closed, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    return threads


def join(threads):
    for thread in threads:
        thread.join(1200)
        assert not thread.is_alive()
    assert not outcome, outcome


def alive(before=0):
    """The library's allocations, mappings and threads that live, garbage not counted; what was dropped with steps in flight gets
    time to end."""
    gc.collect()
    deadline = time.time() + 300
    while internals.ps__live_allocations() > before and time.time() < deadline:
        time.sleep(0.005)
        gc.collect()
    return internals.ps__live_allocations() - before


def leaks_nothing(use, n=3):
    before = internals.ps__live_allocations()
    for _ in range(n):
        use()
    assert alive(before) == 0
'''
CASES = {
    "a trainer in a function, left by break": """
def use():
    trainer = Trainer(MODEL_DIR, plan(), SHARD)
    for metrics in trainer.steps(5):
        break
leaks_nothing(use)
""",
    "a trainer in a function, left by the exception of weights that are not finite": """
def use():
    trainer = Trainer(MODEL_DIR, plan(), SHARD)
    trainer.write(Q_PROJ, np.full(trainer.params[Q_PROJ].shape, np.nan))
    try:
        list(trainer.steps(5))
    except penstock.NumericError as caught:
        assert "not finite" in str(caught)
leaks_nothing(use)
""",
    "plan, dataset and trainer in garbage cycles, in every order of making": """
class Node:
    pass
def use(order):
    cycle = Node()
    cycle.me, cycle.model = cycle, ModelConfig.read(MODEL_DIR)
    cycle.data, cycle.plan = [Dataset(SHARD, 512), plan()][::order], None
    cycle.data, cycle.plan = cycle.data[::order]
    cycle.trainer = Trainer(MODEL_DIR, cycle.plan, cycle.data)
    cycle.batches = Trainer(MODEL_DIR, plan(), lambda step: (cycle, batch(step))[1])  # its batches hold it
    for trainer in (cycle.trainer, cycle.batches):
        next(iter(trainer.steps(3)))
        _lib.check(_lib.lib.ps_trainer_submit(trainer._handle.ptr, 2))
leaks_nothing(lambda: use(1), 1)
leaks_nothing(lambda: use(-1), 1)
""",
    "a dataset and a plan dropped under their trainer": """
made, data = plan(), Dataset(SHARD, 512)
trainer = Trainer(MODEL_DIR, made, data)
first = next(iter(trainer.steps(2))).loss
del trainer.plan, made, data
gc.collect()
assert trainer.read(Q_PROJ).size and len(list(trainer.steps(3))) == 3
trainer.close()
""",
    "a trainer and a run dropped with steps in flight, and the next ones": """
def slow(step, *_):
    time.sleep(0.01)
    return batch(step)
made, home = plan(), engine()
for i in range(3):
    trainer, run = Trainer(MODEL_DIR, made, slow), run_of(slow, on=home)
    _lib.check(_lib.lib.ps_trainer_submit(trainer._handle.ptr, 3))
    run.submit(10)
    del trainer, run
home.close()
del made, home
assert alive() == 0
""",
    "two trainers of one plan": """
made = plan()
with Trainer(MODEL_DIR, made, SHARD):
    refused(lambda: Trainer(MODEL_DIR, made, SHARD), "another trainer runs this plan: destroy that trainer", penstock.BusyError)
Trainer(MODEL_DIR, made, SHARD).close()
""",
    "an array after its engine was closed": """
home = engine()
array = home.array(X)
array[:] = 3
home.close()
array += 1
assert array.tolist() == [4] * 4
for use in (lambda: home.array(X), lambda: home.space_peak(0), lambda: home.space_bytes(0), lambda: run_of(print, on=home)):
    refused(use, "the engine is closed: use it before close()")
home.close()
""",
    "an array that left its op": """
def use():
    kept = []
    run = run_of(lambda step, x: kept.append(x))
    run.submit(3)
    run.wait()
    run.close()
    del run
    gc.collect()
    for array in kept:
        array += 1
    assert kept[0].tolist() == [3] * 4
leaks_nothing(use)
""",
    "an engine closed with a run": """
home = engine()
run = run_of(lambda step, x: None, on=home)
refused(home.close, "the engine still has a run: close that first", penstock.BusyError)
run.submit()
run.wait()
run.close()
home.close()
""",
    "a run closed while other threads use it": """
for i in range(20):
    run = run_of(lambda step, x: None, lambda step, x: None)
    threads = beside(lambda: run.submit(1), run.where, lambda: run.steps_done, run.wait, run.trace)
    time.sleep(0.01)
    closers = [threading.Thread(target=run.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    join(threads + closers)
    run.cancel()
    for use in (run.submit, run.wait, run.where, run.trace, lambda: run.steps_done):
        refused(use, "the run is closed: use it before close()")
""",
    "wait() and close() inside an op": """
def op(step, x):
    time.sleep(0.05)  # until the other thread is inside wait(), or outside submit()
    for use in (run.wait, run.close):
        refused(use, "cannot" if step == 0 else "another thread is inside a call of this run and may wait for the op")
    assert "then op" in run.where() and run.steps_done == step
    done.set()
done = threading.Event()
run = run_of(op)
run.submit()
assert done.wait(1200)
run.submit()
run.wait()
run.close()
""",
    "stepping, reading and closing inside a batch function": """
def stepping(step):
    if step == 2:  # a step ahead of the one that is waited for, or not: who waits has the turn
        for use in (trainer.close, lambda: next(trainer.steps(1)), lambda: trainer.read(Q_PROJ), lambda: trainer.save("nowhere")):
            refused(use, "")
        assert trainer.steps_done <= 2 and trainer.where()
    return batch(step)
trainer = Trainer(MODEL_DIR, plan(), stepping)
assert len(list(trainer.steps(4))) == 4
trainer.close()
""",
    "the collector inside an op, on the op's own run": """
def make(i):
    def op(step, x):
        time.sleep(0.001)
        gc.collect()
        collected[i] += 1
    run = run_of(op)
    run.me = run
    run.submit(20)
collected = [0, 0, 0]
for i in range(3):
    make(i)
while min(collected) < 20:
    time.sleep(0.01)
assert alive() == 0
""",
    "exit while ops run": """
run = run_of(lambda step, x: time.sleep(0.01), lambda step, x: time.sleep(0.01))
run.submit(10**6)
threading.Thread(target=lambda: refused(run.wait, "cancelled", penstock.CancelledError), daemon=True).start()
trainer = Trainer(MODEL_DIR, plan(), lambda step: (time.sleep(0.01), batch(step))[1])
_lib.check(_lib.lib.ps_trainer_submit(trainer._handle.ptr, 60))
time.sleep(0.05)
print("clean")
sys.exit(3)
""",
    "exit by an exception while ops run, in a cycle": """
run = run_of(lambda step, x: time.sleep(0.01 if run else 0))
run.submit(10**6)
print("clean")
sys.stdout.flush()
sys.stderr.close()
raise RuntimeError
""",
    "a trainer closed while other threads read, save and ask": """
made = plan()
for i in range(4):
    trainer = Trainer(MODEL_DIR, made, batch)
    threads = beside(lambda: trainer.read(Q_PROJ), lambda: trainer.grad(Q_PROJ), lambda: trainer.save(MODEL_DIR + ".saved"), trainer.where,
                     lambda: trainer.steps_done, lambda: trainer.write(Q_PROJ, np.zeros(trainer.params[Q_PROJ].shape)))
    list(trainer.steps(2))
    time.sleep(0.05)
    trainer.close()
    join(threads)
    refused(lambda: trainer.save("nowhere"), "the trainer is closed: use it before close()")
    refused(lambda: next(trainer.steps(1)), "the trainer is closed: use it before close()")
""",
    "close() from a signal handler, inside and outside a call": """
def close(*_):
    try:
        trainer.close()
    except StateError as caught:
        assert "inside another call of this trainer on the same thread" in str(caught)
        busy.append(caught)
busy, made = [], plan()
with Trainer(MODEL_DIR, made, batch) as trainer:
    list(trainer.steps(1))  # what is parsed once takes a lock of cffi's, which batch() waits for
signal.signal(signal.SIGALRM, close)
for i in range(20):
    trainer = Trainer(MODEL_DIR, made, batch)
    signal.setitimer(signal.ITIMER_REAL, 0.001 * (1 + i))
    until_closed(lambda: (list(trainer.steps(1)), trainer.where(), trainer.close() if busy else None))
    busy.clear()
assert not outcome, outcome
""",
    "a fork with a live engine, run and trainer": """
made = plan()
data = Dataset(SHARD, 512)
home = engine()
run = run_of(lambda step, x: time.sleep(0.01), on=home)
array = home.array(X)
trainer = Trainer(MODEL_DIR, made, data)
run.submit(20)
_lib.check(_lib.lib.ps_trainer_submit(trainer._handle.ptr, 3))
child = os.fork()
if child == 0:
    for use in (run.submit, run.wait, run.where, run.cancel, run.trace, lambda: trainer.read(Q_PROJ), lambda: next(trainer.steps(1)), trainer.where,
                lambda: trainer.save("nowhere"), trainer.cancel, lambda: home.array(X), lambda: run_of(print, on=home)):
        refused(use, f"belongs to process {os.getppid()}; this process, {os.getpid()}, is a fork of it and has none of its threads: make a new one")
    assert made.report and data.read(SEQ, 0) and array.sum() == 0
    with Trainer(MODEL_DIR, plan(), data) as mine:  # as good as any
        assert len(list(mine.steps(2))) == 2
    trainer.close()
    del trainer, run, home
    gc.collect()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert len(trainer.finish()) == 3 and len(list(trainer.steps(2))) == 2
run.wait()
""",
    "failed runs that are not closed": """
class Mine(Exception):
    pass
def fail(step, x):
    raise Mine(x)  # the exception holds an array, its traceback the run
program = Program(1, 2)
program.call(0, fail, updates=[X])
program.call(1, lambda step: None)
schedule = program.compile()
def waited_for():
    run = Run(engine(), schedule)
    run.submit()
    refused(run.wait, "", Mine)
    refused(run.submit, "", Mine)
def not_waited_for():
    run = Run(engine(), schedule)
    run.submit()
    time.sleep(0.01)
leaks_nothing(waited_for)
leaks_nothing(not_waited_for)
""",
    "events that are no trace of the plan": """
made = plan()
events, _ = made.simulate(3)
assert made.stalls(events) and made.stalls(events[::1])
rng = np.random.default_rng(0)
for field, values in {"step": (1, 2**63), "op": (6, 10**9), "stream": (5, 2**32 - 1), "start_ns": (2**63,), "queued_ns": (2**63,)}.items():
    for value in values:
        junk = events.copy()
        junk[field][7] = value
        refused(lambda: made.stalls(junk), "event 7 is not this plan's op 7 of step 0", penstock.InvalidError)
for junk in (events[:-1], events[:0]):
    refused(lambda: made.stalls(junk), "whole steps", penstock.InvalidError)
for junk in (rng.random(80), np.zeros(3 * 48, np.uint8), None, list(events)):
    refused(lambda: made.stalls(junk), "an array of engine.TRACE_DTYPE", ValueError)
refused(lambda: made.stalls(np.frombuffer(rng.bytes(events.nbytes), events.dtype)), "event 0", penstock.InvalidError)
""",
    "private fields of configurations": """
made = plan()
def fields_of(struct):
    return [name for name, field in _lib.ffi.typeof(struct).item.fields if field.type.kind == "primitive"]
model = ModelConfig.read(MODEL_DIR)
for name in fields_of(model._ptr):
    good = getattr(model._ptr, name)
    for junk in (0, 2**31 - 1, 2**32 - 1, -1):
        try:
            setattr(model._ptr, name, junk)
            model.n_elements, model.flops(16), repr(model), model.architecture
            model.params()
        except (penstock.PenstockError, OverflowError, IndexError):
            pass
    setattr(model._ptr, name, good)
hardware = Hardware.estimate(1, "cpu")
for name in ("struct_bytes", "backend", "n_threads", "n_cpus", "device"):
    good = getattr(hardware._ptr, name)
    for junk in (0, 2**31 - 1):
        try:
            setattr(hardware._ptr, name, junk)
            Plan(model, seq_len=SEQ, tokens_per_step=4 * SEQ, chunk_tokens=SEQ, chunks_per_round=4, hardware=hardware)
        except (penstock.PenstockError, OverflowError):
            pass
    setattr(hardware._ptr, name, good)
made.model._ptr.n_layers = 2**32 - 1  # the plan has a model of its own, which a trainer takes
Trainer(MODEL_DIR, made, SHARD).close()
for name in fields_of(made.config):
    setattr(made.config, name, 2**31 - 1)
made.model._ptr.n_layers = model.n_layers
Trainer(MODEL_DIR, made, SHARD).close()  # a copy of what the plan has
""",
    "regions that are none": """
refused(lambda: Region(0, 0, 4, object), "dtype object holds Python objects", ValueError)
home = engine()
for region in (Region(0, 2**21 - 8, 4), Region(0, -4, 4), Region(0, 2**62, 4), Region(0, 0, 2**62, "i1"), Region(0, 0, (-1, -4)), Region(1, 0, 4)):
    refused(lambda: home.array(region), "lies outside its space of" if region.shape != (-1, -4) else "negative", ValueError)
""",
    "Ctrl-C while a run with steps in flight is waited for, closed and left": """
def interrupted(use):
    run = run_of(lambda step, x: time.sleep(0.002))
    run.submit(10**6)
    main = threading.main_thread().ident  # raise_signal() would not end its time.sleep()
    timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    try:
        use(run)
    except KeyboardInterrupt:
        timer.join()
        return run
    raise AssertionError("no KeyboardInterrupt")
def leave(run):
    with run:
        time.sleep(60)
run = interrupted(lambda run: run.wait())
assert run.steps_done < 10**6
run.submit()  # it goes on
refused(interrupted(lambda run: run.close()).submit, "the run is closed")
refused(interrupted(leave).submit, "the run is closed")
run.cancel()
run.close()
""",
    "a plan's schedule on an engine that is not its trainer's": """
made = plan()
need = [made.schedule.space_bytes(i) for i in range(2)]
home = Engine([Space(need[0]), Space(need[1])], [Stream(str(i), scratch_bytes=1 << 20) for i in range(5)])
def use():
    run = Run(home, made.schedule)
    run.submit()
    run.wait()
refused(use, "a plan's schedule runs under a trainer only")
with Trainer(MODEL_DIR, made, SHARD):  # whose plan it is, on another engine
    refused(use, "a plan's schedule runs under a trainer only")
""",
}
EXITS = {"exit while ops run": 3, "exit by an exception while ops run, in a cycle": 1}


@pytest.mark.parametrize("case", CASES)
def test_misuse(case, tiny_model, tiny_shard, tmp_path):
    script = tmp_path / "case.py"
    script.write_text(PRELUDE + CASES[case] + ("" if case in EXITS else 'print("clean")\n'))
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", script, tiny_model, tiny_shard],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
    )
    assert (done.returncode, done.stdout) == (EXITS.get(case, 0), "clean\n"), done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
