"""Compiles native.cpp for this machine's processor when it is first needed, and keeps it in the user's cache folder.

Takes a second or two and a C++ compiler.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared")


@functools.cache
def load_kernel() -> ctypes.CDLL | str:
    """The compiled kernel, or why there is none."""
    if reason := why_impossible():
        return reason
    compiler = str(_compiler())
    try:
        return _loaded(_compiled(compiler))
    except subprocess.CalledProcessError as error:
        return f"{compiler} failed on {SOURCE.name}: {error.stderr.strip()}"
    except OSError as error:
        return f"it could not be built with {compiler} in {_cache()}: {error}"


def why_impossible() -> str | None:
    """Why this machine can't compile any kernel; None if it could."""
    if sys.platform != "linux":
        return f"it shares torch's OpenMP threads, which is tried on Linux only, and this is {sys.platform}"
    return None if _compiler() else "there is no C++ compiler (install g++, or set CXX)"


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


def _compiled(compiler: str) -> Path:
    """The library of this source, compiler and processor; built if it is not in the cache yet, whole or not at all.

    Not by torch.utils.cpp_extension: that does not tell processors apart, and waits without end for a killed build.
    """
    # torch brings an OpenMP of its own: with a second one, two sets of threads would wait for the cores
    openmp = sorted(map(str, (Path(torch.__file__).parent / "lib").glob("libgomp*")))
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    recipe = (SOURCE.read_bytes(), version, FLAGS, openmp, _processor())
    library = _cache() / f"native-{hashlib.sha256(repr(recipe).encode()).hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder, library.name)
            command = [compiler, *FLAGS, str(SOURCE), *openmp, "-o", str(built)]
            subprocess.run(command, capture_output=True, text=True, check=True)
            built.rename(library)
    return library


def _loaded(library: Path) -> ctypes.CDLL:
    kernel = ctypes.CDLL(str(library))
    kernel.attend_mask.restype = ctypes.c_int64
    kernel.attend_forward.restype = kernel.attend_backward.restype = None
    return kernel


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "scale_invariant_attention")


def _processor() -> str:
    """What tells apart the processors of machines that share a home folder."""
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features")))
