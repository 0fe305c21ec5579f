"""Copies OpenBLAS out of its wheel in the interpreter that runs this: find_openblas.py HEADERS
LIBRARIES

LIBRARIES gets it and the Fortran libraries that it needs. The Makefile runs this.
"""

import importlib.util
import shutil
import sys
from pathlib import Path


def main():
    headers, libraries = map(Path, sys.argv[1:])
    if not importlib.util.find_spec("scipy_openblas32"):
        sys.exit(
            f"make: {sys.executable} has no OpenBLAS: "
            "pip install -r python/requirements-runtime.txt, or leave BLAS_PYTHON out"
        )
    import scipy_openblas32 as wheel

    for folder, pattern, to in (
        (wheel.get_include_dir(), "*.h", headers),
        (wheel.get_lib_dir(), "*.so*", libraries),
    ):
        to.mkdir(parents=True, exist_ok=True)
        for path in Path(folder).glob(pattern):
            shutil.copy2(path, to)  # a header that is as old is no reason to compile


main()
