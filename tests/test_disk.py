"""A disk as a third place: the bits are those without it, a checkpoint is whole however a run ends,
and what does not serve is refused in one sentence. tests/native/test_disk.c has the engine's part."""

import functools
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import BUILD, HANGS_S, ROOT, preload
from penstock import BudgetError, Hardware, InvalidError, ModelConfig, Plan, Trainer

HARDWARE = Hardware.read(ROOT / "tests/golden/hardware-cpu.json")
CUT = {
    "seq_len": 64,
    "tokens_per_step": 256,
    "chunk_tokens": 64,
    "chunks_per_round": 2,
    "first_round_chunks": 2,
    "head_slice_tokens": 64,
}
CASES = {
    "bf16-no-clip": {"recipe": "bf16", "clip_norm": 0},
    "passing": {
        "recipe": "fp32",
        "clip_by": "previous",
        "keep_grads": False,
        "chunks_per_round": 4,
        "first_round_chunks": 4,
    },
    "two-devices": {"recipe": "fp32", "gpus": 2, "layout": "data-parallel"},
    "master-skips-ramp-validation": {
        "recipe": "fp32-master",
        "non_finite": "skip",
        "batch_ramp": [(128, 2)],
        "val_tokens": 128,
    },
}


def direct_io(folder):
    try:
        os.close(os.open(folder / "try", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def drives(tmp_path_factory):
    """Two folders of a file system with direct I/O."""
    work = tmp_path_factory.mktemp("drives")
    if not direct_io(work):
        pytest.skip(f"{work} has no direct I/O")
    for name in "ab":
        (work / name).mkdir()
    return [work / name for name in "ab"]


@functools.cache
def least(model_dir, options, **more):
    """The least host memory that plans need."""
    model = ModelConfig.read(model_dir)
    return Plan.smallest(model, hardware=HARDWARE, **CUT | json.loads(options), **more)[1]


def short_of_memory(model_dir, **options):
    """Plan's arguments with less host memory than any plan without a disk needs."""
    key = json.dumps(options)
    without, with_disk = least(model_dir, key), least(model_dir, key, disk_mem="1GiB")
    assert 0 < with_disk < without
    return {"host_mem": (7 * with_disk + without) // 8, "disk_mem": "1GiB"}


def state_after(folder, model_dir, plan, data, n, **more):
    """The files of the checkpoint after n steps, and the losses, validations among them."""
    losses = []
    with Trainer(model_dir, plan, data, init_weights=True, seed=3, **more) as t:
        for m in t.steps(n):
            losses.append(m.loss)
        if "val" in more:
            losses.append(t.validate().loss)
        at = t.checkpoint(folder)
        losses.append(next(iter(t.steps(1))).loss)  # it was read, and is still there
    return losses, files_of(at)


def files_of(folder):
    return {f.name: f.read_bytes() for f in Path(folder).glob("*.safetensors")}


# Of those that are long, gradients that pass are the failing drive's below too, and recipes
# test_plan.c's.
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=pytest.mark.long if c in ("bf16-no-clip", "passing") else ())
        for c in CASES
    ],
)
def test_bits_are_those_without_a_disk(case, tiny_model, tiny_shard, drives, tmp_path):
    options, model = (
        {"threads": 2, "device_mem": "6MiB"} | CASES[case],
        ModelConfig.read(tiny_model),
    )
    data = {"val": [tiny_shard]} if "val_tokens" in options else {}
    short = short_of_memory(tiny_model, **options)
    with_disk = Plan(model, hardware=HARDWARE, **CUT | options, **short)
    r = with_disk.report
    assert r["disk_units"] > 0 and r["disk_read_bytes"] == r["disk_write_bytes"] > 0
    assert r["disk_arena_bytes"] >= r["disk_write_bytes"] and "are written a year" in str(with_disk)
    if options.get("clip_by"):  # gradients have no home either
        assert r["passing_grad_units"] > 0 and r["grad_bytes"] < r["weight_bytes"] / 4
    without = Plan(model, hardware=HARDWARE, **CUT | options)
    results = [
        state_after(tmp_path / name, tiny_model, plan, [tiny_shard], 3, disk=disk, **data)
        for name, plan, disk in (("without", without, None), ("with", with_disk, drives))
    ]
    assert results[0] == results[1]
    assert list(drives[0].iterdir()) == []


