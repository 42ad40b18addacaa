"""A section of first light about kinds of models in vLLM on a GPU: tiny ones, with the heads that its kernels take."""

import asyncio
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.first_light_common import DEV, DT, GPU, free_all
from benchmarks.first_light_engines import lacking

FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {},
    "qwen3_5_text": {},
    "qwen3_moe": {"records_experts": True},
    "qwen3_next": {},
    "nemotron_h": {},
    "gpt_oss": {},
}
"""Kinds, those first that have most of their own: latent attention, whose matrices are made anew at each push, and
experts that are pushed joined; states and gates in bfloat16, from text alone; experts that vLLM records, for replay.
Each with settings of the engine, of which those of a CPU are without what it has not."""

LINEAR = ("qwen3_5_text", "qwen3_next")
"""Kinds with linear attention."""

TRITON = {"gdn_prefill_backend": "triton"}
"""Engine argument for linear attention: the other kernels for Hopper are compiled when they are first needed."""

GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}}
"""Engine arguments: steps are captured, without compiling, which would take most of the time."""

LIKELIEST = 20
"""Likely tokens that are asked for at each place, as score centering does."""

NEAR = 0.5
"""Largest mean difference of log-probs, as a share of how far a push has moved them: in 16 bits routers choose other
experts now and then."""


def families(out: Any) -> None:
    """Models of several kinds, each in vLLM on the GPU of the model that is trained. Checks whether log-probs of
    replies, and of likely tokens, are the trainer's: before a push through the GPU's memory, after it, and after
    another push that wakes vLLM."""
    if not GPU or (missing := lacking("vllm")):
        out["left out"] = f"needs {missing if GPU else 'a GPU'}"
        return
    examine(out, [*FAMILIES])


def examine(out: Any, kinds: Sequence[str]) -> None:
    """Examines kinds one after the other."""
    for kind in kinds:
        t, found = time.perf_counter(), dict[str, Any]()
        try:
            asyncio.run(_examined(kind, found))
        except Exception as error:
            traceback.print_exc()
            found |= {"FAILED": f"{type(error).__name__}: {error}"[:1500], "at": traceback.format_exc()[-1500:]}
        found["s"] = round(time.perf_counter() - t, 1)
        out[kind] = found
        free_all()
    wrong = [kind for kind in kinds if "FAILED" in out[kind] or not out[kind]["right"]]
    assert not wrong, f"vLLM computes something else than the trainer: {wrong}"


async def _examined(kind: str, found: dict[str, Any]) -> None:
    from rollgrad.adapters.weights.channel import EngineWeights
    from rollgrad.adapters.weights.cuda_ipc import cuda_ipc
    from rollgrad.adapters.weights.shared_memory import shared_memory
    from rollgrad.application.settings.sections.vllm import SyncBackend
    from tests.vllm_sweep import gap, generated, move, started

    backend = SyncBackend.CUDA_IPC if GPU else SyncBackend.SHARED_MEMORY
    settings = {"sync_backend": backend, "sleep_level": 2, "top_logprobs": LIKELIEST}
    settings |= FAMILIES[kind] if GPU else {}
    dtype = DT if GPU else None
    extra = {**GRAPHS, **(TRITON if kind in LINEAR else {})} if GPU else {}
    async with started(kind, dtype=dtype, device=DEV, settings=settings, **extra) as (engine, trained):
        channel = EngineWeights(engine, backend=cuda_ipc if GPU else shared_memory)

        async def compared(name: str) -> list[Any]:
            alone: list[Any] = await generated(engine, together=False, top_logprobs=LIKELIEST)
            made: list[Any] = await generated(engine, top_logprobs=LIKELIEST)
            for of, each in ((", one at a time", alone), ("", made)):
                replies = [(prompt, reply.token_ids, reply.logprobs) for prompt, reply in each]
                found[f"{name}{of}"] = round(gap(trained, replies), 5)
            found[f"{name}, likely tokens"] = round(_likely_gap(trained, made), 5)
            return made

        made = await compared("before")
        move(trained)
        found["moved"] = round(gap(trained, [(prompt, reply.token_ids, reply.logprobs) for prompt, reply in made]), 5)
        await channel.push(trained, 1)
        made = await compared("after a push")
        await engine.sleep()
        move(trained, seed=2)
        await engine.wake()
        await channel.push(trained, 2)
        made = await compared("after it slept")
        if GPU and settings.get("records_experts"):
            found["experts recorded"] = [[*part.experts_RLK.shape] for _, reply in made for part in reply.routed]
    times = ("before", "after a push", "after it slept")
    worst = max(found[f"{name}{of}"] for name in times for of in ("", ", one at a time", ", likely tokens"))
    found["right"] = worst < NEAR * found["moved"] and found.get("experts recorded", True) != []


def _likely_gap(trained: Any, made: Sequence[tuple[tuple[int, ...], Any]]) -> float:
    """The mean difference of vLLM's log-probs of likely tokens from those of the trained model."""
    from rollgrad.adapters.models.torch.forward import action_hidden
    from rollgrad.adapters.models.torch.heads.logits import logit_form
    from rollgrad.adapters.models.torch.layers.sequence_parallel import sequence_group
    from rollgrad.domain.batches.packed import pack
    from rollgrad.testing.agent_executor import make_trajectory

    module, head = trained.module, trained.module.get_output_embeddings()
    batch = pack([make_trajectory(prompt, reply.token_ids) for prompt, reply in made])
    with torch.no_grad():
        rows = action_hidden(module, batch, sequence_group(module))
        logprobs_AV = logit_form(module).logits(rows.hidden_BH, head.weight, head.bias).log_softmax(1)
    ids_AK = torch.cat([reply.top_logprobs.ids_RK for _, reply in made]).long()
    expected_AK = torch.cat([reply.top_logprobs.logprobs_RK for _, reply in made])
    return float((logprobs_AV.cpu().gather(1, ids_AK) - expected_AK).abs().mean())
