"""What a system refuses a process (ulimit): every run ends, done or with one sentence, and never
hangs or dies of a signal."""

import os
import re
import resource
import subprocess
import sys

import pytest
from conftest import BUILD, HANGS_S, ROOT, words_of_training

BINARY = BUILD / "bin/penstock"
MIB = 1 << 20
# What a process maps of Penstock itself: with kernels for GPUs 30 MiB and more.
OWN = (BUILD / "lib/libpenstock.so").stat().st_size


def limited(words, kind, value, cwd):
    """Runs under a soft and hard limit; a hang is killed."""
    return subprocess.run(
        [str(w) for w in (BINARY, *words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=HANGS_S,
        preexec_fn=lambda: resource.setrlimit(kind, (value, value)),
    )


@pytest.fixture(scope="module", autouse=True)
def profiled(cache_of_this_run):
    subprocess.run(
        [BINARY, "profile", "--backend", "cpu", "--quick"], check=True, capture_output=True
    )


def done_or_refused(done):
    assert done.returncode in (0, 2), (done.returncode, done.stderr)
    assert done.returncode == 0 or re.fullmatch(
        r"penstock: .*(refused|could not be started).*\n", done.stderr
    ), done.stderr
    return done.returncode


def test_commands_that_multiply_nothing_need_no_blas(tmp_path):
    done = limited(["version"], resource.RLIMIT_AS, OWN + 20 * MIB, tmp_path)
    assert done.stdout.startswith("penstock "), done.stderr


@pytest.mark.parametrize(
    "kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA], ids=["ulimit -v", "ulimit -d"]
)
def test_memory_that_is_refused_ends_a_run_before_its_first_step(
    tiny_model, tiny_shard, tmp_path, kind
):
    more = ("--steps", 2, "--threads", 2, "--run-dir", "run", "--no-save")
    job = words_of_training(tiny_model, tiny_shard, *more)
    codes = []
    for mib in (40, 70, 100, 130, 150, 170, 190, 210, 230, 260, 1000):
        codes.append(done_or_refused(limited(job, kind, OWN + mib * MIB, tmp_path)))
        assert codes[-1] == 0 or list(tmp_path.iterdir()) == []
        for path in (tmp_path / "run").glob("*"):
            path.unlink()
        if (tmp_path / "run").exists():
            (tmp_path / "run").rmdir()
    assert codes == sorted(codes, reverse=True) and codes[0] == 2 and codes[-1] == 0


@pytest.mark.parametrize("kib", [96, 128, 256])
def test_a_small_stack_is_enough(tiny_model, tiny_shard, tmp_path, kib):
    job = words_of_training(
        tiny_model, tiny_shard, "--steps", 2, "--run-dir", "run", "--out", "out"
    )
    done = limited(job, resource.RLIMIT_STACK, kib << 10, tmp_path)
    assert done.returncode == 0, (done.returncode, done.stderr)


# ---- in Python, which opens the library at run time ------------------------------------------------


def in_python(code, *args):
    """Runs in a process of its own; a hang is killed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_engine_that_is_there_has_mapped_what_the_start_of_its_threads_takes():
    """A thread's first allocation maps 64 MiB of address space. OpenBLAS, opened meanwhile, found too
    little and hung."""
    grown = in_python("""
import os, time
from penstock import Engine, Space, Stream

def mapped():
    return int(open("/proc/self/statm").read().split()[0])

os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # threads start late
engine = Engine([Space(4096)], [Stream(str(i)) for i in range(4)])
before = mapped()
time.sleep(0.2)
print(mapped() - before)
""")
    assert grown == "0\n"


def test_a_second_engine_gets_buffers_of_its_own_or_is_refused(tiny_model):
    """Engines multiply at once. A buffer that OpenBLAS lacks then and is refused, it asks for ever."""
    said = in_python(
        """
import resource, sys
from penstock import Hardware, ModelConfig, Plan, Trainer

model = ModelConfig.read(sys.argv[1])
plans = [Plan(model, seq_len=64, hardware=Hardware.estimate(2, "cpu")) for _ in range(2)]
first = Trainer(sys.argv[1], plans[0], lambda step: ([1] * 512, [1] * 512))
for mib in range(20, 400, 20):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (mib << 20), -1))
    try:
        Trainer(sys.argv[1], plans[1], lambda step: ([1] * 512, [1] * 512)).close()
        break
    except Exception as error:
        print(error)
else:
    raise AssertionError("never made")
""",
        tiny_model,
    )
    assert "OpenBLAS's buffers: 132.0 MiB of memory refused" in said
