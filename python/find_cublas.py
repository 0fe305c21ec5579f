"""Collects cuBLAS out of NVIDIA's wheel in the interpreter that runs this: find_cublas.py MAJOR
HEADERS LIBRARIES

MAJOR is CUDA's major version. HEADERS gets the headers, LIBRARIES a link to libcublasLt, which our
library finds beside itself. The Makefile runs this.
"""

import shutil
import sys
from pathlib import Path


def folders():
    """Where NVIDIA's wheels of CUDA 13 and newer, and those of CUDA 12, have cuBLAS."""
    try:
        import nvidia
    except ImportError:
        return []
    places = (Path(p) / name for p in nvidia.__path__ for name in (f"cu{sys.argv[1]}", "cublas"))
    return [p for p in places if (p / "include/cublasLt.h").exists()]


def main():
    major, headers, libraries = sys.argv[1], *map(Path, sys.argv[2:])
    found = folders()
    if not found:
        sys.exit(
            f"make: {sys.executable} has no cuBLAS for CUDA {major}: "
            f"pip install -r python/requirements-cuda{major}.txt"
        )
    for folder in (headers, libraries):
        folder.mkdir(parents=True, exist_ok=True)
    library = next((found[0] / "lib").glob("libcublasLt.so.*"))
    link = libraries / library.name
    link.unlink(missing_ok=True)
    link.symlink_to(library)
    for path in (found[0] / "include").glob("cublas*.h"):
        shutil.copy(path, headers)


main()
