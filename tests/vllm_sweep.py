"""Which types of models vLLM serves with the weights that a trainer pushes.

A tiny model with random weights of a type is saved; vLLM starts with its files, and samples; the trainer's weights are
then moved and pushed, and vLLM samples again. Each time the trainer's log-probs of the sampled tokens are vLLM's.

`scripts/vllm_table.py` examines all of `TYPES` and writes the list in docs/models.md.
"""

import asyncio
import math
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from attrs import evolve, frozen

from rollgrad.adapters.engines.vllm.engine import VLLMEngine
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.adapters.weights.channel import EngineWeights
from rollgrad.domain.batches.packed import pack
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams
from rollgrad.testing.agent_executor import make_trajectory
from tests.tiny_architectures import tiny_model
from tests.tiny_models import SHARE, make_tiny_tokenizer, saved

IN_VLLM = "### Types\n"
"""Heading of the list, which is its section."""
FLAG = "--actor.model_name_or_path"
CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.03}
"""Nats, of the mean difference of a log-prob, by number format."""
MOVED = 0.05
"""Standard deviation of what is added to all weights before they are pushed."""
VOCABULARY = 320
"""Tokens of the tokenizer."""
PROMPTS = (2, 17, 140)
"""Tokens of prompts; windows and chunks are shorter than the last."""
REPLY = 24
LONGEST = 256

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 32,
    "intermediate_size": 64,
    "initializer_range": 0.05,
    "max_position_embeddings": LONGEST,
}
"""Settings of all that have them: vLLM's attention takes heads of 32 numbers or more on a CPU."""
STATES = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16}
"""Widths of Mamba 2's states."""

FULL = {"use_sliding_window": False}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "head_dim": 64}
"""Widths of latent attention: vLLM's kernels have those of DeepSeek, and of few others."""
LINEAR = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_value_heads": 4, **FULL}
"""Widths of linear attention, as vLLM's kernel for CPUs has them."""

TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "ministral3": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "gemma4_text": {"vocab_size_per_layer_input": VOCABULARY, "enable_moe_block": True, "top_k_experts": 2},
    "phi3": {},
    "glm": {},
    "glm4": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "granite": {},
    "granite_swa": {},
    "cohere": {},
    "cohere2": {"sliding_window": LONGEST},  # which in vLLM has a token more
    "nemotron": {},
    "apertus": {},
    "phi": {},
    "stablelm": {},
    "gpt_neox": {},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gptj": {},
    "falcon": {"num_kv_heads": 4, "ffn_hidden_size": 512},
    "opt": {},
    "persimmon": {},
    "helium": {},
    "nanochat": {},
    "bitnet": {},
    "minicpm3": {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32},
    "cwm": {},
    "ministral": {},
    "jais2": {},
    "hyperclovax": {},
    "vaultgemma": {},
    "starcoder2": {},
    "smollm3": {},
    "arcee": {},
    "exaone4": {},
    "seed_oss": {},
    "hunyuan_v1_dense": {},
    "ernie4_5": {},
    "qwen2": FULL,
    "qwen3": FULL,
    "llama4_text": {"attention_chunk_size": 128, "num_experts_per_tok": 1, "floor_scale": 8192},
    "gpt_oss": {},
    "mixtral": {},
    "qwen2_moe": FULL,
    "qwen3_moe": {},
    "olmoe": {},
    "flex_olmo": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "granitemoe_swa": {},
    "cohere2_moe": {"sliding_window": LONGEST},
    "laguna": {},
    "mellum": {},
    "solar_open": {},
    "glm4_moe": {},
    "dots1": {},
    "exaone_moe": {},
    "hunyuan_v1_moe": {},
    "ernie4_5_moe": {},
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    "deepseek_v2": LATENT,
    "deepseek_v3": {**LATENT, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "glm4_moe_lite": {**LATENT, "first_k_dense_replace": 1},
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1, "route_scale": 1.0},
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 32, "route_norm": True, "qk_norm": True},
    "mamba2": {"intermediate_size": 256, "num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16},
    "granitemoehybrid": STATES,
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "num_hidden_layers": 3,
        "sliding_window": None,  # which transformers' code does not have
        "time_step_min": 1e-12,  # which vLLM does not have
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
    },
    "lfm2": {"conv_dim": 128, "block_dim": 128, "conv_L_cache": 3},
    "lfm2_moe": {"conv_L_cache": 3},
    "qwen3_next": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR,
    "gpt2": {},
    "gpt-sw3": {},
}
"""Settings of the tiny model of each type that is examined; vLLM reads some that transformers has no more, but that
are in files of the type."""
BFLOAT16 = {"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe_text"}
"""Types, with images and without, that vLLM computes on a CPU in bfloat16 alone."""
NEEDS = dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), "torchvision")
"""Packages without which vLLM does not import its model of a type."""


