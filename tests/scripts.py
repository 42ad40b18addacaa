"""Python programs that a process runs which has made their imports (`tests/script_host.py`)."""

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[1]
CLIENT = ROOT / "tests" / "script_client.py"
MODULES = (
    *("datasets", "torch", "transformers.models.llama.modeling_llama"),
    *("rollgrad.entrypoints.composition.rl.container", "rollgrad.entrypoints.library"),
    *("tyro", "matplotlib.figure", "matplotlib.backends.backend_agg"),
    "rollgrad.entrypoints.composition.serving.assistant",
)


VLLM_MODULES = (
    "forked_spawns",
    *(
        "vllm.v1.engine.async_llm",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.models.llama",
    ),
    *("rollgrad.adapters.engines.vllm.engine", "rollgrad.adapters.engines.vllm.weight_receiver"),
    "vllm.entrypoints.openai.api_server",
)
"""Imports of processes of vLLM."""
RAY_MODULES = (
    *MODULES,
    *VLLM_MODULES[:-1],
    *("deepspeed", "deepspeed.runtime.zero.stage3"),
    *("rollgrad.adapters.models.ray.sharded", "rollgrad.adapters.models.deepspeed.module"),
    *("rollgrad.adapters.models.deepspeed.forward_only", "rollgrad.adapters.models.deepspeed.processes"),
    *("rollgrad.adapters.models.fsdp.division", "rollgrad.adapters.models.fsdp.module"),
)
"""Imports of workers of Ray: of processes of models, and of engines."""
QUIET = {
    "DS_ACCELERATOR": "cpu",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_AOT_COMPILE": "0",
}
"""Variables that these libraries read when they are imported, as rollgrad sets them on a CPU."""


EXECUTABLE = """#!/bin/sh
case "$1 $2" in
{ours}) exec {here} "$@" ;;
esac
exec {python} "$@"
"""
"""Stands for `sys.executable`: a program of the host for some words, Python itself for all others."""


class ScriptHost:
    """Starts the process, with a socket in `folder`. Its programs can import rollgrad, as where that is installed,
    what PYTHONPATH has of packages, and nothing else of the repository; variables that are read when a library is
    imported are the host's, `variables` among them. A host that is a program of another has that one's modules, too."""

    def __init__(
        self,
        folder: Path,
        modules: tuple[str, ...] = MODULES,
        variables: Mapping[str, str] = MappingProxyType({}),
        *,
        within: "ScriptHost | None" = None,
    ) -> None:
        self._folder, self._modules, self._variables, self._within = folder, modules, variables, within
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "path").mkdir()
        (folder / "path" / "rollgrad").symlink_to(ROOT / "rollgrad")
        for name in ("forked_spawns.py", "forked_ray.py"):
            (folder / "path" / name).symlink_to(ROOT / "tests" / name)

    def python(self) -> list[str]:
        """Returns words for `subprocess` that stand for `sys.executable`."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = self._started()
        return [sys.executable, "-IS", str(CLIENT), str(self._folder / "socket")]

    def run(self, *words: str, variables: Mapping[str, str] = MappingProxyType({})) -> str:
        """Runs a script, or `-m` and a module, with its arguments and, beside this process's, environment variables;
        returns what it printed.

        Raises:
            AssertionError: its exit status is not 0.
        """
        done = subprocess.run(
            [*self.python(), *words],
            cwd=ROOT,
            env={**self._environment(), **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    def forks(self, *, workers: bool = False) -> dict[str, str]:
        """Returns variables of a program whose command lines of rollgrad, recipes of the Tinker API and scripts of
        benchmarks/, that it starts by `sys.executable`, are programs of this host, and, if asked for, the workers of
        its Ray, too."""
        file, here = self._folder / "python", self.python()
        if not file.exists():
            ours = f'"-m rollgrad."*|"-m tinker_cookbook."*|benchmarks/*|{shlex.quote(str(ROOT))}/benchmarks/*'
            file.write_text(EXECUTABLE.format(ours=ours, here=shlex.join(here), python=shlex.quote(sys.executable)))
            file.chmod(0o755)
        return {"SCRIPT_PYTHON": str(file), **({"SCRIPT_RAY": here[-1]} if workers else {})}

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None

    def _started(self) -> "subprocess.Popen[bytes]":
        path = self._folder / "socket"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:  # clients may connect before the imports are made
            listener.bind(str(path))
            listener.listen()
            number = str(listener.fileno())
            python, passed = [sys.executable], {}
            if self._within is not None:
                python, passed = self._within.python(), {"SCRIPT_FILES": number}
            return subprocess.Popen(
                [*python, str(ROOT / "tests" / "script_host.py"), number, *self._modules],
                cwd=ROOT,
                env={**self._environment(), **self._variables, **passed},
                start_new_session=True,
                stdin=subprocess.PIPE,  # which ends with this process, however that ends
                pass_fds=[listener.fileno()],
            )

    def _environment(self) -> dict[str, str]:
        outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of this suite
        packages = [path for path in outer.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != ROOT]
        path = os.pathsep.join([str(self._folder / "path"), *packages])
        return {**outer, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