def test_predictions_follow_the_rates_of_the_drive(tiny_model):
    """A hundred times slower, and the step takes as long as the drive."""
    model, options = (
        ModelConfig.read(tiny_model),
        {"threads": 2, "device_mem": "6MiB", "recipe": "fp32"},
    )
    short = short_of_memory(tiny_model, **options)
    seconds = []
    for rate in (1e9, 1e6):
        text = json.loads((ROOT / "tests/golden/hardware-cpu.json").read_text())
        text |= {f"disk_{way}_bytes_per_s": rate for way in ("read", "write", "duplex")}
        path = tiny_model.parent / "slow.json"
        path.write_text(json.dumps(text))
        plan = Plan(model, hardware=Hardware.read(path), **CUT, **options, **short)
        seconds.append(plan.report["step_s"])
        traffic = plan.report["disk_write_bytes"] + plan.report["disk_read_bytes"]
        assert seconds[-1] >= traffic / rate
    assert seconds[1] > 2 * seconds[0]


# ---- the command ------------------------------------------------------------------------------

SHAPE = (
    "--seq-len 64 --threads 2 --recipe fp32 --tokens-per-step 256 --chunk-tokens 64 "
    "--chunks-per-round 4 --first-round-chunks 4 --head-slice-tokens 64 --device-mem 6MiB --quiet"
).split()


def train(model, shard, run, *more, **env):
    return subprocess.run(
        [*words(model, shard, run), *map(str, more)],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        env=os.environ | {k: str(v) for k, v in env.items()},
    )


def words(model, shard, run):
    of_run = ["--run-dir", run, "--out", run / "out", "--checkpoint-every", "2"]
    of_run += ["--replan", "off", "--lr-schedule", "constant", "--warmup-steps", "0"]
    return [BUILD / "bin/penstock", "train", "--model", model, "--data", shard, *SHAPE, *of_run]


@functools.cache
def needing_disk(tiny_model, folders, *more):
    """The options of a run that needs the disk: 3 MiB less than the least host memory without."""
    plan = [BUILD / "bin/penstock", "plan", "--model", tiny_model, *SHAPE[:-1], "--replan", "off"]
    rates = ["--disk", folders, "--disk-mem", "1GiB"]  # are measured, and kept
    subprocess.run([*plan, *more, *rates], check=True, capture_output=True)
    done = subprocess.run([*plan, *more, "--host-mem", "20MiB"], capture_output=True, text=True)
    needed = int(re.search(r"the smallest plan takes (\d+) bytes", done.stderr)[1])
    return [*more, *rates, "--host-mem", needed - (3 << 20)]


@pytest.fixture(scope="module")
def disk(tiny_model, drives):
    return needing_disk(tiny_model, ",".join(map(str, drives)))


