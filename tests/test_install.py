"""pip install ./python and make wheel: the package works from elsewhere, without the source tree's
build. And what pip may fetch."""

import os
import platform
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import BUILD, gpu_missing
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ["python", "include", "native", "Makefile", "LICENSE"]


# A compiler that takes the object of this build where CUDA does not change the source's meaning: to
# compile the library once more would take a minute.
COMPILER = f"""#!/bin/sh
source=$(echo "$*" | sed -n 's/.* -c \\([^ ]*\\) -o .*/\\1/p')
for out; do :; done
object="{BUILD}/obj/${{out#*/obj/}}"
if [ -f "$object" ] && [ "$source" ] && ! grep -q 'PS_CUDA\\|/row.h"\\|/list.h"' "$source"; then
  exec cp "$object" "$out"
fi
exec cc "$@"
"""


@pytest.fixture(
    scope="module",
    params=["with this build's objects", pytest.param("compiled", marks=pytest.mark.long)],
)
def environment(request, tmp_path_factory):
    """A virtual environment that sees this one's packages (so that no network is needed), with
    penstock installed into it. It and the source tree, a copy, lie in a folder with a space in its
    name."""
    folder = tmp_path_factory.mktemp("in stall")
    for name in SOURCES:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(
            ROOT / name, folder / "source" / name
        )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    packages = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    (packages / "outer.pth").write_text(
        "\n".join([sysconfig.get_path("purelib"), *site.getsitepackages()])
    )
    env = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("PENSTOCK") and k not in ("PYTHONPATH", "MAKEFLAGS", "MFLAGS")
    }
    # With CUDA its build would fetch NVIDIA's wheels once more. With -O2, or with vector code for
    # every instruction set, it would take twice as long, and -O0 makes the most code of all:
    # minutes that say nothing about the package.
    env |= {"CUDA": "0", "CFLAGS": "-O1", "CPPFLAGS": "-DPS_BASELINE=1"}
    if request.param != "compiled":
        compiler = tmp_path_factory.mktemp("cc") / "cc"
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        env |= {"CC": str(compiler)}
    options = ["--no-build-isolation", "--no-deps", "--no-index"]
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "wheel", *options, "-w", folder / "dist", folder / "source/python", env=env)
    run(*pip, "install", *options, *(folder / "dist").glob("*.whl"), env=env)
    return python, packages, env, folder


def run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def compiled(command, program):
    """Compile a C program against the library of this build, and run it."""
    command = command.replace("$PWD/build/", f"{BUILD}/").replace("-Lbuild/", f"-L'{BUILD}'/")
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return subprocess.run([program], capture_output=True, text=True)


def page_commands(compiler):
    page = (ROOT / "docs/own-kernel.md").read_text().replace("\\\n", "")
    return [line for line in page.splitlines() if line.startswith(compiler)]


def test_the_program_at_the_head_of_engine_h_links_and_runs(tmp_path):
    manual = (ROOT / "include/penstock/engine.h").read_text()
    example = manual.split(" * Example:")[1].split(" * Memory:")[0].splitlines()
    source, program = tmp_path / "example.c", tmp_path / "example"
    source.write_text("\n".join(line[5:] for line in example if line.startswith(" *   ")))
    done = compiled(
        f"gcc -Wall -Wextra -Iinclude {source} -o {program} -Lbuild/lib -lpenstock"
        ' -Wl,-rpath,"$PWD/build/lib"',
        program,
    )
    assert (done.returncode, done.stdout) == (0, "10\n"), done.stderr


def test_the_kernel_of_the_docs_links_and_runs_on_cpus(tmp_path):
    (command,) = page_commands("gcc")
    program = tmp_path / "stream_array"
    done = compiled(command.replace("-o stream_array", f"-Wall -o {program}"), program)
    assert (done.returncode, done.stdout) == (0, "10 steps, 0 elements wrong\n"), done.stderr


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc here")
def test_the_kernel_of_the_docs_is_compiled_for_a_gpu(tmp_path):
    (command,) = page_commands("nvcc")
    program = tmp_path / "stream_array"
    command = command.replace("-o stream_array_cuda", f"-o {program}").replace("native", "sm_90")
    done = compiled(command, program)
    why = gpu_missing()
    if why:
        assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1, done
        pytest.skip(f"compiled, not run: {why}")
    assert (done.returncode, done.stdout) == (0, "10 steps, 0 elements wrong\n"), done.stderr


