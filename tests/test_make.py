"""The Makefile: what its targets run and when they build again."""
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_long_tests_run_only_when_asked_for(tmp_path):
    (tmp_path / "test_it.py").write_text("import pytest\n@pytest.mark.long\ndef test_long(): pass\ndef test_short(): pass\n")
    for options, wanted in (([], {"test_short"}), (["-m", "long"], {"test_long"})):
        done = subprocess.run([sys.executable, "-m", "pytest", "-c", ROOT / "pytest.ini", "--collect-only", "-q", *options, tmp_path],
                              capture_output=True, text=True)
        assert {line.split("::")[1] for line in done.stdout.splitlines() if "::" in line} == wanted, done.stdout + done.stderr
    dry = subprocess.run(["make", "-s", "-n", "CUDA=0", "test-long"], cwd=ROOT, capture_output=True, text=True)
    assert "pytest -q -m long" in dry.stdout, dry.stdout + dry.stderr
