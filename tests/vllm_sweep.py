"""Which types of models vLLM serves with the weights that a trainer pushes.

A tiny model with random weights of a type is saved; vLLM starts with its files, and samples; the trainer's weights are
then moved and pushed, and vLLM samples again. Each time the trainer's log-probs of the sampled tokens are vLLM's.

`scripts/vllm_table.py` examines all of `TYPES` and writes the table of docs/models.md.
"""

import asyncio
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen

from rollgrad.adapters.engines.vllm.engine import VLLMEngine
from rollgrad.adapters.models.torch.loading import load_causal_lm
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizer import OptimizerSettings
from rollgrad.adapters.weights.channel import EngineWeights
from rollgrad.domain.batches.packed import pack
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams
from rollgrad.testing.agent_executor import make_trajectory
from tests.tiny_architectures import tiny_model
from tests.tiny_models import SHARE, make_tiny_tokenizer, saved

HEAD = "| pushed to vLLM | |\n"
"""First line of the table."""
FLAG = "--actor.model_name_or_path"
TOLERANCE = 1e-4
"""Nats, of the mean difference of a log-prob in float32."""
MOVED = 0.05
"""Standard deviation of what is added to all weights before they are pushed."""
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

TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "gemma2": {},
    "gemma3_text": {},
    "phi3": {},
    "glm4": {},
    "olmo2": {},
    "olmo3": {},
    "granite": {},
    "cohere2": {"sliding_window": LONGEST},  # which in vLLM has a token more
    "starcoder2": {},
    "smollm3": {},
    "ernie4_5": {},
    "llama4_text": {"attention_chunk_size": 128, "num_experts_per_tok": 1, "floor_scale": 8192},
    "gpt_oss": {},
    "mixtral": {},
    "qwen2_moe": {"use_sliding_window": False},
    "qwen3_moe": {},
    "olmoe": {},
    "granitemoe": {},
    "glm4_moe": {},
    "mamba2": {"intermediate_size": 256, "num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16},
    "granitemoehybrid": STATES,
    "gpt2": {},
}
"""Settings of the tiny model of each type that is examined."""


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
        return not self.error and max(self.before, self.after) < TOLERANCE < self.moved

    @property
    def row(self) -> str:
        """Its row in the table."""
        if self.exact:
            return f"| {self.name} | exact |"
        reason = self.error.rpartition("Error: ")[2].splitlines()[0].rstrip(".:") if self.error else "other log-probs"
        return f"| {self.name} | refused: {reason} |"


def table(findings: Sequence[Finding]) -> str:
    """All findings as a table in Markdown."""
    return HEAD + "|---|---|\n" + "".join(finding.row + "\n" for finding in findings)


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
    name = findings[0].name
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tiny_tokenizer()
        settings = {"vocab_size": len(tokenizer), **SIZES, **TYPES[name]}
        path = str(saved(tiny_model(name, **settings), tokenizer, Path(folder)))
        model = load_causal_lm(path, dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
        policy = TorchPolicy(model, tokenizer, OptimizerSettings(lr=0.0))
        engine = VLLMEngine(
            path,
            eos_token_ids=(),
            dtype="float32",
            max_tokens=LONGEST,
            max_batch_size=8,
            threads=1,
            memory_fraction=SHARE,
        )
        try:
            first = await _sampled(engine, len(tokenizer))
            findings.append(evolve(findings[-1], before=_gap(policy, first)))
            torch.manual_seed(1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += MOVED * torch.randn_like(parameter)
            await EngineWeights(engine).push(policy, 1)
            after = _gap(policy, await _sampled(engine, len(tokenizer)))
            findings.append(evolve(findings[-1], after=after, moved=_gap(policy, first)))
        finally:
            engine.close()


Reply = tuple[tuple[int, ...], Sequence[int], Sequence[float]]
"""A prompt, the reply's tokens and their log-probs."""


async def _sampled(engine: VLLMEngine, vocabulary: int) -> list[Reply]:
    draw = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(3, vocabulary, (count,), generator=draw).tolist()) for count in PROMPTS]

    async def reply(prompt: tuple[int, ...], seed: int) -> Reply:
        params = SamplingParams(max_new_tokens=REPLY, seed=seed)
        made = await engine.generate(GenerationRequest(prompt_token_ids=prompt, params=params))
        return prompt, made.token_ids, made.logprobs

    return await asyncio.gather(*(reply(prompt, seed) for seed, prompt in enumerate(prompts)))


def _gap(policy: TorchPolicy, replies: Sequence[Reply]) -> float:
    batch = pack([make_trajectory(prompt, tokens) for prompt, tokens, _ in replies])
    found_A = policy.score(batch).logprobs_N[batch.action_mask_N]
    expected_A = torch.tensor([logprob for *_, logprobs in replies for logprob in logprobs])
    return float((found_A - expected_A).abs().mean())