def test_the_installed_package_runs_from_another_folder(environment):
    python, packages, env, folder = environment
    code = (
        "import penstock, penstock._lib as l; print(penstock.__file__); print(l._library_path()); print(penstock.version());"
        "from penstock import *; p = Program(1, 1); p.call(0, lambda step, x: x.fill(step), writes=[Region(0, 0, 4)]);"
        "e = Engine([Space(4096)], [Stream('compute')]); r = Run(e, p.compile()); r.submit(3); r.wait(); print(e.array(Region(0, 0, 4)))"
    )
    done = subprocess.run([python, "-c", code], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file, library, version, array = done.stdout.splitlines()
    assert (
        Path(file).parent == packages / "penstock"
        and Path(library).parent == packages / "penstock/_native"
    )
    assert re.fullmatch(r"\d+\.\d+\.\d+", version) and array == "[2. 2. 2. 2.]"


def test_the_bundled_library_needs_nothing_outside_the_package(environment):
    native = environment[1] / "penstock/_native"
    assert {"libpenstock.so", "libscipy_openblas.so", "penstock.cdef"} <= {
        p.name for p in native.iterdir()
    }
    loaded = {
        name: subprocess.run(
            ["ldd", native / name], capture_output=True, text=True, check=True
        ).stdout
        for name in ("libpenstock.so", "libscipy_openblas.so")
    }  # the one opens the other at its first product
    assert (
        "not found" not in "".join(loaded.values())
        and f"{native}/" in loaded["libscipy_openblas.so"]
    )
    done = subprocess.run(
        [environment[0], "-c", "from penstock import Hardware; Hardware.measure(seconds=0.2)"],
        env=environment[2],
        cwd=environment[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_package_has_the_command_penstock(environment, tiny_model, tiny_shard, tmp_path):
    python, packages, env, folder = environment
    for command in ([python.parent / "penstock"], [python, "-m", "penstock"]):
        done = subprocess.run(
            [*command, "version"], cwd=folder, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0 and done.stdout.startswith("penstock "), done.stderr
        assert (
            subprocess.run(
                [*command, "no-such-command"], cwd=folder, env=env, capture_output=True
            ).returncode
            == 2
        )
    train(python.parent / "penstock", tiny_model, tiny_shard, tmp_path, env)


def train(program, model, shard, out, env):
    """Two steps on the CPU."""
    done = subprocess.run(
        [
            program,
            *f"train --model {model} --data {shard} --run-dir {out}/run --out {out}/out".split(),
            *"--backend cpu --seq-len 64 --tokens-per-step 128 --steps 2".split(),
        ],
        cwd=out,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and (out / "out/model.safetensors").exists(), (
        done.stdout + done.stderr
    )


def test_installing_leaves_nothing_generated_in_the_source_tree(environment):
    assert not any(
        (environment[3] / "source/python" / name).exists()
        for name in ("penstock/_native", "build", "penstock.egg-info")
    )


def test_make_install_puts_one_command_on_path_and_uninstall_takes_it_away(environment, tmp_path):
    _, packages, env, folder = environment
    prefix, nothing, elsewhere = tmp_path / "pre fix", tmp_path / "none.txt", tmp_path / "else"
    nothing.touch()
    (elsewhere / "penstock").mkdir(parents=True)  # no package of this name in the folder counts
    (elsewhere / "penstock/__init__.py").write_text("raise SystemExit('the wrong package')")
    install = ["sh", ROOT / "python/install.sh"]
    (file,) = (folder / "dist").glob("*.whl")
    run(*install, prefix, "", file, sys.executable, nothing, env=env, cwd=ROOT)
    (site_packages,) = (prefix / "lib/penstock/lib").glob("python3*/site-packages")
    shutil.copy(packages / "outer.pth", site_packages)
    env = env | {"PATH": f"{prefix}/bin:{env['PATH']}"}
    for command, says in (("version", "penstock 0."), ("data", "--out"), ("train", "--model")):
        assert says in run("penstock", command, "--help", env=env, cwd=elsewhere), command
    flags = f"-I'{prefix}/include' -L'{prefix}/lib/penstock/native' -lpenstock"
    flags += f" -Wl,-rpath,'{prefix}/lib/penstock/native'"
    program = tmp_path / "stream_array"
    run("sh", "-c", f"cc '{ROOT}/docs/stream_array.c' -o '{program}' {flags}", env=env)
    assert run(program, env=env) == "10 steps, 0 elements wrong\n"
    run(*install, "--remove", prefix, "", env=env)
    assert not [p for p in prefix.rglob("*") if not p.is_dir()]


@pytest.mark.parametrize("case", ["relative", "not ours"])
def test_make_install_refuses_where_it_should_not_write(tmp_path, case):
    prefix = tmp_path if case == "not ours" else "some/where"
    (tmp_path / "lib/penstock").mkdir(parents=True)
    (tmp_path / "lib/penstock/mine").touch()
    done = make_with(tmp_path, "", "uninstall", f"PREFIX={prefix}", dry=False)
    says = "is not what make install writes" if case == "not ours" else "is no whole path"
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert (tmp_path / "lib/penstock/mine").exists()


def test_make_install_gives_the_environment_what_the_build_needs(tmp_path):
    said = make_with(tmp_path, "9.0", "install", "PREFIX=/some where", "DESTDIR=/stage").stdout
    line = said.replace("\\\n", "").split("python/install.sh ")[1].splitlines()[0]
    assert line.startswith('"/some where" "/stage" ') and line.split()[-2:] == [
        "python/requirements-runtime.txt",
        "python/requirements-cudnn13.txt",
    ]


def test_the_dockerfile_copies_and_builds_what_is_there():
    """It copies what an installed package is built from, and its command is one that make takes."""
    text = (ROOT / "python/Dockerfile").read_text().replace("\\\n", "")
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (?!--)(.*)$", text, re.M)]
    assert sorted(sum(copied, [])) == sorted(SOURCES)
    (command,) = re.findall(r"^RUN make (.*)$", text, re.M)
    variables = {word.split("=")[0] for word in command.split() if "=" in word}
    help_text = run("make", "-s", "help", cwd=ROOT)
    assert "make install " in help_text and all(
        f"  {v}" in help_text for v in variables - {"PREFIX"}
    )
    assert f"COPY --from=build {re.search('PREFIX=([^ ]+)', command)[1]} " in text
    assert "USER penstock" in text and not re.findall(
        r"_IMAGE=\S+:latest|_IMAGE=[^:]*$", text, re.M
    )


PYPROJECT = (ROOT / "python/pyproject.toml").read_text()


def listed(name):
    """The requirements of a list in pyproject.toml (Python 3.10 has no reader for it)."""
    return [
        Requirement(r)
        for r in re.findall(
            r'"([^"]+)"', re.search(rf"^{name} = \[(.*?)\]$", PYPROJECT, re.S | re.M)[1]
        )
    ]


def locked(name):
    """The versions that requirements-<name>.txt pins, by package."""
    pins = {}
    for line in (ROOT / f"python/requirements-{name}.txt").read_text().splitlines():
        if pin := re.match(r"([\w.-]+)==([\w.+]+)", line):
            pins.setdefault(pin[1].lower(), []).append(pin[2])
    return pins


def make_with(tmp_path, capability, *words, dry=True):
    """`make -n` beside a toolkit and a driver that are scripts. capability: of the GPU, "": none."""
    gpu = f"echo {capability}" if capability else "exit 9"
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "include").mkdir(exist_ok=True)
    (tmp_path / "include/cuda_runtime_api.h").write_text("cudaLibraryLoadData")
    nvcc = f"""case "$*" in
*--dryrun*) echo '#$ TOP={tmp_path}' >&2 ;;
*--list-gpu-arch*) for a in 80 89 90 100 120; do echo compute_$a; done ;;
*) echo release 13.0, ;;
esac"""
    for name, says in (("nvcc", nvcc), ("nvidia-smi", gpu)):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    build, path = tmp_path / "build", f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    words = ["make", *["-n"] * dry, *words, f"BUILD={build}", f"VENV={build}/venv", "CUDA=auto"]
    words += [f"CUDA_HOME={tmp_path}"]
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PATH": path}
    )


@pytest.mark.parametrize("target", ["demo", "demo-chat"])
def test_a_demo_without_a_gpu_is_built_for_the_cpu_beside_other_builds(tmp_path, target):
    build, done = tmp_path / "build", make_with(tmp_path, "", target)
    assert done.returncode == 0 and done.stdout.startswith("no GPU here: the demo is built for")
    assert f"{build}/cpu/obj/native/core/file.o" in done.stdout and "PS_CUDA" not in done.stdout
    assert f"bootstrap.sh {build}/venv python/requirements-runtime.txt" in done.stdout
    assert "requirements-cuda" not in done.stdout and f"{build}/obj" not in done.stdout


@pytest.mark.parametrize(
    "capability, chosen",
    [("9.0", "4"), ("8.9", "1"), ("12.0", "1"), ("10.0", "0"), ("", None)],
)
def test_attention_is_built_for_the_gpu_that_is_here(tmp_path, capability, chosen):
    if platform.machine() != "x86_64":
        pytest.skip("flash-attn-4 is compiled on x86-64 alone")
    done = make_with(tmp_path, capability, "lib")
    said = re.search(r'attention for the GPU here .*: FLASH_ATTN="([^"]*)"', done.stdout)
    assert done.returncode == 0 and (said[1] if said else None) == chosen, done.stderr
    assert ("-DPS_FLASH4=1" in done.stdout) == (chosen == "4")
    assert ("-DPS_FLASH_ATTN=1" in done.stdout) == (chosen == "1")


def test_a_build_for_all_gpus_has_attention_for_each(tmp_path):
    """flash-attn has machine code for 8.x and 12.x, and leaves 9.0 and 10.0 to cuDNN."""
    if platform.machine() != "x86_64":
        pytest.skip("flash-attn-4 is compiled on x86-64 alone")
    said = make_with(tmp_path, "", "lib", "CUDA_ARCH=all").stdout
    assert 'attention for all GPUs: FLASH_ATTN="1 4"' in said and "-DPS_FLASH4=1" in said
    (kernels,) = [
        line for line in said.splitlines() if "-DPS_FLASH_DIM=64" in line and "fwd" in line
    ]
    assert re.findall(r"code=(\w+)", kernels) == ["sm_80", "sm_120", "compute_120"]
    assert "-DPS_FLASH_ARCH='\"80 120\"'" in said


@pytest.mark.parametrize("jobs, waiting", [(1, 3), (2, 2), (3, 1), (4, 0), (16, 0)])
def test_as_many_of_flash_attns_kernels_compile_at_once_as_asked(tmp_path, jobs, waiting):
    words = ["-p", "lib", "FLASH_ATTN=1", "CUDA_ARCH=80", f"FLASH_JOBS={jobs}"]
    kernel = r"/flash/(?:fwd|bwd)_\d+\.o"
    said = make_with(tmp_path, "", *words).stdout
    rules = re.findall(rf"^\S+{kernel}: .*\|.*{kernel}", said, re.M)
    assert len(re.findall(rf"^\S+{kernel}: .*\|", said, re.M)) == 4 and len(rules) == waiting


@pytest.mark.parametrize(
    "name, lock",
    [
        ("dependencies", "runtime"),
        ("dependencies", "test"),
        ("compare", "test"),
        ("gguf", "export"),
        ("cuda13", "cudnn13"),
        ("cuda12", "cudnn12"),
    ],
)
def test_what_is_locked_lies_in_the_packages_ranges(name, lock):
    for requirement in listed(name):
        versions = locked(lock)[requirement.name]
        assert versions and all(requirement.specifier.contains(v) for v in versions), requirement


def test_the_lower_ends_of_the_ranges_are_what_make_test_oldest_installs():
    lowest = {r.name: s.version for name in ("dependencies", "compare", "gguf")
              for r in listed(name) for s in r.specifier if s.operator == ">="}  # fmt: skip
    oldest = locked("oldest")
    checked = [name for name in lowest if name in oldest]
    assert {*checked} == {"transformers", "tokenizers", "gguf", "jinja2"}
    assert all(Version(lowest[name]) == Version(oldest[name][0]) for name in checked)


def test_the_package_is_built_with_what_is_locked():
    wanted = re.findall(
        r'"([\w-]+)==([\w.]+)"', re.search(r"^requires = (.*)$", PYPROJECT, re.M)[1]
    )
    assert len(wanted) == 2 and all(
        (locked("wheel") | locked("runtime"))[name] == [version] for name, version in wanted
    )


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "python").glob("requirements-*.txt")),
    ids=lambda p: p.stem.removeprefix("requirements-"),
)
def test_every_download_is_pinned_with_hashes(path):
    text = re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", path.read_text(), flags=re.M))
    for line in text.splitlines():
        assert re.fullmatch(
            r"-r requirements-\S+\.txt|[\w.-]+==[\w.+]+( ?;[^#]+?)?( +--hash=sha256:[0-9a-f]{64})+",
            line,
        ), line[:100]


