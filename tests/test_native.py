"""Runs every native test program; builds nothing (make native-tests does)."""

import os
import pathlib
import subprocess

import pytest
from conftest import HANGS_S

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / os.environ.get("PENSTOCK_BUILD", "build")
PROGRAMS = sorted(p.stem for p in (ROOT / "tests" / "native").glob("test_*.c"))


def test_there_are_programs():
    assert "test_engine_hazards" in PROGRAMS


@pytest.mark.parametrize(
    "name", [pytest.param(p, marks=pytest.mark.gpu if "cuda" in p else ()) for p in PROGRAMS]
)
def test_native(name):
    run_program(name)


@pytest.mark.long
@pytest.mark.parametrize(
    "name, much",
    [
        ("test_engine_hazards", "200000"),
        ("test_plan", "all"),
        ("test_caps", "all"),
        ("test_search", "all"),
        ("test_train_beside", "all"),
        ("test_device_faults", "all"),
        ("test_switch", "all"),
        ("test_observed", "all"),
    ],
)
def test_many_random_programs(name, much):
    """Twenty times the random programs that `make test` runs, every case of random plans and of
    candidates, a fault in every op of three devices, hundreds of switches from plan to plan, and
    checkpoints beside every recipe, optimizer and placement."""
    run_program(name, much)


def run_program(name, *arguments):
    program = BUILD / "tests" / name
    if not program.exists():
        pytest.fail(
            f"{program} is not built: make BUILD={os.environ.get('PENSTOCK_BUILD', 'build')} native-tests",
            pytrace=False,
        )
    source = ROOT / "tests" / "native" / f"{name}.c"
    if program.stat().st_mtime < source.stat().st_mtime:
        pytest.fail(
            f"{program} is older than {source}: make BUILD={os.environ.get('PENSTOCK_BUILD', 'build')} native-tests",
            pytrace=False,
        )
    try:
        run = subprocess.run(
            [program, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=HANGS_S,
        )
    except subprocess.TimeoutExpired as e:
        pytest.fail(
            f"{name}: no end after {HANGS_S} s\n{(e.stdout or b'').decode(errors='replace')}",
            pytrace=False,
        )
    text = run.stdout.decode(errors="replace")
    print(text)
    if run.returncode != 0:
        pytest.fail(f"{name}: exit code {run.returncode}\n{text}", pytrace=False)
    done = [line for line in text.splitlines() if line.startswith("ok ")]
    assert done, f"{name} reported no test:\n{text}"
    if all(line.startswith("ok skipped: ") for line in done):
        pytest.skip(done[0].removeprefix("ok skipped: "))
