"""The engine arguments of vLLM that `vllm.extra` may set, by vLLM's own list."""

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CLASSES = ("EngineArgs", "AsyncEngineArgs")
"""Classes in vLLM's `engine/arg_utils.py` whose fields are its engine arguments."""

LORA = "set --actor.lora.rank and --actor.lora.sync"
EXPERTS = "set --actor.router_replay engine"

OWN: Mapping[str, str] = {
    "model": "set --actor.model_name_or_path",
    "dtype": "set --actor.dtype",
    "max_num_seqs": "set --rollout.max_batch_size",
    "max_model_len": "set --vllm.max_model_len",
    "tensor_parallel_size": "set --vllm.tensor_parallel_size",
    "pipeline_parallel_size": "set --vllm.pipeline_parallel_size",
    "data_parallel_size": "set --vllm.num_engines",
    "gpu_memory_utilization": "set --vllm.gpu_memory_utilization",
    "weight_transfer_config": "set --vllm.sync_backend",
    "hf_token": "set the environment variable HF_TOKEN, which no record of the run shows",
    "enable_sleep_mode": "set --train.colocate_all",
    "generation_config": "set --rollout.temperature, --rollout.top_p and --rollout.top_k",
    "override_generation_config": "set --rollout.temperature, --rollout.top_p and --rollout.top_k",
    "logprobs_mode": "the log-probs that training needs are those of the distribution that is sampled from",
    "structured_outputs_config": "its backend is guidance, for which grammars are written here",
    "reasoning_parser": "the grammars that are written here have a place for thinking",
    **dict.fromkeys(("enable_return_routed_experts", "aux_output_config"), EXPERTS),
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype"), LORA),
}
"""Engine arguments that rollgrad sets itself, and what to do instead."""


def argument_problems(
    extra: Mapping[str, Any], setting: str = "vllm.extra", own: Mapping[str, str] = OWN
) -> Iterator[str]:
    """Yields a sentence for each name in `extra`, the value of `setting`, that is no engine argument of the vLLM that
    is installed, or one of `own`; nothing is known to be wrong where no vLLM is installed."""
    known = None
    for name in extra:
        if name in own:
            yield f"{setting}.{name} is not yours to set: {own[name]}, and leave --{setting}.{name} out."
            continue
        known = _engine_arguments() if known is None else known
        if known and name not in known:
            similar = difflib.get_close_matches(name, known - own.keys(), n=1)
            hint = f"did you mean --{setting}.{similar[0]}?" if similar else "its arguments are those of vllm serve."
            yield f"{setting}.{name} is no engine argument of the vLLM that is installed; {hint}"


def _engine_arguments() -> frozenset[str]:
    """Returns the names of vLLM's engine arguments, read from its source, because importing it takes seconds; none
    where it is not installed."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return frozenset()
    source = ast.parse((Path(found.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    classes = (node for node in source.body if isinstance(node, ast.ClassDef) and node.name in CLASSES)
    fields = (node.target for its in classes for node in its.body if isinstance(node, ast.AnnAssign))
    return frozenset(field.id for field in fields if isinstance(field, ast.Name) and not field.id.startswith("_"))