def test_nothing_without_a_hash_is_installed(tmp_path):
    (tmp_path / "venv/bin").mkdir(parents=True)
    for name in ("pip", "python"):
        (tmp_path / "venv/bin" / name).write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n')
        (tmp_path / "venv/bin" / name).chmod(0o755)
    subprocess.run(
        [
            "sh",
            ROOT / "python/bootstrap.sh",
            tmp_path / "venv",
            "requirements-some.txt",
            sys.executable,
        ],
        check=True,
        capture_output=True,
    )
    asked = (tmp_path / "asked").read_text().split()
    assert {"install", "--require-hashes", "--no-deps"} <= set(asked) and asked[-2:] == [
        "-r",
        "requirements-some.txt",
    ]


# ---- with the network: a wheel, and new environments ---------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    env = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("PENSTOCK") and k not in ("PYTHONPATH", "MAKEFLAGS", "MFLAGS")
    }
    run(
        "make",
        "-s",
        "-C",
        ROOT,
        "CUDA=0",
        f"PYTHON={sys.executable}",
        f"BUILD={folder}/build",
        f"-j{os.cpu_count()}",
        "wheel",
        env=env,
    )
    return next((folder / "build/dist").glob("*.whl"))


LOWEST = {
    r.name: min(s.version for s in r.specifier if s.operator == ">=")
    for r in listed("dependencies")
}


