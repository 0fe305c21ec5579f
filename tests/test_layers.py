"""The layer order of docs/design/README.md, "Layers", against the #include lines, and the files of native/
that need each other in a circle, by their linker symbols."""

import os
import pathlib
import re
import subprocess

import pytest
from conftest import BUILD

ROOT = pathlib.Path(__file__).resolve().parent.parent

# What each layer may include besides itself, its public headers apart.
ORDER = [
    ["core"],
    ["engine"],
    ["kernels"],
    ["backends"],
    ["optim"],
    ["model"],
    ["hardware"],
    ["step"],
    ["generate"],
    ["plan"],
    ["train"],
    ["cli"],
]
ALLOWED = {
    name: {left for level in ORDER[:i] for left in level}
    for i, level in enumerate(ORDER)
    for name in level
}
ALLOWED["io"] = ALLOWED["hosts"] = {"core"}
# The step as a program is the same on every machine: it knows no rates and no backend.
ALLOWED["step"] -= {"hardware", "backends"}
ALLOWED["plan"] -= {"backends"}  # it knows a machine by its rates
ALLOWED["model"] |= {"io"}  # adapters on disk
ALLOWED["generate"] |= {"io"}  # weights that a file has in blocks
ALLOWED["plan"] |= {"hosts"}  # what sums over hosts take
ALLOWED["backends"] |= {"hosts"}  # lanes of a device for NCCL
ALLOWED["train"] |= {"hosts", "io"}
ALLOWED["cli"] = ALLOWED["api"] = set()  # the public headers are all they need

# Circles that are left: each is a set of files that need one another. There is none.
CIRCLES = {}

CUDA = re.compile(
    r"^(cuda|cublas|cudnn|nccl|nvrtc|nvtx|nvml|nvToolsExt|driver_types|cooperative_groups)", re.I
)
BLAS = re.compile(r"blas|lapack", re.I)
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)


def breaches(root):
    """Every #include line under root/native and root/include that the order forbids, in words."""
    found = []
    native = root / "native"
    for path in sorted(
        p for p in native.rglob("*") if p.suffix in (".c", ".h", ".cu", ".cuh", ".cpp", ".hpp")
    ):
        parts = path.relative_to(native).parts
        layer, cuda_place = parts[0], len(parts) > 2 and parts[1] == "cuda"
        where = path.relative_to(root).as_posix()
        if layer not in ALLOWED:
            found.append(f"{where}: {layer} is no layer")
            continue
        for kind, name in INCLUDE.findall(path.read_text()):
            if CUDA.match(name):
                if not (layer in ("backends", "kernels", "optim") and cuda_place):
                    found.append(f"{where}: a CUDA header, {name}")
            elif kind == "<":
                if BLAS.search(name) and layer != "kernels":
                    found.append(f"{where}: {name} belongs to kernels")
                elif name.startswith("penstock/") and not (root / "include" / name).exists():
                    found.append(f"{where}: there is no <{name}>")
            elif not BLAS.search(name):
                found += check_own(root, path, layer, name, where)
    for path in sorted((root / "include").rglob("*.h")):
        for kind, name in INCLUDE.findall(path.read_text()):
            if not (
                kind == '"' and (path.parent / name).exists() or name in ("stddef.h", "stdint.h")
            ):
                found.append(
                    f"{path.relative_to(root).as_posix()}: a public header includes {name}"
                )
    return found


def check_own(root, path, layer, name, where):
    """A quoted include: beside the file, or from native/."""
    beside, below = path.parent / name, root / "native" / name
    target = beside if beside.exists() else below
    if not target.exists():
        return [f"{where}: {name} is not there"]
    target = pathlib.Path(os.path.normpath(target))
    if not target.is_relative_to(root / "native"):
        return [f"{where}: {name} is outside native/ (public headers go by <penstock/...>)"]
    other = target.relative_to(root / "native").parts[0]
    if other != layer and other not in ALLOWED[layer]:
        return [f"{where}: {layer} may not include {other} ({name})"]
    return []


