"""Results of benchmarks, as files in `benchmarks/results/`, each with the machine that it was measured on."""

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from rollgrad.entrypoints.description import versions

RESULTS = Path(__file__).resolve().parent / "results"
CPU_INFO = Path("/proc/cpuinfo")


def keep(name: str, figures: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Writes `figures` and facts of the machine to `folder`/`name`.json, in place of what was measured before; returns
    the file. Paths are written as texts."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**figures, "machine": machine_facts()}, indent=1, default=str) + "\n", encoding="utf-8")
    return path


def machine_facts() -> dict[str, Any]:
    """Returns the names of processor and GPU, the cores and GiB of memory that there are, the threads that torch uses,
    the widest instructions that it has kernels for, and the versions of what computes."""
    return {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": versions(),
    }


def _processor() -> str:
    if CPU_INFO.exists():  # where Python's own function has no more than the architecture
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