@pytest.mark.long
@pytest.mark.parametrize(
    "pins",
    [[f"{n}=={v}" for n, v in LOWEST.items()], ["--upgrade"], ["transformers"]],
    ids=["lowest", "newest", "with-transformers"],
)
def test_a_new_environment_installs_the_wheel_and_trains(
    wheel, pins, tiny_model, tiny_shard, tmp_path
):
    """With every dependency at the lowest version of its range, at the newest, and beside the
    newest transformers."""
    assert re.fullmatch(r"penstock-[\d.]+-py3-none-manylinux_2_\d+_\w+\.whl", wheel.name)
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python, env = (
        tmp_path / "venv/bin/python",
        {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK") and k != "PYTHONPATH"},
    )
    env["PATH"] = f"{tmp_path}/venv/bin:/nowhere"  # no compiler, no make
    run(python, "-m", "pip", "install", "-q", "--only-binary", ":all:", wheel, *pins, env=env)
    train(tmp_path / "venv/bin/penstock", tiny_model, tiny_shard, tmp_path, env)
    (tmp_path / "text.txt").write_text("One line of text.\n" * 2000)
    run(
        python,
        "-m",
        "penstock.data",
        tmp_path / "text.txt",
        "--train-tokenizer",
        300,
        "--out",
        tmp_path / "data",
        env=env,
    )
    run(
        python,
        "-m",
        "penstock.plot",
        tmp_path / "run/metrics.jsonl",
        tmp_path / "loss.png",
        env=env,
    )
    run(python, ROOT / "python/examples/dataflow.py", env=env)
    if pins == ["transformers"]:
        run(
            python,
            "-c",
            "import transformers, penstock; from transformers import AutoTokenizer",
            env=env,
        )
