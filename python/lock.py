"""Writes python/requirements-*.txt from the .in files of the same names: every package that they
lead to, each version pinned and with the hashes of its wheels (glibc Linux, x86-64 and aarch64,
CPython 3.10 to 3.14; no source packages).

    make lock

uv resolves; what was locked before stays, unless a .in file or an argument (--upgrade,
--upgrade-package NAME) says otherwise.
"""

import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import tomllib
from packaging.markers import Marker

HERE = Path(__file__).resolve().parent
OLDEST = "3.10.2"
PYTHONS, MACHINES = ["3.10.2", "3.11.0", "3.12.0", "3.13.0", "3.14.0"], ["x86_64", "aarch64"]
PLATFORM = re.compile(r"-(any|[\w.]*manylinux[\w.]*_(x86_64|aarch64))\.whl$")
INTERPRETER = re.compile(
    r"-(py3|py2\.py3|cp3[\w.]*-abi3|cp31[0-4]-cp31[0-4]|cp3\d*-none|py3[\w.]*)-"
)
# Lists of direct requirements alone: of these wheels we take headers and libraries, and they would
# bring compilers and more. Of smollm2 we take the weights, and oldest lies in front of test.
ALONE = {"cuda12", "cuda13", "cudnn12", "cudnn13", "oldest", "smollm2"}
# What torch needs, but not in its builds without CUDA: a list of its own, which the Makefile
# installs after a look at the torch that came.
TORCH_CUDA = re.compile(r"(nvidia|cuda|triton)\b")


def resolve(source, name, options):
    """What uv finds for the .in file, as pylock.toml lists it."""
    compile_it = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", OLDEST]
    compile_it += ["--no-deps"] if name in ALONE else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / f"pylock.{name}.toml"
        if name in ("runtime", "export", "log"):  # a package has one version in these and in test
            kept = HERE / "requirements-test.txt"
        else:  # what uv would write over the list as it is
            kept = Path(folder) / "kept.txt"
            lists = [name, "torch"] if name == "test" else [name]
            kept.write_text("".join((HERE / f"requirements-{n}.txt").read_text() for n in lists))
            subprocess.run([*compile_it, *options, "-o", kept, source], check=True)
        subprocess.run([*compile_it, "--constraints", kept, "-o", out, source], check=True)
        return tomllib.loads(out.read_text())["packages"]


def applies(marker):
    environments = (
        {
            "python_version": p.rpartition(".")[0],
            "python_full_version": p,
            "platform_machine": m,
            "sys_platform": "linux",
            "platform_system": "Linux",
            "os_name": "posix",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
        }
        for p, m in itertools.product(PYTHONS, MACHINES)
    )
    return not marker or any(Marker(marker).evaluate(e) for e in environments)


def lines(package):
    wheels = {w["url"].rpartition("/")[2]: w["hashes"]["sha256"] for w in package.get("wheels", [])}
    hashes = {h for name, h in wheels.items() if PLATFORM.search(name) and INTERPRETER.search(name)}
    if not hashes:
        sys.exit(
            f"lock: {package['name']} {package['version']} has no wheel for the platforms that are locked"
        )
    marker = f" ; {package['marker']}" if "marker" in package else ""
    return " \\\n".join(
        [
            f"{package['name']}=={package['version']}{marker}",
            *(f"    --hash=sha256:{h}" for h in sorted(hashes)),
        ]
    )


def write(name, source, packages):
    text = f"# From {source.name} by make lock.\n" + "".join(lines(p) + "\n" for p in packages)
    (HERE / f"requirements-{name}.txt").write_text(text)


def main():
    for source in sorted(
        HERE.glob("requirements-*.in"), key=lambda p: p.stem != "requirements-test"
    ):
        name = source.stem.removeprefix("requirements-")
        (HERE / f"requirements-{name}.txt").touch()
        packages = [p for p in resolve(source, name, sys.argv[1:]) if applies(p.get("marker"))]
        if name == "test":
            write("torch", source, [p for p in packages if TORCH_CUDA.match(p["name"])])
            packages = [p for p in packages if not TORCH_CUDA.match(p["name"])]
        write(name, source, packages)


main()
