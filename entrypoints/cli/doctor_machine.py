"""Facts about the machine: cores, memory, disks, and GPUs with their driver. It imports nothing heavy."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

SMI_SECONDS = 5.0
"""Longest wait for nvidia-smi: a driver that hangs would hang it too."""

SHM = Path("/dev/shm")
LEAST_SHM_BYTES = 2**30
"""Shared memory below which engines and training processes fail: containers have 64 MiB unless told otherwise."""

LEAST_DISK_BYTES = 10 * 2**30
"""Free disk below which a model of a billion parameters, its state and its download do not fit."""


@frozen
class Gpu:
    """A GPU; `memory_bytes` is None where it shares the machine's memory."""

    name: str
    memory_bytes: int | None


@frozen
class Driver:
    """NVIDIA's driver, and the newest CUDA that it supports."""

    version: str
    cuda: str


@frozen
class Disk:
    """The free disk space at `path`, or at the nearest directory above it that exists."""

    path: Path
    free_bytes: int


def parse_driver(text: str) -> Driver | None:
    """Returns the driver that `nvidia-smi` shows in its first lines; None if it shows none (no driver is loaded)."""
    driver = re.search(r"Driver Version\s*:\s*([\d.]+)", text)
    cuda = re.search(r"CUDA (?:UMD )?Version\s*:\s*([\d.]+)", text)
    return Driver(driver[1], cuda[1]) if driver and cuda else None


def parse_gpus(text: str) -> list[Gpu]:
    """Returns the GPUs in what `nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits` prints.

    >>> parse_gpus("NVIDIA H100 80GB HBM3, 81559")
    [Gpu(name='NVIDIA H100 80GB HBM3', memory_bytes=85520809984)]
    """
    gpus = []
    for line in text.splitlines():
        name, comma, memory = line.rpartition(",")
        if comma:
            size = memory.strip()
            gpus.append(Gpu(name.strip(), int(size) * 2**20 if size.isdigit() else None))
    return gpus


def find_gpus() -> tuple[Driver | None, list[Gpu]]:
    """Returns the driver and the GPUs of this machine; no driver and none without nvidia-smi."""
    driver = parse_driver(_smi())
    if driver is None:
        return None, []
    return driver, parse_gpus(_smi("--query-gpu=name,memory.total", "--format=csv,noheader,nounits"))


def driver_problem(driver: Driver | None, gpus: list[Gpu], cuda: str | None, torch: str | None) -> str | None:
    """Returns why torch, built for `cuda` (None: without it), does not run on the GPUs; None if it does, or there are
    none.

    Within one major version of CUDA a build runs on older drivers too (NVIDIA's minor version compatibility).
    """
    if driver is None or not gpus or torch is None:
        return None
    major = driver.cuda.split(".")[0]
    if cuda is None:
        return f"torch {torch} is built without CUDA, so no GPU is used: install a torch built for CUDA {major}."
    if int(cuda.split(".")[0]) > int(major):
        return (
            f"torch {torch} is built for CUDA {cuda}, but driver {driver.version} supports CUDA {driver.cuda} at most: "
            f"install a newer driver, or a torch built for CUDA {major}."
        )
    return None


def compiler_problem(gpus: list[Gpu]) -> str | None:
    """Returns what is not there to compile kernels for GPUs with; None if nothing lacks, or there are no GPUs."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # as Triton looks for it
    needed = {"a C compiler": compiler is not None, f"Python's headers ({headers})": headers.is_file()}
    lacking = [name for name, there in needed.items() if not there]
    if not gpus or not lacking:
        return None
    return (
        f"vLLM, and DeepSpeed's offloaded Adam, compile kernels when they first run on a GPU, for which "
        f"{' and '.join(lacking)} lack here: install them (on Debian: apt-get install gcc g++ python3-dev)."
    )


def compiled_each_time() -> str | None:
    """Returns what it takes that processes do not keep the modules that they compile; None if they do, or if they find
    them compiled."""
    torch = importlib.util.find_spec("torch")
    if not sys.dont_write_bytecode or torch is None or torch.cached is None or Path(torch.cached).is_file():
        return None
    return (
        "PYTHONDONTWRITEBYTECODE is set and torch lies here uncompiled, so that each process compiles all that it "
        "imports, which takes longer than the imports themselves: unset it, or compile the packages once by "
        f"{sys.executable} -m compileall -q {sysconfig.get_paths()['purelib']}."
    )


def compute_modes() -> list[str]:
    """Returns the compute mode of each GPU of this machine."""
    return _smi("--query-gpu=compute_mode", "--format=csv,noheader").splitlines()


def sharing_problem(modes: Sequence[str]) -> str | None:
    """Returns which GPUs several processes cannot use together, by the compute mode of each; None if there are none."""
    closed = {str(number): mode for number, mode in enumerate(modes) if mode.startswith(("Exclusive", "Prohibited"))}
    if not closed:
        return None
    which = f"GPU {', '.join(closed)} is" if len(closed) == 1 else f"GPUs {', '.join(closed)} are"
    return (
        f"{which} in the compute mode {' and '.join(sorted(set(closed.values())))}, so that no two processes use one "
        "together: models and vLLM, which are processes of their own, cannot share it. Set it by nvidia-smi -c DEFAULT "
        "(under SLURM by its option gpu_cmode=shared)."
    )


def shared_memory_bytes() -> int | None:
    """Returns the size of /dev/shm; None without one."""
    return shutil.disk_usage(SHM).total if SHM.is_dir() else None


def disk(path: Path) -> Disk:
    """Returns the free space at a path that need not exist yet."""
    whole = path.expanduser().absolute()
    existing = next(candidate for candidate in (whole, *whole.parents) if candidate.exists())
    return Disk(whole, shutil.disk_usage(existing).free)


def model_cache() -> Path:
    """Returns the download directory of the Hugging Face libraries."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def _smi(*arguments: str) -> str:
    try:
        process = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout


def missing_compiler(*, on_gpu: bool) -> str | None:
    """Returns what `torch.compile` would look for in vain: on a CPU a C++ compiler, where torch's inductor looks for
    it; for a GPU Triton, and the C compiler with which it builds its launchers."""
    if not on_gpu:
        return None if shutil.which(os.environ.get("CXX", "g++")) else "a C++ compiler (g++, or the variable CXX)"
    if importlib.util.find_spec("triton") is None:
        return "triton"
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    return None if any(map(shutil.which, compilers)) else "a C compiler (gcc, or the variable CC)"
