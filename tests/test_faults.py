"""Whole runs of the binary in which one disk call fails, once: it ends by itself, in one sentence,
and loses no model."""

import concurrent.futures
import errno
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

import numpy as np
import pytest
from conftest import BUILD, HANGS_S, ROOT, preload, write_shard
from safetensors.numpy import load_file

SHIM = BUILD / "tests/libdisk_shim.so"
SHAPE = (
    "--seq-len 32 --threads 1 --recipe fp32 --chunk-tokens 64 --chunks-per-round 1 "
    "--tokens-per-step 64"
).split()
TRAIN = (
    "train --model model --data data --out out --run-dir run --steps 3 --save-dtype fp32 "
    "--init-weights --quiet"
).split() + SHAPE
PLAN = ["plan", "--model", "model", "--json", *SHAPE]
INFO = ["info", "--model", "model", "--data", "data", "--seq-len", "32", "--json"]
REMOVES = ("unlink", "unlinkat", "rmdir")  # what could not be removed stays
LOOKS = (
    "stat",
    "fstat",
    "fstatat",
    "lstat",
    # so does a lock or a stage that could not be looked at, for it may be another's; the next run
    # clears it
)


@pytest.fixture(scope="module")
def inputs():
    """A model, two shards and this machine's rates, in memory where there is a disk in it."""
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    ) as folder:
        work = pathlib.Path(folder)
        for name in ("model", "data", "cache"):
            (work / "inputs" / name).mkdir(parents=True)
        shutil.copy(ROOT / "models/tiny-llama.json", work / "inputs/model/config.json")
        (work / "inputs/model/tokenizer.json").write_text('{"model": {"vocab": {"a": 1}}}')
        for name, n in (("a.bin", 100), ("b.bin", 300)):  # a step and a bit in the first
            write_shard(work / "inputs/data" / name, np.arange(n) % 200)
        subprocess.run(
            [BUILD / "bin/penstock", *PLAN],
            cwd=work / "inputs",
            check=True,
            capture_output=True,
            env={**os.environ, "XDG_CACHE_HOME": str(work / "inputs/cache")},
        )
        yield work


def tree(folder):
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in folder.rglob("*")
    }


def without_rates(files):
    return {name: content for name, content in files.items() if name.split("/")[0] != "cache"}


class Run:
    """Of the command in a folder of its own, in which the @nth disk call fails with @error (0: the
    call's own); or, with @variable DISK_SHIM_KILL, which is killed at the @nth that changes
    something."""

    def __init__(self, work, command, prepare, nth, error, variable="DISK_SHIM_FAIL"):
        self.place = pathlib.Path(tempfile.mkdtemp(dir=work))
        shutil.copytree(work / "inputs", self.place, dirs_exist_ok=True)
        prepare(self.place)
        self.command, self.before = command, tree(self.place)
        log = self.place.with_suffix(".log")
        self.end(
            {
                "LD_PRELOAD": preload(SHIM),
                variable: str(nth),
                "DISK_SHIM_ERRNO": str(error),
                "DISK_SHIM_LOG": str(log),
                "DISK_SHIM_UNDER": f"{self.place}/",
            }
        )
        self.calls = (
            [line.split(" ", 1) for line in log.read_text().splitlines()] if log.exists() else []
        )
        self.failed = self.calls[nth - 1] if 0 < nth <= len(self.calls) else ["", ""]
        self.nth, self.error = nth, error

    def end(self, more=None):
        words = [
            str(self.place / w) if w in ("model", "data", "out", "run") else w for w in self.command
        ]
        env = {**os.environ, "XDG_CACHE_HOME": str(self.place / "cache"), **(more or {})}
        done = subprocess.run(
            [BUILD / "bin/penstock", *words],
            cwd=self.place,
            env=env,
            capture_output=True,
            text=True,
            timeout=HANGS_S,
        )
        self.code, self.answer, self.said = done.returncode, done.stdout, done.stderr.splitlines()

    def __repr__(self):
        error, new = (
            errno.errorcode.get(self.error, "its own"),
            sorted(set(tree(self.place)) - set(self.before)),
        )
        return (
            f"{self.command[0]}: call {self.nth}, {' '.join(self.failed)}, failed with {error}: "
            f"exit {self.code}, {self.said}, {new}"
        )

    def model(self):
        if not (self.place / "out").exists():
            return None
        return {n: t.tobytes() for n, t in load_file(self.place / "out/model.safetensors").items()}

    def losses(self):
        return [
            json.loads(line)["loss"]
            for line in (self.place / "run/metrics.jsonl").read_text().splitlines()
        ]


