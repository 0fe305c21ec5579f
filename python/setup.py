"""pip install ./python: builds the library and the program with the source tree's Makefile and
bundles them into the package.

`make all` runs in the folder above with its objects in PENSTOCK_INSTALL_BUILD (relative to that
folder; default: build/install) and the OpenBLAS wheel of pip's build environment (pyproject.toml
asks for it; without build isolation: the caller's). Library, program, the OpenBLAS libraries, the
declarations generated from the headers and the licences become penstock/_native/. NVIDIA's
libraries do not: what was built with CUDA finds those of the wheels nvidia-cublas and nvidia-cudnn
in the environment that it is installed into.
"""

import os
import shutil
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

ROOT = Path(__file__).resolve().parent.parent
# relative, as make gets it: make cannot take a whole path that has spaces
FOLDER = os.environ.get("PENSTOCK_INSTALL_BUILD", "build/install")
BUILD = ROOT / FOLDER


class BuildWithLibrary(build_py):
    """Compiles the C library before the Python files are copied, and adds it to them."""

    def run(self):
        super().run()
        if not (ROOT / "Makefile").exists():
            sys.exit(
                "penstock: install from the source tree (pip install ./python): the C sources lie beside python/"
            )
        subprocess.check_call(
            [
                "make",
                "-C",
                str(ROOT),
                f"BUILD={FOLDER}",
                f"PYTHON={sys.executable}",
                f"BLAS_PYTHON={sys.executable}",
                f"-j{os.cpu_count()}",
                "all",
            ]
        )
        if not self.editable_mode:
            target = Path(self.build_lib) / "penstock" / "_native"
            target.mkdir(parents=True, exist_ok=True)
            for path in [*sorted((BUILD / "lib").iterdir()), BUILD / "bin" / "penstock"]:
                # links lead to NVIDIA's libraries
                if path.suffix != ".a" and not path.is_symlink():
                    shutil.copy2(path, target / path.name)
            shutil.copy2(ROOT / "LICENSE", target / "LICENSE")
            (target / "LICENSE-OpenBLAS").write_text(metadata("scipy-openblas32")["License"])


class NativeDistribution(Distribution):
    """The wheel has compiled code, so that its name must carry the platform."""

    def has_ext_modules(self):
        return True


class NativeWheel(bdist_wheel):
    """That code is loaded through cffi and knows no Python: one wheel for every version."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


(BUILD / "wheel").mkdir(parents=True, exist_ok=True)
setup(
    cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": NativeWheel},
    distclass=NativeDistribution,
    options={
        "build": {"build_base": str(BUILD / "wheel")},
        "egg_info": {"egg_base": str(BUILD / "wheel")},
    },
)
