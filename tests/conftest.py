"""What every test needs: the build products, the Python package on the path, and a tiny model with
data."""

import atexit
import ctypes
import functools
import gc
import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / os.environ.get("PENSTOCK_BUILD", "build")
os.environ["PENSTOCK_BUILD"] = str(BUILD)
sys.path.insert(0, str(ROOT / "python"))

# Under `make test` these are the outer make's, and a test that runs make would inherit them.
for variable in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "BUILD", "VENV", "VENV_TEST"):
    os.environ.pop(variable, None)
for variable in ("CUDA", "CUDA_ARCH", "FLASH_ATTN"):
    os.environ.pop(variable, None)

# PyTorch, here and in what tests start: on small matrices its threads wait for each other in loops,
# and beside another process of pytest-xdist they took 14 times the CPU of one thread.
os.environ["OMP_NUM_THREADS"] = "1"

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # transformers', in what a test reads

# A shell that starts the tests in the background leaves them SIGINT ignored, which programs
# inherit: the tests of Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's, alike


def pytest_addoption(parser):
    parser.addoption(
        "--cpu-steps",
        action="store_true",
        help="the tests of whole steps of tests/gpu on the CPU backend, too",
    )
    parser.addoption(
        "--write-golden",
        action="store_true",
        help="test_golden.py writes the files of tests/golden instead of comparing with them",
    )


# Seconds after which a process, a thread or a state that does not come counts as hanging. It does
# not measure: on a machine under load a test may take many times what it takes alone.
HANGS_S = 1200
ROOM = 2 << 30  # bytes of disk; all tests together have 0.7 GB in it at once


def pytest_configure(config):
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < ROOM and not hasattr(config, "workerinput"):
        pytest.exit(
            f"{tempfile.gettempdir()} has {free / 2**30:.1f} GiB of disk free, and the tests need "
            f"{ROOM / 2**30:.0f} GiB: make room, or set TMPDIR to a directory elsewhere",
            2,
        )
    missing = [
        str(p)
        for p in (BUILD / "lib/libpenstock.so", BUILD / "lib/penstock.cdef", BUILD / "bin/penstock")
        if not p.exists()
    ]
    if missing:
        pytest.exit(
            f"{', '.join(missing)} missing: run `make test`, or `make all native-tests` and set PENSTOCK_BUILD",
            2,
        )


@functools.cache
def preload(library):
    """The path by which LD_PRELOAD takes a library: a link, where its own has a space."""
    if " " not in str(library):
        return str(library)
    folder = Path(tempfile.mkdtemp(prefix="penstock-preload-"))
    atexit.register(shutil.rmtree, folder)
    (folder / library.name).symlink_to(library)
    return str(folder / library.name)


def gpu_missing():
    """Why tests of the GPU cannot run here; None where they can."""
    if b"cuInit" not in (BUILD / "lib/libpenstock.so").read_bytes():
        return "built without CUDA"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        return f"no CUDA driver: {e}"
    n = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(n)) or not n.value:
        return "no CUDA device"
    return None


# What takes longest, in this order: begun last, one of these would run alone at the end.
BEGUN_FIRST = [
    "test_hosts.py",
    "test_native.py",
    "test_budget.py",
    "test_hosts_plan.py",
    "test_curve.py",
    "test_disk.py",
    "test_gpus.py",
    "test_parity.py",
    "test_families.py",
    "test_hardware.py",
    "test_golden.py",
    "test_faults.py",
    "test_plan.py",
    "test_generate.py",
    "test_plan_search.py",
    "test_python_misuse.py",
    "test_cli_progress.py",
    "test_demo.py",
    "test_defaults.py",
]


def transformers_is_4():
    try:
        return version("transformers").startswith("4.")
    except PackageNotFoundError:
        return False


# No oracle in transformers 4: it has no Ministral 3 and no Gemma 4, OLMo 3's layers with windows have
# the other layers' rope_theta there, and DeepSeek's models with YaRN another loss than in 5.
OF_TRANSFORMERS_5 = re.compile(r"\[.*(ministral3|olmo3|gemma4|deepseek|qwen3_5|qwen3_next)")


# Before pytest-xdist's own hook, which reads the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items if transformers_is_4() else []:
        if item.get_closest_marker("oldest") and OF_TRANSFORMERS_5.search(item.name):
            item.add_marker(pytest.mark.skip(reason="transformers 4 is no oracle of this family"))
    rank = {name: i for i, name in enumerate(BEGUN_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))
    for item in items:
        # What of pytest-xdist's processes runs a test: a file's tests share one, for its fixtures'
        # sake, and so do all tests of the GPU. Native programs need no fixtures.
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.xdist_group("gpu"))
        elif item.path.name != "test_native.py":
            item.add_marker(pytest.mark.xdist_group(item.path.name))
    marked = [
        i for i in items if i.get_closest_marker("gpu") and i.path.name != "test_native.py"
    ]  # native programs say for themselves
    reason = gpu_missing() if marked else None
    for item in marked if reason else []:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_run(tmp_path_factory):
    """Hardware rates are measured once for a test run and kept out of the user's cache."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item):
    """A test keeps what its fixtures made until after its file's fixtures end: nothing_leaks would
    count the last test's."""
    item.funcargs.clear()


@pytest.fixture(scope="module", autouse=True)
def nothing_leaks():
    """A file's tests free what they allocate in the library, on their ways into errors too."""
    live = ctypes.CDLL(str(BUILD / "lib/libpenstock.so")).ps__live_allocations
    live.restype = ctypes.c_int64
    gc.collect()
    gc.freeze()  # what was imported: the collection below takes a fifth of a second with PyTorch's
    before = live()
    yield
    gc.collect()
    assert live() == before


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A model directory made from models/tiny-llama.json: vocabulary 512, 4 layers."""
    out = tmp_path_factory.mktemp("tiny") / "model"
    subprocess.run(
        [
            sys.executable,
            ROOT / "models/init_model.py",
            ROOT / "models/tiny-llama.json",
            out,
            "--seed",
            "1",
        ],
        check=True,
        capture_output=True,
    )
    return out


def write_shard(path, tokens, n_header=None):
    """An llm.c gpt-2 shard of uint16 tokens; n_header: what its header claims."""
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens) if n_header is None else n_header
    Path(path).write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())
    return path


@pytest.fixture(scope="session")
def tiny_shard(tmp_path_factory):
    """20,000 tokens below 200 that a model can learn: each is its predecessor plus one, restarting
    at random."""
    rng = np.random.default_rng(0)
    tokens = (np.arange(20000) + np.repeat(rng.integers(0, 200, 200), 100)) % 200
    return write_shard(tmp_path_factory.mktemp("shards") / "a.bin", tokens)


def called(main, *args, columns=140):
    """A program's main() in this process: what it would print and return."""
    out, err, words = StringIO(), StringIO(), [str(a) for a in args]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("COLUMNS", str(columns))
        patch.setattr(sys, "argv", ["penstock", *words])
        try:
            code = main(words) if inspect.signature(main).parameters else main()
        except SystemExit as refusal:
            code = refusal.code
    return subprocess.CompletedProcess(words, code or 0, out.getvalue(), err.getvalue())


def words_of_training(model, data, *more):
    """`penstock train` on them, quietly: the words behind the binary's name."""
    return [
        str(w)
        for w in ("train", "--model", model, "--data", data, "--seq-len", 64, "--quiet", *more)
    ]
