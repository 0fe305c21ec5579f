"""Sources are laid out as .clang-format and .ruff.toml say; `make format` does it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def tool(name):
    path = BIN / name
    if not path.exists():
        pytest.skip(f"{name} is not installed beside {sys.executable}: make venv-test")
    return path


def sources(*endings):
    """Files under version control; in an unpacked archive, all that there are."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        listed = [
            path.relative_to(ROOT).as_posix()
            for folder in ("include", "native", "tests", "bench")
            for path in (ROOT / folder).rglob("*")
        ]
    return [name for name in listed if name.endswith(endings) and (ROOT / name).exists()]


def test_c_cuda_and_cpp_sources_are_formatted():
    files = sources(".c", ".h", ".cu", ".cuh", ".cpp")
    assert len(files) > 100
    command = [tool("clang-format"), "--dry-run", "--Werror", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, "make format lays them out:\n" + done.stderr[:2000]


def test_no_line_of_c_or_of_a_makefile_is_longer_than_100_columns():
    """clang-format leaves comments and strings that are too long as they are."""
    long = [
        f"{name}:{number}: {len(line)} columns"
        for name in sources(".c", ".h", ".cu", ".cuh", ".cpp", "Makefile", ".mk")
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        if len(line) > 100
    ]
    assert long == []


@pytest.mark.parametrize("command", [["format", "--check"], ["check"]], ids=["format", "lint"])
def test_python_sources_are_formatted_and_linted(command):
    done = subprocess.run(
        [tool("ruff"), *command, "--quiet", "."], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, f"make format helps:\n{done.stdout[:2000]}{done.stderr[:2000]}"
