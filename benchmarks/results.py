"""Results of benchmarks: files in `benchmarks/results/`, each with the machine that it was measured on, and the curves
of runs that learn in `docs/images/`."""

import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import cattrs
import psutil
import torch

from rollgrad.entrypoints.description import COMPUTING
from rollgrad.entrypoints.run_record import versions

RESULTS = Path(__file__).resolve().parent / "results"
IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
CPU_INFO = Path("/proc/cpuinfo")

Name = TypeVar("Name", bound=str)
Curves = TypeVar("Curves")


def learned(
    stem: str,
    runs: Iterable[Name],
    chosen: Iterable[Name],
    make: Callable[[Name], Curves],
    draw: Callable[[dict[Name, Curves], Path], None],
    kind: type[dict[Name, Curves]],
    folder: Path = IMAGES,
) -> dict[Name, Curves]:
    """Makes the chosen runs of a script; after each it writes the curves of all to `folder`/`stem`.json and draws them
    to `stem`.png. Those of runs that are not made, which the file has as `kind`, are kept; returns all in the order of
    `runs`."""
    path = folder / f"{stem}.json"
    found = cattrs.structure(json.loads(path.read_text()), kind) if path.exists() else {}
    for name in chosen:
        found[name] = make(name)
        found = {each: found[each] for each in runs if each in found}
        path.write_text(json.dumps(cattrs.unstructure(found), indent=1) + "\n")
        draw(found, folder / f"{stem}.png")
    return found


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
        "versions": versions(COMPUTING),
    }


def _processor() -> str:
    if CPU_INFO.exists():  # where Python's own function has no more than the architecture
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
