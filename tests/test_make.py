"""The Makefile: what its targets run and when they build again."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / os.environ.get("PENSTOCK_BUILD", "build")


def test_long_tests_run_only_when_asked_for(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.long\ndef test_long(): pass\ndef test_short(): pass\n"
    )
    for options, wanted in (([], {"test_short"}), (["-m", "long"], {"test_long"})):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-c",
                ROOT / "pytest.ini",
                "--collect-only",
                "-q",
                *options,
                tmp_path,
            ],
            capture_output=True,
            text=True,
        )
        assert {
            line.split("::")[1] for line in done.stdout.splitlines() if "::" in line
        } == wanted, done.stdout + done.stderr
    dry = subprocess.run(
        ["make", "-s", "-n", "CUDA=0", "test-long"], cwd=ROOT, capture_output=True, text=True
    )
    assert "pytest -q -m long" in dry.stdout, dry.stdout + dry.stderr


def test_a_files_tests_share_a_process_of_pytest_xdist(request):
    """Each process would make a file's fixtures anew: a third of the time of `make test`."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("not run by pytest-xdist with --dist loadgroup")
    assert request.node.nodeid.endswith("@test_make.py")


def make(*arguments, cwd=ROOT, **environment):
    return subprocess.run(
        ["make", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("variable", ["BUILD", "VENV", "VENV_TEST"])
def test_a_build_folder_with_a_space_is_refused_in_one_sentence(variable, tmp_path):
    done = make("CUDA=0", f"{variable}={tmp_path}/a b", "lib")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert f'{variable}="{tmp_path}/a b" has a space in it' in done.stderr


def test_an_openblas_that_is_not_there_is_one_sentence(tmp_path):
    """Headers that the compiler does not find, here because it looks nowhere; and a Python without
    the wheel."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    for settings, sentence in (
        (["BLAS=system", "CPPFLAGS=-nostdinc"], "BLAS=system, but .* finds no cblas.h: install"),
        ([f"BLAS_PYTHON={bare}"], "has no OpenBLAS: pip install -r"),
    ):
        done = make("-s", "-j2", "CUDA=0", f"BUILD={tmp_path / 'b'}", *settings, "lib")
        lines = [x for x in done.stderr.splitlines() if not re.match(r"make: \*\*\* ", x)]
        assert done.returncode == 2 and len(lines) == 1, done.stderr
        assert re.match(f"make: .*{sentence}", lines[0])


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the sources in a folder with a space in its path, with the BLAS of the build under
    test."""
    folder = tmp_path_factory.mktemp("check out")
    for name in ("Makefile", "include", "native", "models", "python"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, folder / name)
    return folder


QUICK = ["CUDA=0", "CFLAGS=-O0", f"BLAS_PYTHON={sys.executable}", f"-j{os.cpu_count()}"]


@pytest.mark.long
def test_a_checkout_with_a_space_builds_and_a_changed_setting_builds_again(checkout):
    done = make(*QUICK, "lib", cwd=checkout)
    assert done.returncode == 0, done.stderr
    assert make(*QUICK, "-q", "lib", cwd=checkout).returncode == 0, (
        "a second make has nothing to do"
    )
    compiles = lambda *settings: len(
        re.findall(r" -c native/", make(*QUICK, *settings, "-n", "lib", cwd=checkout).stdout)
    )
    everything = compiles("CC=gcc -pipe")
    assert everything > 60 and compiles() == 0
    for setting in ("CFLAGS=-O0 -g1", "CPPFLAGS=-DX=1", "DEBUG=1", "SAN=address", "BLAS=system"):
        assert compiles(setting) == everything, setting
    link = make(*QUICK, "LDFLAGS=-Wl,-O1", "-n", "lib", cwd=checkout).stdout
    assert " -c native/" not in link and " -shared " in link and "-Wl,-O1" in link


def fake_toolkit(folder):
    """An nvcc that answers what the Makefile asks it, and compiles nothing."""
    (folder / "bin").mkdir(parents=True)
    (folder / "include").mkdir()
    (folder / "lib64").mkdir()
    nvcc = folder / "bin/nvcc"
    nvcc.write_text(f"""#!/bin/sh
case "$*" in
*--dryrun*) echo '#$ TOP={folder}' >&2 ;;
*--version*) echo 'Cuda compilation tools, release 13.0, V13.0.88' ;;
*--list-gpu-arch*) for a in 75 80 86 89 90 100 120; do echo compute_$a; done ;;
esac
""")
    nvcc.chmod(0o755)
    (folder / "bin/nvidia-smi").write_text("#!/bin/sh\necho $GPUS\n")
    (folder / "bin/nvidia-smi").chmod(0o755)
    return {"CUDA_HOME": str(folder), "PATH": f"{folder}/bin:{os.environ['PATH']}"}


def test_without_a_gpu_one_architecture_is_built_and_it_says_so(tmp_path):
    env = fake_toolkit(tmp_path / "cuda")
    codes = lambda text: set(re.findall(r"code=sm_(\d+)", text))
    build = ["-n", "CUDA=1", f"BUILD={tmp_path}/build", "lib"]
    alone = make(*build, **env).stdout
    assert (
        codes(alone) == {"80"}
        and "no GPU here: building for compute capability 8.0" in alone
        and "CUDA_ARCH=" in alone
    )
    here = make(*build, GPUS="9.0", **env).stdout
    assert codes(here) == {"90"} and "no GPU here" not in here
    asked = make(*build, "CUDA_ARCH=90 120", **env).stdout
    assert codes(asked) == {"90", "120"} and "no GPU here" not in asked
    assert codes(make(*build, "CUDA_ARCH=all", **env).stdout) == {
        "80",
        "86",
        "89",
        "90",
        "100",
        "120",
    }


def test_a_dangling_link_is_made_again(tmp_path):
    """The wheels that build/lib leads to were replaced: what linked them runs again, and takes away
    links that lead nowhere."""
    env = fake_toolkit(tmp_path / "cuda")
    (tmp_path / "cuda/include/cublasLt.h").touch()
    (tmp_path / "cuda/include/nvrtc.h").touch()
    home, build = tmp_path / "cudnn", tmp_path / "build"
    for file in (
        "include/cudnn_version.h",
        "include/cudnn_frontend.h",
        "lib/libcudnn.so.9",
        "lib/libcudnn_ops.so.9",
    ):
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).touch()
    arguments = [
        "CUDA=1",
        f"BUILD={build}",
        f"CUDNN_HOME={home}",
        f"CUDNN_FRONTEND={home}/include",
        f"{build}/cudnn/include/cudnn_frontend.h",
    ]
    links = lambda: {p.name: p.exists() for p in (build / "lib").iterdir()}
    assert make(*arguments, **env).returncode == 0 and links() == {
        "libcudnn.so.9": True,
        "libcudnn_ops.so.9": True,
    }
    assert "find_cudnn" not in make("-n", *arguments, **env).stdout
    (home / "lib/libcudnn_ops.so.9").unlink()
    assert make(*arguments, **env).returncode == 0 and links() == {"libcudnn.so.9": True}


def test_the_tests_environment_is_not_the_builds():
    dry = make("-n", "CUDA=0", "BUILD=nowhere", "test").stdout
    assert (
        "bootstrap.sh nowhere/venv python/requirements-runtime.txt" in dry
        and "bootstrap.sh nowhere/venv-test python/requirements-test.txt" in dry
    )
    assert (
        "nowhere/venv-test/bin/python -m pytest" in dry
        and "nowhere/venv python/requirements-test" not in dry
    )


def no_warnings(files):
    flags = make(
        "-n",
        "-B",
        "CUDA=0",
        "CC=gcc",
        "CFLAGS=-O3 -march=native -Werror",
        "BUILD=nowhere",
        "BLAS=system",
        "all",
    ).stdout
    commands = [
        line
        for line in flags.splitlines()
        if " -c native/" in line and re.search(r" -c (\S+)", line)[1] in files
    ]
    assert len(commands) == len(files)
    # the headers of the BLAS that this build has
    wheel = f"-I'{BUILD}/blas' -DPS_BLAS_WHEEL=1" if (BUILD / "blas").is_dir() else ""
    for command in commands:
        command = re.sub(r"-o \S+$", "-o /dev/null", command.replace("-MMD -MP", wheel))
        done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_optimized_for_this_machine_nothing_warns():
    no_warnings(
        {
            "native/kernels/cpu/attention_base.c",
            "native/kernels/cpu/attention_avx2.c",
            "native/kernels/cpu/attention_avx512.c",
            "native/model/config.c",
        }
    )


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_optimized_for_this_machine_nothing_at_all_warns():
    no_warnings(
        {str(p.relative_to(ROOT)) for p in (ROOT / "native").rglob("*.c") if "cuda" not in p.parts}
        | {"native/kernels/cuda/gemm_cache.c"}
    )
