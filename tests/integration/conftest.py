"""Tests of vLLM itself, and of Ray, exist where they are installed; `make test` installs them."""

import importlib.util
import os

NEEDS = {
    "test_vllm_engine.py": ("vllm",),
    "test_served_engine.py": ("vllm",),
    "test_engine_fleet.py": ("vllm", "ray"),
    "test_lora_cluster.py": ("vllm", "deepspeed", "ray"),
    "test_sequence_parallel.py": ("deepspeed", "ray"),
    "test_weight_backends.py": ("vllm",),
    "test_tensor_parallel.py": ("deepspeed", "ray"),
}

os.environ.setdefault("RAY_worker_niceness", "0")  # as `RaySession` does, for clusters that tests start themselves

collect_ignore = [file for file, packages in NEEDS.items() if not all(map(importlib.util.find_spec, packages))]