def check_words(run):
    assert run.code in (0, 1, 2), run
    said = [line for line in run.said if "this machine" not in line]
    if run.code:
        assert len(said) == 1 and str(run.place) in said[0] and run.answer == "", run
    assert all(line.startswith("penstock: ") for line in said), run


def leftovers(run):
    return [name for name in tree(run.place) if ".penstock" in name or name.endswith(".part")]


def check_files(run):
    """Nothing half-made stays; where the run was refused, nothing at all but the rates that were
    measured."""
    now = tree(run.place)
    blind = run.failed[0] in LOOKS and ".penstock" in run.failed[1]
    if run.failed[0] not in REMOVES:
        assert blind or not leftovers(run), run
        if run.code == 2 and not blind:
            assert without_rates(now) == without_rates(run.before), run
    for name in [n for n in now if n.split("/")[0] in ("run", "cache") and n.endswith(".json")]:
        json.loads(now[name])


def check_trained(run, good):
    stepped = [
        i
        for i, call in enumerate(run.calls, 1)
        if call[0] == "fflush" and call[1].endswith("/metrics.jsonl")
    ][:1]
    model = run.model()
    assert run.code != 2 or model is None, run
    assert not stepped or run.nth < stepped[0] or model, run
    if model:
        assert model.keys() == good.model().keys() and (run.place / "out/config.json").exists(), run
        assert (run.place / "out/tokenizer.json").read_bytes() == run.before[
            "model/tokenizer.json"
        ], run
    if run.code == 0:
        assert model == good.model() and run.losses() == good.losses(), run
        assert {"plan.json", "timeline.json"} <= {p.name for p in (run.place / "run").iterdir()}, (
            run
        )
    elif (run.place / "run/metrics.jsonl").exists():
        assert run.losses() == good.losses()[: len(run.losses())], run


def check_refused(run, good):
    assert run.code in (1, 2) and run.model() == good.model(), run


def check_answered(run, good):
    if run.code == 0:
        assert run.answer == good.answer, run


def check_planned(run, good):
    if run.code == 0:
        assert json.loads(run.answer).keys() == json.loads(good.answer).keys(), run


# ---- a run that goes on by the same command ------------------------------------------------------

RESUMED = [*TRAIN, *"--checkpoint-every 1 --resume auto".split()]


def allowed_losses(run, good):
    """Those of @good; where the write of a step's line failed, all but one."""
    losses = good.losses()
    lost = run.failed[0] == "fflush" and run.failed[1].endswith("/metrics.jsonl")
    return [losses] + [losses[:i] + losses[i + 1 :] for i in range(len(losses)) if lost]


def ended_and_again(work, nth, error, good):
    """Killed at the @nth call that changes something, or (@error) with the @nth of all failing; then
    the same command to its end."""
    variable = "DISK_SHIM_FAIL" if error is not None else "DISK_SHIM_KILL"
    run = Run(work, RESUMED, nothing, nth, error or 0, variable)
    run.end()
    assert run.model() == good.model(), run
    if run.code == 2:  # a look at the new model failed, so no note says that it is this run's
        assert run.failed[0] in LOOKS and ".penstock-save" in run.failed[1], run
        assert len(run.said) == 1 and "already has a model" in run.said[0], run
    else:
        assert run.code == 0 and run.losses() in allowed_losses(run, good), run
    # a removal that failed once is made up for; what could not be looked at may be another's
    left = [name for name in leftovers(run) if not name.endswith("/.penstock-note")]
    assert run.failed[0] in LOOKS or not left, (run, left)
    shutil.rmtree(run.place)


