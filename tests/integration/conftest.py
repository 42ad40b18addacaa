"""Tests of vLLM itself, and of Ray, exist where they are installed; `make test` installs them."""

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollgrad.adapters.ray.session import VARIABLES
from tests.scripts import QUIET, RAY_MODULES, ScriptHost

NEEDS = {
    "test_vllm_engine.py": ("vllm",),
    "test_vllm_starting.py": ("vllm",),
    "test_vllm_model_repairs.py": ("vllm",),
    "test_vllm_repairs.py": ("vllm",),
    "test_vllm_types.py": ("vllm",),
    "test_served_engine.py": ("vllm",),
    "test_cluster_images.py": ("vllm", "deepspeed", "ray"),
    "test_cluster_places.py": ("vllm", "deepspeed", "ray"),
    "test_engine_fleet.py": ("vllm", "ray"),
    "test_lora_cluster.py": ("vllm", "deepspeed", "ray"),
    "test_expert_parallel.py": ("vllm", "deepspeed", "ray"),
    "test_sequence_parallel.py": ("deepspeed", "ray"),
    "test_weight_backends.py": ("vllm",),
    "test_weight_loading.py": ("vllm",),
    "test_tensor_parallel.py": ("deepspeed", "ray"),
}

for name, value in VARIABLES.items():  # as `RaySession` does, for clusters that tests start themselves
    os.environ.setdefault(name, value)
if not torch.cuda.is_available():  # where vLLM compiles
    # Nothing is compiled, and DeepSpeed would load the compiler in each of its processes.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"

collect_ignore = [file for file, packages in NEEDS.items() if not all(map(importlib.util.find_spec, packages))]


@pytest.fixture(scope="session")
def worker_host(tmp_path_factory: pytest.TempPathFactory, script_host: ScriptHost) -> Iterator[ScriptHost]:
    """Runs Python programs, Ray's workers among them, without the imports that processes of models and engines need;
    where there are GPUs, which are lost in a fork, with them, and no workers."""
    from tests.forked_ray import fork_workers

    folder = tmp_path_factory.mktemp("workers")
    if torch.cuda.is_available():
        host = ScriptHost(folder, (), QUIET)
    else:
        host = ScriptHost(folder, RAY_MODULES, QUIET, within=script_host)
        fork_workers(host.python()[-1])
    yield host
    host.close()


@pytest.fixture(scope="session")
def _rays_end(worker_host: ScriptHost) -> Iterator[None]:
    yield
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@pytest.fixture(scope="session")
def kept_groups(_rays_end: None) -> Iterator[Any]:
    """The `KeptGroups` of the Ray that the fixture `ray` starts."""
    from tests.fakes.kept_groups import KeptGroups

    groups = KeptGroups()
    yield groups
    groups.close()


@pytest.fixture
def group(ray: None, kept_groups: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A `WorkerGroup` of kept processes: two, or as many as a test's parameter says."""
    group = kept_groups.group(getattr(request, "param", 2))
    yield group
    group.close()


@pytest.fixture
def runs_share_processes(ray: None, kept_groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs take their worker processes from `kept_groups`."""
    from rollgrad.entrypoints.composition import cluster

    monkeypatch.setattr(cluster, "begin_workers", lambda slots, **_: slots)
    monkeypatch.setattr(cluster, "end_workers", lambda workers: None)
    monkeypatch.setattr(cluster, "WorkerGroup", lambda name, slots, **_: kept_groups.group(len(slots), name))


@pytest.fixture(scope="module")
def ray(_rays_end: None) -> None:
    """A Ray on this machine, which runs find and leave: all modules share it, for it takes longer to start than many of
    their tests. It has room for the groups of processes that they keep, and for a run's beside."""
    from rollgrad.adapters.ray.session import RaySession

    RaySession(None, cpus=32)


@pytest.fixture
def sums_flags(wide_headed_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Flags of a run in float32 on nine sums, in an empty working directory; how it samples is left to add."""
    monkeypatch.chdir(tmp_path)
    rows = [{"input": f"What is {a} plus {b}?", "label": str(a + b)} for a in range(1, 4) for b in range(1, 4)]
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    reward = "def reward_func(queries, prompts, labels):\n    return [len(query) % 7 for query in queries]\n"
    Path("reward.py").write_text(reward)
    return {
        "actor.model_name_or_path": str(wide_headed_model_dir),
        "actor.dtype": "float32",
        "actor.adam.lr": "1e-3",
        "algo.advantage.estimator": "group_norm",
        "algo.old_logprobs": "rollout",
        "data.prompt_dataset": "prompts.jsonl",
        "data.label_key": "label",
        "reward.function_path": "reward.py",
        "reward.timeout": "120",
        "rollout.temperature": "0.8",
        "rollout.batch_size": "3",
        "rollout.n_samples_per_prompt": "3",
        "rollout.max_new_tokens": "16",
        "ckpt.output_dir": "out",
    }
