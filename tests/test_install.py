"""pip install ./python into a scratch environment: the package works from elsewhere, without the source tree's build."""
import os
import re
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment that sees this one's packages (so that no network is needed), with penstock installed into it."""
    folder = tmp_path_factory.mktemp("install")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    packages = Path(subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True, capture_output=True, text=True).stdout.strip())
    (packages / "outer.pth").write_text("\n".join([sysconfig.get_path("purelib"), *site.getsitepackages()]))
    env = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK") and k not in ("PYTHONPATH", "MAKEFLAGS", "MFLAGS")}
    env["PENSTOCK_INSTALL_BUILD"] = str(folder / "build")
    env["CUDA"] = "0"  # its build would fetch NVIDIA's wheels once more: minutes that say nothing about the package
    done = subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "--no-build-isolation", "--no-deps", "--no-index", ROOT / "python"], env=env,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return python, packages, env, folder


def test_the_installed_package_runs_from_another_folder(environment):
    python, packages, env, folder = environment
    code = ("import penstock, penstock._lib as l; print(penstock.__file__); print(l._library_path()); print(penstock.version());"
            "from penstock import *; p = Program(1, 1); p.call(0, lambda step, x: x.fill(step), writes=[Region(0, 0, 4)]);"
            "e = Engine([Space(4096)], [Stream('compute')]); r = Run(e, p.compile()); r.submit(3); r.wait(); print(e.array(Region(0, 0, 4)))")
    done = subprocess.run([python, "-c", code], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file, library, version, array = done.stdout.splitlines()
    assert Path(file).parent == packages / "penstock" and Path(library).parent == packages / "penstock/_native"
    assert re.fullmatch(r"\d+\.\d+\.\d+", version) and array == "[2. 2. 2. 2.]"


def test_the_bundled_library_needs_nothing_outside_the_package(environment):
    native = environment[1] / "penstock/_native"
    assert {"libpenstock.so", "libscipy_openblas.so", "penstock.cdef"} <= {p.name for p in native.iterdir()}
    loaded = {name: subprocess.run(["ldd", native / name], capture_output=True, text=True, check=True).stdout
              for name in ("libpenstock.so", "libscipy_openblas.so")}  # the one opens the other at its first product
    assert "not found" not in "".join(loaded.values()) and f"{native}/" in loaded["libscipy_openblas.so"]
    done = subprocess.run([environment[0], "-c", "from penstock import Hardware; Hardware.measure(seconds=0.2)"], env=environment[2], cwd=environment[3],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_installing_leaves_nothing_generated_in_the_source_tree(environment):
    assert not any((ROOT / "python" / name).exists() for name in ("penstock/_native", "build", "penstock.egg-info"))


def test_the_packages_pins_are_those_of_the_requirements():
    wanted = (ROOT / "python/requirements-runtime.txt").read_text().replace('"', "'").split("\n")
    wanted = {line for line in wanted if "==" in line and not line.startswith(("#", "scipy-openblas32"))}
    project = (ROOT / "python/pyproject.toml").read_text()
    dependencies = re.search(r"^dependencies = \[(.*?)^\]", project, re.S | re.M)[1]
    assert set(re.findall(r'"([^"]+)"', dependencies)) == wanted
    blas = re.search(r"scipy-openblas32==\S+", (ROOT / "python/requirements-runtime.txt").read_text())[0]
    assert f'"{blas}"' in project
