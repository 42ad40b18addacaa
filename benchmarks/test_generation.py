"""Tokens per second of the embedded engine, beside transformers' own `generate` and continuous batching.

All sample from the full distribution and never stop early. Each round is 32 tokens for each row; rows share prompts by
eights, as GRPO's samples do. `floor_tokens_per_s` is what this machine allows: see `ModelCost.generation`.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.machine import Machine, ModelCost
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams

NEW_TOKENS, SAMPLES = 32, 8
TEMPLATE = tuple(range(100, 140))
BATCHES = pytest.mark.parametrize("rows", [1, 16, 64])


def prompts(rows: int) -> list[tuple[int, ...]]:
    return [(*TEMPLATE, 200 + row // SAMPLES) for row in range(rows)]


@pytest.fixture(autouse=True)
def _grouped(benchmark: Any, rows: int) -> None:
    benchmark.group = f"generation, batch {rows:2}"


@BATCHES
def test_embedded_engine(benchmark: Any, model: Any, machine: Machine, rows: int) -> None:
    engine = EmbeddedEngine(model, eos_token_ids=[])
    requests = [
        GenerationRequest(prompt_token_ids=ids, params=SamplingParams(max_new_tokens=NEW_TOKENS, seed=seed))
        for seed, ids in enumerate(prompts(rows))
    ]

    async def generate() -> int:
        replies = await asyncio.gather(*(engine.generate(request) for request in requests))
        return sum(len(reply.token_ids) for reply in replies)

    measure(benchmark, lambda: asyncio.run(generate()), rows)
    distinct = set(prompts(rows))
    floor = ModelCost.of(model).generation(
        machine,
        prompts=len(distinct),
        prompt_tokens=len(TEMPLATE) + len(distinct),
        rows=rows,
        new_tokens=NEW_TOKENS,
    )
    benchmark.extra_info["floor_tokens_per_s"] = round(rows * NEW_TOKENS / floor, 1)


@pytest.fixture(scope="module")
def plain(model_dir: Path, dtype: torch.dtype) -> Any:
    """The model as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()


@BATCHES
def test_transformers_generate(benchmark: Any, plain: Any, rows: int) -> None:
    ids = torch.tensor(prompts(rows))

    def generate() -> int:
        replies = plain.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
        return int(replies[:, ids.shape[1] :].numel())

    measure(benchmark, generate, rows)


@BATCHES
def test_transformers_continuous_batching(benchmark: Any, plain: Any, rows: int) -> None:
    """The cache holds one page a request: left to itself it takes nine tenths of the machine's memory."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    inputs = [list(ids) for ids in prompts(rows)]
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS, eos_token_id=-1, pad_token_id=0)
    page = len(inputs[0]) + NEW_TOKENS
    batching = ContinuousBatchingConfig(
        page_size=page, num_blocks=rows + 1, max_batch_tokens=rows * len(inputs[0]), max_requests_per_batch=rows
    )

    def generate() -> int:
        replies = plain.generate_batch(inputs, generation_config=config, continuous_batching_config=batching)
        return sum(len(reply.generated_tokens) for reply in replies.values())

    measure(benchmark, generate, rows)


def measure(benchmark: Any, generate: Any, rows: int) -> None:
    tokens = benchmark.pedantic(generate, rounds=2)
    assert tokens == rows * NEW_TOKENS
    benchmark.extra_info["tokens_per_s"] = round(tokens / benchmark.stats.stats.min, 1)
