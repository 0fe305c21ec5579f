"""Collects what attention through cuDNN is built with: headers into one folder, links to the
libraries into another.

    find_cudnn.py HEADERS LIBRARIES [--home DIR] [--frontend DIR] [--nvrtc DIR]

Headers of cuDNN, of its frontend (header-only) and, where the toolkit has none, nvrtc.h; links to
libcudnn and libnvrtc, which our library finds beside itself. They come from the wheels of the
interpreter that runs this (python/requirements-cudnn*.txt), cuDNN from --home instead where that is
given (include/ and lib/), the frontend from --frontend (the folder that has cudnn_frontend.h),
nvrtc.h from --nvrtc.
"""

import argparse
import shutil
import sys
from pathlib import Path


def wheel_folders():
    """Where NVIDIA's wheels put include/ and lib/, and where the frontend's headers are."""
    try:
        import nvidia
    except ImportError:
        return []
    return [
        f for p in nvidia.__path__ for f in sorted(Path(p).iterdir()) if (f / "include").is_dir()
    ]


def first_with(folders, file, what, remedy):
    for folder in folders:
        if (folder / file).exists():
            return folder
    sys.exit(
        f"find_cudnn: {what} ({file}) not found for {sys.executable}: {remedy}, or build with CUDNN=0 (without attention on GPUs)"
    )


def link_all(folders, patterns, to):
    for f in (
        f for folder in folders for pattern in patterns for f in sorted(folder.glob(pattern))
    ):
        link = to / f.name
        if link.is_symlink() or link.exists():
            link.unlink()
        link.symlink_to(f.resolve())


def main():
    p = argparse.ArgumentParser()
    p.add_argument("headers", type=Path)
    p.add_argument("libraries", type=Path)
    p.add_argument("--home", type=Path)
    p.add_argument("--frontend", type=Path)
    p.add_argument("--nvrtc", type=Path)
    a = p.parse_args()
    wheels = wheel_folders()
    remedy = "install the wheels of python/requirements-cudnn*.txt there, or set CUDNN_HOME"
    homes = [a.home] if a.home else wheels
    cudnn = first_with(
        [h / i for h in homes for i in ("include", "include/x86_64-linux-gnu")],
        "cudnn_version.h",
        "cuDNN",
        remedy,
    )
    frontend = first_with(
        [a.frontend] if a.frontend else [Path(s) / "include" for s in sys.path],
        "cudnn_frontend.h",
        "cuDNN's frontend",
        "pip install nvidia-cudnn-frontend, or set CUDNN_FRONTEND to the folder that has it",
    )
    nvrtc = first_with(
        ([a.nvrtc] if a.nvrtc else []) + [w / "include" for w in wheels] + [frontend],
        "nvrtc.h",
        "NVRTC",
        "install the wheel nvidia-cuda-nvrtc",
    )
    shutil.rmtree(a.headers, ignore_errors=True)
    shutil.copytree(
        frontend,
        a.headers,
        ignore=lambda folder, names: [
            n for n in names if not (n.startswith("cudnn") or Path(folder) != frontend)
        ],
    )
    for f in sorted(cudnn.glob("cudnn*.h")):
        if not f.name.startswith("cudnn_frontend"):
            shutil.copy(f, a.headers)
    shutil.copy(nvrtc / "nvrtc.h", a.headers)
    a.libraries.mkdir(parents=True, exist_ok=True)
    link_all(
        [h / d for h in homes for d in ("lib", "lib64", "lib/x86_64-linux-gnu")],
        ["libcudnn*.so.9"],
        a.libraries,
    )
    link_all([w / "lib" for w in wheels], ["libnvrtc*.so.*"], a.libraries)


main()
