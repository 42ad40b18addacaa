"""Tokens per second of the embedded engine, beside transformers' own `generate` and continuous batching.

`floor_s` is the least time of the same decoding steps on this machine: weights read once a step, or all products done.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.machine import Machine, ModelCost
from rollgrad.adapters.transformers.engine import EmbeddedEngine
from rollgrad.domain.sampling import GenerationRequest, SamplingParams

NEW_TOKENS, PROMPT = 16, tuple(range(100, 140))


def prompts(rows: int) -> list[tuple[int, ...]]:
    return [(*PROMPT, 200 + row // 8) for row in range(rows)]


@pytest.mark.benchmark(group="generation")
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_embedded_engine(benchmark: Any, model: Any, machine: Machine, rows: int) -> None:
    engine = EmbeddedEngine(model, eos_token_ids=[])
    requests = [
        GenerationRequest(prompt_token_ids=ids, params=SamplingParams(max_new_tokens=NEW_TOKENS, seed=seed))
        for seed, ids in enumerate(prompts(rows))
    ]

    async def generate() -> None:
        await asyncio.gather(*(engine.generate(request) for request in requests))

    benchmark.pedantic(lambda: asyncio.run(generate()), rounds=2, warmup_rounds=1)
    note(benchmark, rows)
    benchmark.extra_info["floor_s"] = round(NEW_TOKENS * ModelCost.of(model).decode_floor(machine, rows), 2)


@pytest.fixture(scope="module")
def plain(model_dir: Path, model: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=next(model.parameters()).dtype).eval()


@pytest.mark.benchmark(group="generation")
@pytest.mark.parametrize("rows", [64])
def test_transformers_generate(benchmark: Any, plain: Any, rows: int) -> None:
    ids = torch.tensor(prompts(rows))

    def generate() -> None:
        plain.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )

    benchmark.pedantic(generate, rounds=2, warmup_rounds=1)
    note(benchmark, rows)


@pytest.mark.benchmark(group="generation")
@pytest.mark.parametrize("rows", [64])
def test_transformers_continuous_batching(benchmark: Any, plain: Any, rows: int) -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(do_sample=True, max_new_tokens=NEW_TOKENS, eos_token_id=-1, pad_token_id=0)
    inputs = [list(ids) for ids in prompts(rows)]
    benchmark.pedantic(
        lambda: plain.generate_batch(inputs=inputs, generation_config=config, progress_bar=False), rounds=1
    )
    note(benchmark, rows)


def note(benchmark: Any, rows: int) -> None:
    benchmark.extra_info["tokens_per_s"] = round(rows * NEW_TOKENS / benchmark.stats.stats.median, 1)
