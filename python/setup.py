"""pip install ./python: builds the library with the source tree's Makefile and bundles it into the package.

`make lib` runs in the folder above with its objects in PENSTOCK_INSTALL_BUILD (default: build/install of the source tree) and
the OpenBLAS wheel of pip's build environment (pyproject.toml asks for it; without build isolation: the caller's). The
library, the OpenBLAS libraries and the declarations generated from the headers become penstock/_native/. NVIDIA's libraries do not: what
was built with CUDA finds those of the wheels nvidia-cublas and nvidia-cudnn in the environment that it is installed into.
"""
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUILD = Path(os.environ.get("PENSTOCK_INSTALL_BUILD", ROOT / "build" / "install")).resolve()


class BuildWithLibrary(build_py):
    """Compiles the C library before the Python files are copied, and adds it to them."""

    def run(self):
        super().run()
        if not (ROOT / "Makefile").exists():
            sys.exit("penstock: install from the source tree (pip install ./python): the C sources lie beside python/")
        subprocess.check_call(["make", "-C", str(ROOT), f"BUILD={BUILD}", f"PYTHON={sys.executable}",
                               f"BLAS_PYTHON={sys.executable}", f"-j{os.cpu_count()}", "lib"])
        if not self.editable_mode:
            target = Path(self.build_lib) / "penstock" / "_native"
            target.mkdir(parents=True, exist_ok=True)
            for path in sorted((BUILD / "lib").iterdir()):
                if path.suffix != ".a" and not path.is_symlink():  # links lead to NVIDIA's libraries
                    shutil.copy2(path, target / path.name)


class NativeDistribution(Distribution):
    """The wheel has compiled code, so that its name must carry the platform."""

    def has_ext_modules(self):
        return True


(BUILD / "wheel").mkdir(parents=True, exist_ok=True)
setup(cmdclass={"build_py": BuildWithLibrary}, distclass=NativeDistribution,
      options={"build": {"build_base": str(BUILD / "wheel")}, "egg_info": {"egg_base": str(BUILD / "wheel")}})