def go_on(work, tests, good):
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda t: catch(ended_and_again, work, *t, good), tests)
        wrong = [str(e) for e in found if e]
    assert not wrong, f"{len(wrong)} of {len(tests)}:\n" + "\n".join(wrong)


def at_the_save(calls):
    """The calls from the note of what will be saved on, counted from 1."""
    first = next(i for i, call in enumerate(calls, 1) if "/run/saved-model.txt." in call[1])
    return range(first, len(calls) + 1)


def test_the_same_command_goes_on_after_a_kill_or_a_fault_in_its_save(inputs):
    killed = Run(inputs, RESUMED, nothing, 0, 0, "DISK_SHIM_KILL")
    good = Run(inputs, RESUMED, nothing, 0, 0)
    assert killed.code == good.code == 0, (killed, good)
    kills, faults = at_the_save(killed.calls), at_the_save(good.calls)
    assert len(kills) > 8
    go_on(inputs, [(n, None) for n in kills[::4]] + [(n, 0) for n in faults[:4:2]], good)


@pytest.mark.long
def test_the_same_command_goes_on_after_a_kill_or_a_fault_at_any_call(inputs):
    killed = Run(inputs, RESUMED, nothing, 0, 0, "DISK_SHIM_KILL")
    good = Run(inputs, RESUMED, nothing, 0, 0)
    kills, faults = range(1, len(killed.calls) + 1), range(1, len(good.calls) + 1)
    go_on(inputs, [(n, None) for n in kills] + [(n, errno.EACCES) for n in faults], good)


# ---- a run with one fault ------------------------------------------------------------------------


def nothing(place):
    pass


def a_model_there(place):
    subprocess.run(["cp", "-r", place / "model", place / "out"], check=True)
    header = b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (place / "out/model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + b"\0" * 4
    )


def no_rates(place):
    shutil.rmtree(place / "cache", ignore_errors=True)  # a call that failed may have made none


# name: the command, what is done before it, what must hold, its code when nothing fails; of how
# many calls one fails by default
RUNS = {
    "train": (TRAIN, nothing, check_trained, 0, 23),
    "train where a model is": (TRAIN, a_model_there, check_refused, 2, 5),
    "info": (INFO, nothing, check_answered, 0, 4),
    "plan": (PLAN, nothing, check_planned, 0, 5),
    "plan, first use": (PLAN, no_rates, check_planned, 0, 12),
}


def sweep(work, name, stride, errors):
    command, prepare, check, code, _ = RUNS[name]
    good = Run(work, command, prepare, 0, 0)
    assert good.code == code, good

    def fail(nth, error):
        run = Run(work, command, prepare, nth, error)
        check_words(run)
        check_files(run)
        check(run, good)
        if stride == 1:  # what is left of a run that failed does not disturb the next
            shutil.rmtree(run.place / "out", ignore_errors=True)
            (run.place / "run/metrics.jsonl").unlink(missing_ok=True)
            prepare(run.place)
            run.end()
            assert run.code == code and (run.failed[0] not in LOOKS or not leftovers(run)), run
        shutil.rmtree(run.place)

    tests = (
        [
            (nth, errors[i % len(errors)])
            for i, nth in enumerate(range(1, len(good.calls) + 1, stride))
        ]
        if stride > 1
        else [(nth, error) for nth in range(1, len(good.calls) + 1) for error in errors]
    )
    assert len(tests) > 1
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        wrong = [str(e) for e in pool.map(lambda t: catch(fail, *t), tests) if e]
    assert not wrong, f"{len(wrong)} of {len(tests)}:\n" + "\n".join(wrong)


def catch(call, *args):
    try:
        call(*args)
    except Exception as e:
        return e


@pytest.mark.parametrize("name", RUNS)
def test_a_run_outlives_a_disk_call_that_fails_or_says_which(inputs, name):
    sweep(inputs, name, RUNS[name][4], (0, errno.EACCES))


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_a_run_outlives_each_disk_call_that_fails_or_says_which(inputs, name):
    sweep(inputs, name, 1, (0, errno.EACCES))