@frozen(kw_only=True)
class Finding:
    """Findings about one type. Gaps are the means of log-probs, in nats: before and after a push."""

    name: str
    before: float = math.nan
    after: float = math.nan
    moved: float = math.nan
    """Mean change of a log-prob by the push."""
    error: str = ""

    @property
    def exact(self) -> bool:
        """Whether vLLM computes what the trainer does, with the weights of files and with pushed ones."""
        return not self.error and max(self.before, self.after) < TOLERANCES[number_format(self.name)] < self.moved

    @property
    def outcome(self) -> str:
        """Its outcome, as the documents tell it."""
        if self.exact:
            return "exact, in bfloat16" if self.name in BFLOAT16 else "exact"
        reason = self.error.rpartition("Error: ")[2].splitlines()[0].rstrip(".:") if self.error else "other log-probs"
        return f"refused ({reason})"


def number_format(name: str) -> torch.dtype:
    """The number format in which a type is examined."""
    return torch.bfloat16 if name in BFLOAT16 else torch.float32


def examine(name: str) -> Finding:
    """Starts vLLM for one type."""
    findings = [Finding(name=name)]
    try:
        asyncio.run(_examine(findings))
    except Exception as error:
        findings.append(evolve(findings[-1], error=f"{type(error).__name__}: {error}"))
    return findings[-1]


async def _examine(findings: list[Finding]) -> None:
    """Adds a finding before the push, and one after it."""
    async with started(findings[0].name) as (engine, policy):
        first = await sampled(engine)
        findings.append(evolve(findings[-1], before=gap(policy, first)))
        move(policy)
        await EngineWeights(engine).push(policy, 1)
        after = gap(policy, await sampled(engine))
        findings.append(evolve(findings[-1], after=after, moved=gap(policy, first)))


@asynccontextmanager
async def started(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device = CPU,
    settings: Mapping[str, Any] = MappingProxyType({}),
    **extra: Any,
) -> AsyncIterator[tuple[VLLMEngine, TorchPolicy]]:
    """vLLM with a tiny model of a type, `extra` its engine arguments and `settings` those of ours, and the trainer of
    the same model on a device."""
    dtype = dtype or number_format(name)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tiny_tokenizer()
        assert len(tokenizer) == VOCABULARY
        sizes = {"vocab_size": VOCABULARY, **SIZES, **TYPES[name]}
        if name == "falcon":
            del sizes["head_dim"]  # which it computes
        path = str(saved(tiny_model(name, **sizes), tokenizer, Path(folder)))
        model = load_causal_lm(path, dtype=dtype, device=device, flag=FLAG)
        policy = TorchPolicy(model, tokenizer, OptimizerSettings(lr=0.0))
        engine = VLLMEngine(
            path,
            eos_token_ids=(),
            dtype=str(dtype).removeprefix("torch."),
            max_tokens=LONGEST,
            max_batch_size=8,
            threads=1,
            memory_fraction=SHARE,
            extra=extra,
            **settings,
        )
        try:
            yield engine, policy
        finally:
            engine.close()


def move(policy: TorchPolicy, seed: int = 1) -> None:
    """Moves all weights."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter += MOVED * torch.randn_like(parameter)


Reply = tuple[tuple[int, ...], Sequence[int], Sequence[float]]
"""A prompt, the reply's tokens and their log-probs."""


async def sampled(engine: VLLMEngine) -> list[Reply]:
    """Replies to prompts of random tokens."""
    return [(prompt, made.token_ids, made.logprobs) for prompt, made in await generated(engine)]


async def generated(
    engine: VLLMEngine, *, together: bool = True, **params: Any
) -> list[tuple[tuple[int, ...], Generation]]:
    """Prompts of random tokens, and what is generated for them with these parameters of sampling, together or one after
    the other."""
    draw = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(3, VOCABULARY, (count,), generator=draw).tolist()) for count in PROMPTS]

    async def reply(prompt: tuple[int, ...], seed: int) -> Generation:
        asked = SamplingParams(max_new_tokens=REPLY, seed=seed, **params)
        return await engine.generate(GenerationRequest(prompt_token_ids=prompt, params=asked))

    replies = [reply(prompt, seed) for seed, prompt in enumerate(prompts)]
    made = await asyncio.gather(*replies) if together else [await each for each in replies]
    return list(zip(prompts, made, strict=True))


def gap(policy: TorchPolicy, replies: Sequence[Reply]) -> float:
    """The mean difference of the trainer's log-probs from those in replies."""
    batch = pack([make_trajectory(prompt, tokens) for prompt, tokens, _ in replies])
    found_A = policy.score(batch).logprobs_N[batch.action_mask_N]
    expected_A = torch.tensor([logprob for *_, logprobs in replies for logprob in logprobs])
    return float((found_A - expected_A).abs().mean())