def test_no_breach():
    assert breaches(ROOT) == []


def edges(objects):
    """{object: the other objects that define what it needs}, by the linker's symbols."""
    symbols = subprocess.run(
        ["nm", "-P", "-A", *objects], capture_output=True, text=True, check=True
    )
    defined, needed = {}, {o: set() for o in objects}
    for line in symbols.stdout.splitlines():
        where, name, kind = line.split()[:3]
        if kind in "TDBRCVW":
            defined[name] = where.rstrip(":")
        elif kind == "U":
            needed[where.rstrip(":")].add(name)
    return {o: {defined[n] for n in names if n in defined} - {o} for o, names in needed.items()}


def circles(needs):
    """The largest sets of two nodes or more of which each reaches each."""
    reached = {}
    for node in needs:
        seen, left = set(), [node]
        while left:
            new = needs[left.pop()] - seen
            seen |= new
            left += new
        reached[node] = seen
    found = {frozenset(b for b in reached[a] if a in reached[b]) for a in needs if a in reached[a]}
    return sorted(sorted(c) for c in found)


def test_circles_of_files_are_those_left():
    """With the files of the CUDA backend, where the build has them."""
    root = BUILD / "obj" / "native"
    sources = {
        p.relative_to(ROOT / "native").with_suffix("").as_posix()
        for p in (ROOT / "native").rglob("*.c*")
    }
    files = {
        str(o): name
        for o in sorted(root.rglob("*.o"))
        if (name := o.relative_to(root).with_suffix("").as_posix()) in sources
    }
    assert len(files) > 100
    needs = {files[a]: {files[b] for b in bs} for a, bs in edges(list(files)).items()}
    there = sorted(sorted(set(c.split()) & set(needs)) for c in CIRCLES.values())
    assert circles(needs) == there, "a new circle, or one of CIRCLES that is smaller now"


def test_circles_are_found():
    needs = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"f"}, "f": {"e", "a"}}
    assert circles(needs) == [["b", "c"], ["e", "f"]]


def test_the_step_as_a_program_uses_no_threads_clocks_or_files():
    impure = re.compile(
        r"\b(ps__(thread|pool|counter|now)\w*|pthread_\w+|f?open|getenv|clock_\w+)\b"
    )
    files = sorted((ROOT / "native" / "step").glob("*.[ch]"))
    assert len(files) > 5
    for path in files:
        code = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
        assert not impure.findall(code), path.name


@pytest.mark.parametrize(
    "file, line, words",
    [
        ("core/a.c", '#include "engine/b.h"', "core may not include engine"),
        ("core/a.c", "#include <cuda_runtime.h>", "a CUDA header"),
        ("cli/a.c", '#include "core/b.h"', "cli may not include core"),
        ("cli/a.c", '#include "../../include/penstock/status.h"', "outside native"),
        ("plan/a.c", '# include "../train/b.h"', "plan may not include train"),
        ("kernels/cpu/a.c", '#include "../../backends/b.h"', "kernels may not include backends"),
        ("io/a.c", '#include "model/b.h"', "io may not include model"),
        ("step/a.c", '#include "hardware/b.h"', "step may not include hardware"),
        ("train/a.c", "#include <cblas.h>", "belongs to kernels"),
        ("tools/a.c", "", "tools is no layer"),
        ("kernels/cuda/a.cu", "#include <cuda_runtime.h>", None),
        ("plan/a.c", '#include "core/b.h"\n#include <penstock/status.h>\n#include <math.h>', None),
    ],
)
def test_breaches_are_seen(tmp_path, file, line, words):
    for layer in ALLOWED:
        (tmp_path / "native" / layer).mkdir(parents=True)
        (tmp_path / "native" / layer / "b.h").write_text("")
    (tmp_path / "include" / "penstock").mkdir(parents=True)
    (tmp_path / "include" / "penstock" / "status.h").write_text("#include <stdint.h>\n")
    path = tmp_path / "native" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line + "\n")
    found = breaches(tmp_path)
    assert (found == []) if words is None else (len(found) == 1 and words in found[0]), found