REFUSED = {
    "no-size": (["--disk", "{a}"], "--disk {a} needs --disk-mem"),
    "no-folder": (["--disk-mem", "1GiB"], "give --disk, or plan without --disk-mem"),
    "tmpfs": (
        ["--disk", "/dev/shm", "--disk-mem", "1GiB"],
        "--disk /dev/shm: is in memory (tmpfs)",
    ),
    "missing": (
        ["--disk", "{a}/no", "--disk-mem", "1GiB"],
        "--disk {a}/no: cannot be used: No such",
    ),
    "twice": (["--disk", "{a},{a}", "--disk-mem", "1GiB"], "--disk: {a} is given twice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_serve_is_refused(case, tiny_model, tiny_shard, drives, tmp_path):
    options, message = REFUSED[case]
    options = [o.format(a=drives[0]) for o in options]
    run = tmp_path / "run"
    done = train(tiny_model, tiny_shard, run, "--steps", 2, *options)
    assert done.returncode == 2 and message.format(a=drives[0]) in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (run / "out").exists()


def test_a_failing_drive_ends_the_run_and_keeps_its_checkpoint(
    tiny_model, tiny_shard, drives, tmp_path
):
    """One sentence, exit code 1, and a run that goes on from the checkpoint has the bits of one
    without a fault. Gradients have no home."""
    disk = needing_disk(tiny_model, ",".join(map(str, drives)), "--clip-by", "previous")
    shim = {
        "LD_PRELOAD": preload(BUILD / "tests/libdisk_shim.so"),
        "DISK_SHIM_UNDER": drives[0],
        "DISK_SHIM_LOG": tmp_path / "calls",
    }
    begin = [*disk, "--init-weights"]
    whole = train(tiny_model, tiny_shard, tmp_path / "whole", "--steps", 6, *begin)
    assert whole.returncode == 0, whole.stderr
    assert '"passing_grad_units"' in (tmp_path / "whole/plan.json").read_text()
    shim |= {"DISK_SHIM_FAIL": 1 << 20, "DISK_SHIM_ERRNO": 5}
    four = train(tiny_model, tiny_shard, tmp_path / "4", "--steps", 4, *begin, **shim)
    n_calls = len((tmp_path / "calls").read_text().splitlines())
    assert four.returncode == 0 and n_calls > 30
    n_ended = 0
    for nth in range(n_calls, n_calls + 6, 3):
        run = tmp_path / str(nth)
        done = train(
            tiny_model, tiny_shard, run, "--steps", 6, *begin, **shim | {"DISK_SHIM_FAIL": nth}
        )
        said = [line for line in done.stderr.splitlines() if "Input/output error" in line]
        assert re.search(rf"--disk {drives[0]}: (reading|writing) failed: Input", said[0]), said
        of_checkpoint = "no checkpoint of step" in said[0]  # which the run does without
        n_ended += not of_checkpoint
        assert len(said) == 1 and done.returncode == (0 if of_checkpoint else 1)
        assert list((run / "checkpoints").glob("step-*/manifest.json"))
        if not of_checkpoint:
            done = train(tiny_model, tiny_shard, run, "--steps", 6, *disk, "--resume", "auto")
        assert done.returncode == 0, done.stderr
        assert files_of(run / "out") == files_of(tmp_path / "whole/out") != {}
        if n_ended:
            break
    assert n_ended


def test_a_kill_leaves_the_checkpoint_and_no_file(disk, tiny_model, tiny_shard, drives, tmp_path):
    """Also a second run in the same folders is refused while the first one lives."""
    run = tmp_path / "run"
    more = [*map(str, disk), "--steps", "100000", "--init-weights"]
    with subprocess.Popen([*words(tiny_model, tiny_shard, run), *more]) as first:
        at = run / "checkpoints/step-00000002"
        end = time.monotonic() + HANGS_S
        while not at.exists() and first.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        first.send_signal(
            signal.SIGSTOP
        )  # else it makes hundreds of steps, which the others repeat
        second = train(
            tiny_model, tiny_shard, tmp_path / "b", "--steps", 2, "--init-weights", *disk
        )
        first.kill()
    assert second.returncode == 2 and "another run uses it" in second.stderr, second.stderr
    assert [list(d.iterdir()) for d in drives] == [[], []]
    newest = max((run / "checkpoints").glob("step-*"))
    n = int(newest.name[5:]) + 2
    resumed = train(tiny_model, tiny_shard, run, "--steps", n, *disk, "--resume", newest)
    whole = train(tiny_model, tiny_shard, tmp_path / "w", "--steps", n, "--init-weights")
    assert resumed.returncode == whole.returncode == 0, resumed.stderr + whole.stderr
    assert files_of(run / "out") == files_of(tmp_path / "w/out") != {}


def test_caps_that_do_not_hold_the_state_are_refused(tiny_model, drives):
    model, options = (
        ModelConfig.read(tiny_model),
        {"threads": 2, "device_mem": "6MiB", "recipe": "fp32"},
    )
    short = short_of_memory(tiny_model, **options)
    with pytest.raises(BudgetError, match="of host memory"):
        Plan(model, hardware=HARDWARE, **CUT, **options, **short | {"disk_mem": "4096B"})
    with_disk = Plan(model, hardware=HARDWARE, **CUT, **options, **short)
    for plan, disk, message in (
        (with_disk, None, "give disk, or plan without disk_mem"),
        (Plan(model, hardware=HARDWARE, **CUT, **options), drives, "plan with disk_mem"),
    ):
        with pytest.raises(InvalidError, match=message):
            Trainer(tiny_model, plan, lambda step: None, init_weights=True, disk=disk)


def test_a_resumed_run_needs_the_memory_of_one_that_begins(tiny_model, tiny_shard, tmp_path):
    """Whatever the process held at its start: opening a checkpoint does not count."""
    begun = train(tiny_model, tiny_shard, tmp_path / "run", "--steps", 2, "--init-weights")
    assert begun.returncode == 0, begun.stderr
    for held in (0, 3 << 10):
        env = {"LD_PRELOAD": preload(BUILD / "tests/libdisk_shim.so"), "DISK_SHIM_HOLD_KIB": held}
        needs = set()
        for run, how in (("run", ["--resume", "auto"]), ("other", ["--init-weights"])):
            more = ["--steps", 4, "--host-mem", "20MiB", *how]
            done = train(tiny_model, tiny_shard, tmp_path / run, *more, **env)
            needs.add(re.search(r"the smallest plan takes \d+ bytes", done.stderr)[0])
        assert len(needs) == 1, (held, needs)
