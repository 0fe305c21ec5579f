"""Downloads flash-attn's source package and unpacks the headers of its kernels and of CUTLASS:
fetch_flash_attn.py REQUIREMENTS OUT

pip checks the hash that REQUIREMENTS names. It would also run the package's setup.py, only to learn
its name and version, which fails where there is no PyTorch; so it is given a build backend of ours
that answers that question and builds nothing.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

BACKEND = """
import os, sys
def get_requires_for_build_wheel(config_settings=None):
    return []
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    os.mkdir(os.path.join(folder, "{file}.dist-info"))
    with open(os.path.join(folder, "{file}.dist-info", "METADATA"), "w") as f:
        f.write("Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return "{file}.dist-info"
__legacy__ = sys.modules[__name__]
"""
PARTS = {"csrc/flash_attn/src": "src", "csrc/cutlass/include": "cutlass"}


def download(requirements, work):
    name, version = re.search(r"^([\w-]+)==([\w.]+)", requirements.read_text(), re.M).groups()
    backend = work / "backend" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build_meta.py").write_text(
        BACKEND.format(name=name, version=version, file=f"{name.replace('-', '_')}-{version}")
    )
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--no-build-isolation",
            "--use-pep517",
            "--dest",
            work,
            "-r",
            requirements,
        ],
        env={**os.environ, "PYTHONPATH": str(backend.parent)},
        check=True,
    )
    return next(work.glob("*.tar.gz"))


def main():
    requirements, out = Path(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        with tarfile.open(download(requirements, work)) as tar:
            tar.extractall(work / "unpacked", filter="data")
        top = next((work / "unpacked").iterdir())
        shutil.rmtree(out, ignore_errors=True)
        for part, name in PARTS.items():
            shutil.copytree(top / part, out / name)
        shutil.copy(top / "LICENSE", out)


main()
