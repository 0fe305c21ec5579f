"""What can be wrong with a machine that shall train on a GPU: one sentence with the way out, exit
code 2, nothing written.

A build with CUDA is needed, a GPU is not: tests/native/driver_standin.c, compiled here, stands in
for the driver, NVML and cuBLASLt of a machine with one thing wrong. What comes behind the memory
(kernels, cuDNN) has no stand-in and is tested on GPUs."""

import ctypes
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import BUILD, HANGS_S, ROOT

LIBRARY = BUILD / "lib/libpenstock.so"
pytestmark = pytest.mark.skipif(
    b"cuGetProcAddress_v2" not in LIBRARY.read_bytes(), reason="built without CUDA"
)
CACHE_RATES = """
from penstock import Hardware
from penstock._lib import check, encode_path, lib
path = Hardware.cache_path(2, "cuda")
path.parent.mkdir(parents=True, exist_ok=True)
check(lib.ps_hardware_write(Hardware.estimate(2, "cuda")._ptr, encode_path(path)))
"""


def compiled(folder, *options):
    done = subprocess.run(
        [os.environ.get("CC", "cc"), "-shared", "-fPIC", *options, "-o", folder / "libcuda.so.1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def standin(tmp_path_factory):
    """A folder with the stand-in under the names of the libraries, and another with rates of its
    GPU: none can be measured."""
    folder, cache = tmp_path_factory.mktemp("standin"), tmp_path_factory.mktemp("rates")
    compiled(folder, ROOT / "tests/native/driver_standin.c")
    for name in ("libcublasLt.so.12", "libcublasLt.so.13", "libnvidia-ml.so.1"):
        (folder / name).symlink_to("libcuda.so.1")
    subprocess.run(
        [sys.executable, "-c", CACHE_RATES],
        check=True,
        env=environment(folder, cache) | {"PYTHONPATH": str(ROOT / "python")},
    )
    return folder, cache


def environment(libraries, cache=None, **settings):
    path = os.pathsep.join(filter(None, (str(libraries), os.environ.get("LD_LIBRARY_PATH"))))
    return (
        os.environ
        | {"LD_LIBRARY_PATH": path}
        | ({"XDG_CACHE_HOME": str(cache)} if cache else {})
        | {k: str(v) for k, v in settings.items()}
    )


def train(model, shard, cwd, env, *more, quiet=True):
    words = [
        BUILD / "bin/penstock",
        *f"train --model {model} --data {shard} --seq-len 64 --steps 1 --threads 2".split(),
        *"--backend cuda --run-dir run".split(),
        *(["--quiet"] if quiet else []),
        *more,
    ]
    return subprocess.run(
        [str(w) for w in words], capture_output=True, text=True, cwd=cwd, env=env, timeout=HANGS_S
    )


def one_sentence(done, *patterns):
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == 1 and lines[0].startswith("penstock: "), (
        done.returncode,
        done.stderr,
    )
    for pattern in patterns:
        assert re.search(pattern, lines[0]), lines[0]


def driver_here():
    try:
        return bool(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return False


@pytest.mark.skipif(driver_here(), reason="there is a CUDA driver here")
def test_no_driver(tiny_model, tiny_shard, tmp_path):
    says = r"no CUDA driver here \(libcuda\.so\.1.*\): install NVIDIA's driver, or use the cpu backend$"
    one_sentence(train(tiny_model, tiny_shard, tmp_path, os.environ), says)
    for command in (["profile"], ["plan", "--model", tiny_model, "--seq-len", "64"]):
        one_sentence(
            subprocess.run(
                [BUILD / "bin/penstock", *command, "--backend", "cuda"],
                capture_output=True,
                text=True,
            ),
            says,
        )
    assert list(tmp_path.iterdir()) == []


def test_a_driver_before_12_0(tiny_model, tiny_shard, tmp_path):
    (tmp_path / "old.c").write_text("int cuInit(unsigned flags) { return 0; }\n")
    folder = compiled(tmp_path, tmp_path / "old.c")
    one_sentence(
        train(tiny_model, tiny_shard, tmp_path, environment(folder)),
        r"older than 12\.0.*update NVIDIA's driver, or build with an older toolkit$",
    )


# what is wrong, more options, what is said
WRONG = {
    "driver-too-old": (
        {"STANDIN_VERSION": 11080},
        [],
        r"driver here supports CUDA 11\.8, this library was built for 1\d\.\d.*: update NVIDIA's driver, or "
        r"build with the driver's toolkit$",
    ),
    "no-usable-gpu": (
        {"STANDIN_INIT": 100},
        [],
        r"no usable GPU \(CUDA_ERROR_NO_DEVICE.*nvidia-smi and CUDA_VISIBLE_DEVICES, or use the cpu backend$",
    ),
    "too-few-gpus": (
        {},
        ["--gpus", 2],
        r"--gpus 2: 2 GPUs are asked for, from GPU 0 on, and 1 are visible: give fewer, or look",
    ),
    "gpu-and-gpus": (
        {"STANDIN_GPUS": 2},
        ["--gpus", 2, "--gpu", 1],
        r"--gpu 1 and --gpus 2 exclude each other",
    ),
    "gpus-of-two-models": (
        {"STANDIN_GPUS": 3, "STANDIN_OTHER": 1},
        ["--gpus", 3],
        r"--gpus 3: GPU 0 is a .*, and GPU 1 a .*: GPUs that train together must be of one model",
    ),
    "no-memory-to-pin-for-two": (
        {"STANDIN_GPUS": 2, "STANDIN_PIN": 2},
        ["--gpus", 2],
        r"pinning stopped at",
    ),
    "no-gpu": ({"STANDIN_GPUS": 0}, [], r"GPU 0 is asked for, 0 visible: look at nvidia-smi"),
    "no-such-gpu": ({}, ["--gpu", 3], r"GPU 3 is asked for, 1 visible: look at nvidia-smi"),
    "before-ampere": (
        {"STANDIN_CAPABILITY": 75},
        [],
        r"compute capability 7\.5, bf16 needs 8\.0 or newer: take another GPU \(--gpu\), or the cpu backend$",
    ),
    "memory-used-by-others": (
        {"STANDIN_USED_GIB": 79},
        [],
        r"needs .* of device memory, this GPU has 1\.0+ GiB that nothing else uses: end what else uses it",
    ),
    "no-memory-for-a-context": (
        {"STANDIN_CONTEXT": 2},
        [],
        r"GPU 0 has no memory left for a context: end what else uses it$",
    ),
    "memory-taken-meanwhile": (
        {"STANDIN_ALLOC": 2},
        [],
        r"of GPU memory .*refused.*: lower --device-mem, or end what else uses this GPU$",
    ),
    "pinning-refused": (
        {"STANDIN_PIN": 2},
        [],
        r"pinning stopped at 0 B of .* of host memory \(CUDA_ERROR_OUT_OF_MEMORY; locked memory is limited to .*\): "
        r"raise the limit \(ulimit -l.*, or state by --pinned-mem what can be pinned$",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_one_thing_is_wrong(standin, tiny_model, tiny_shard, tmp_path, case):
    settings, options, says = WRONG[case]
    one_sentence(
        train(tiny_model, tiny_shard, tmp_path, environment(*standin, **settings), *options), says
    )
    assert list(tmp_path.iterdir()) == []


def test_the_cpu_is_not_taken_in_silence(standin, tiny_model):
    """Where there is a driver that cannot be used, --backend auto says so; asked for, the cpu needs
    no word."""
    plan = [
        BUILD / "bin/penstock",
        *f"plan --model {tiny_model} --seq-len 64 --threads 2".split(),
    ]
    env = environment(*standin, STANDIN_VERSION=11080)
    said, silent = (
        subprocess.run([*plan, *more], capture_output=True, text=True, env=env, timeout=HANGS_S)
        for more in ([], ["--backend", "cpu"])
    )
    assert said.returncode == silent.returncode == 0
    assert (
        re.search(
            r"^penstock: training on the CPU, as no GPU can be used: .*driver here supports CUDA 11\.8",
            said.stderr,
            re.M,
        )
        and "no GPU" not in silent.stderr
    )
    code = "import warnings; warnings.simplefilter('error'); from penstock import Hardware; Hardware.estimate(2, %r)"
    for backend, word in (
        ("auto", "no GPU can be used: the CUDA driver here supports CUDA 11.8"),
        ("cpu", ""),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code % backend],
            capture_output=True,
            text=True,
            env=env | {"PYTHONPATH": str(ROOT / "python")},
        )
        assert word in done.stderr and (done.returncode == 0) == (not word), done.stderr


def test_a_gpu_that_the_library_has_no_code_for(standin, tiny_model, tiny_shard, tmp_path):
    done = train(
        tiny_model,
        tiny_shard,
        tmp_path,
        environment(*standin, STANDIN_CAPABILITY=80, STANDIN_PIN=2),
    )
    if "pinning" in done.stderr:  # nothing is wrong before that
        pytest.skip("this library was built for 8.0 too")
    one_sentence(
        done,
        r'GPU 0 has compute capability 8\.0, this library was built for CUDA_ARCH="[\d ]+": build it with make CUDA_ARCH=80$',
    )


def test_a_gpu_newer_than_the_library_is_taken(standin, tiny_model, tiny_shard, tmp_path):
    """By the PTX of the newest architecture: what is refused then comes after it."""
    one_sentence(
        train(
            tiny_model,
            tiny_shard,
            tmp_path,
            environment(*standin, STANDIN_CAPABILITY=150, STANDIN_PIN=2),
        ),
        "pinning stopped",
    )


def test_the_sensors_come_through_the_library(standin):
    """Those of each GPU; of one that is not there none."""
    code = "from penstock import Hardware; print(*map(Hardware.gpu_state, (0, 1, 2)), sep='\\n')"
    power = "685500,700000,1"
    env = environment(standin[0], STANDIN_GPUS=2, STANDIN_CLOCK=1410, STANDIN_POWER=power)
    env["STANDIN_ENERGY"] = "9000,7000,1"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=env | {"PYTHONPATH": str(ROOT / "python")},
    )
    first = {"clock_mhz": 1410.0, "power_w": 685.5, "temperature_c": 0.0, "energy_j": 9.0}
    second = {"clock_mhz": 0.0, "power_w": 700.0, "temperature_c": 0.0, "energy_j": 7.0}
    assert done.stdout.splitlines() == [str(first), str(second), str(dict.fromkeys(first, 0.0))]


@pytest.mark.skipif(driver_here(), reason="there is NVML here")
def test_a_missing_nvml_is_said(standin, tiny_model, tiny_shard, tmp_path):
    libraries = tmp_path / "libraries"
    shutil.copytree(standin[0], libraries, symlinks=True)
    (libraries / "libnvidia-ml.so.1").unlink()
    for folder, missing in ((standin[0], False), (libraries, True)):
        env = environment(folder, standin[1], STANDIN_PIN=2)
        done = train(tiny_model, tiny_shard, tmp_path, env, quiet=False)
        assert "pinning stopped" in done.stderr
        assert ("NVML (libnvidia-ml.so.1) does not show GPU 0" in done.stderr) == missing, done


@pytest.mark.gpu
def test_neither_cudnn_nor_flash_attn(tiny_model, tiny_shard, tmp_path):
    if re.search(rb"flash-attn(-4)?\0", LIBRARY.read_bytes()):
        pytest.skip("built with FLASH_ATTN")
    subprocess.run(
        [BUILD / "bin/penstock", *"profile --backend cuda --threads 2 --seconds 1".split()],
        check=True,
        capture_output=True,
    )
    done = train(
        tiny_model,
        tiny_shard,
        tmp_path,
        os.environ | {"PENSTOCK_CUDNN": "/nonexistent/libcudnn.so.9"},
    )
    one_sentence(
        done,
        r"nothing here computes attention.*pip install -U nvidia-cudnn-cu1\d",
        r"PENSTOCK_CUDNN\), or build with FLASH_ATTN=1$",
    )
    assert list(tmp_path.iterdir()) == []
