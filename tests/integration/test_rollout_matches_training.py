"""The trainer scores the tokens that the engine has just sampled with the log-probs that the engine gave them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

import rollgrad
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.domain.algorithms.losses.objectives import PolicyLossObjective
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams
from rollgrad.domain.episodes.trajectory import Trajectory, TrajectoryBuilder
from tests import tiny_architectures
from tests.example_runs import logged
from tests.tiny_models import saved

FLAG = "--actor.model_name_or_path"
REPOSITORY = Path(__file__).parents[2]

FLOAT32_TOLERANCE = 1e-4
"""Largest difference of a log-prob: products are summed in another order, no more."""

BFLOAT16_MEAN, BFLOAT16_MAX = 0.02, 0.25
"""bfloat16 keeps 8 bits: hidden states differ by rounding, and a logit of 20 by 20 x 2^-8 = 0.08 a step;
float16 keeps 11."""


async def play(
    model: Any, prompts: list[tuple[int, ...]], *, samples: int, temperature: float, length: int
) -> PackedBatch:
    """Two turns each: the second continues after an observation, so that the engine prefills what it sampled."""
    engine = EmbeddedEngine(model, eos_token_ids=(), max_batch_size=8)

    async def one(group: int, sample: int) -> Trajectory:
        builder = TrajectoryBuilder(prompts[group], group_id=group, sample_id=group * samples + sample)
        for turn in range(2):
            params = SamplingParams(
                temperature=temperature, max_new_tokens=length - sample % 3, seed=100 * group + 10 * sample + turn
            )
            generation = await engine.generate(GenerationRequest(prompt_token_ids=builder.token_ids, params=params))
            builder.add_action(generation)
            if turn == 0:
                builder.add_observation([40 + sample, 41])
        return builder.build(stop_reason=generation.stop_reason)

    return pack(list(await asyncio.gather(*(one(g, s) for g in range(len(prompts)) for s in range(samples)))))


async def gaps(
    path: Path, dtype: torch.dtype, temperature: float, prompts: list[tuple[int, ...]], length: int
) -> Tensor:
    model = load_causal_lm(str(path), dtype=dtype, device=torch.device("cpu"), flag=FLAG)
    tokenizer = load_tokenizer(str(path), flag=FLAG)
    policy = TorchPolicy(model, tokenizer, OptimizerSettings(lr=1e-3), temperature=temperature)
    batch = await play(model, prompts, samples=4, temperature=temperature, length=length)
    scores = policy.score(batch)
    assert (batch.rollout_logprobs_N[batch.action_mask_N] < 0).any()
    return (scores.logprobs_N - batch.rollout_logprobs_N)[batch.action_mask_N].abs()


TINY_PROMPTS = [tuple(range(10, 50)), (60,), (61, 62, 63, 64, 65, 66, 67)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_tiny_model_in_float32(tiny_model_dir: Path, temperature: float) -> None:
    assert (await gaps(tiny_model_dir, torch.float32, temperature, TINY_PROMPTS, 20)).max() < FLOAT32_TOLERANCE


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_next", "kimi_linear", "lfm2", "nemotron_h"])
async def test_layers_that_hand_a_state_on(model_type: str, tiny_tokenizer: Any, tmp_path: Path) -> None:
    made = tiny_architectures.tiny_model(model_type, vocab_size=len(tiny_tokenizer), max_position_embeddings=512)
    path = saved(made, tiny_tokenizer, tmp_path)
    found = await gaps(path, torch.float32, 0.7, TINY_PROMPTS, 20)
    assert found.max() < FLOAT32_TOLERANCE


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_tiny_model_in_bfloat16(tiny_model_dir: Path, temperature: float) -> None:
    found = await gaps(tiny_model_dir, torch.bfloat16, temperature, TINY_PROMPTS, 20)
    assert found.mean() < BFLOAT16_MEAN
    assert found.max() < BFLOAT16_MAX


async def test_tiny_model_in_float16(tiny_model_dir: Path) -> None:
    found = await gaps(tiny_model_dir, torch.float16, 1.0, TINY_PROMPTS, 20)
    assert found.mean() < BFLOAT16_MEAN / 8
    assert found.max() < BFLOAT16_MAX / 8


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.parametrize(("dtype", "temperature"), [(torch.float32, 0.7), (torch.bfloat16, 1.0)], ids=str)
async def test_smollm2(smollm2_dir: Path, dtype: torch.dtype, temperature: float) -> None:
    """The demo that learns compares both of this model, too."""
    tokenizer = load_tokenizer(str(smollm2_dir), flag=FLAG)
    texts = ["What is 3 plus 4?", "Name three rivers of Europe, with the seas that they flow into."]
    prompts = [
        tuple(tokenizer.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True)["input_ids"])
        for t in texts
    ]
    found = await gaps(smollm2_dir, dtype, temperature, prompts, 16)
    if dtype == torch.float32:
        assert found.max() < 5e-4  # 30 layers instead of two
    else:
        assert found.mean() < 3 * BFLOAT16_MEAN  # 30 layers, and contexts that the model finds unlikely
        assert found.max() < 3 * BFLOAT16_MAX


async def test_after_an_update_both_see_the_new_weights(tiny_model_dir: Path) -> None:
    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
    policy = TorchPolicy(model, load_tokenizer(str(tiny_model_dir), flag=FLAG), OptimizerSettings(lr=1e-2))
    for _ in range(2):
        batch = await play(model, TINY_PROMPTS, samples=3, temperature=1.0, length=8)
        gap = (policy.score(batch).logprobs_N - batch.rollout_logprobs_N).abs().max()
        assert gap < FLOAT32_TOLERANCE
        mask = batch.action_mask_N
        weighted = evolve(
            batch,
            advantages_N=torch.where(mask, 1.0, 0.0),
            loss_weights_N=torch.where(mask, 1.0 / mask.sum(), 0.0),
        )
        metrics = policy.update([weighted], PolicyLossObjective())
        assert metrics["ratio_mean"] == pytest.approx(1.0)
    assert (policy.score(batch).logprobs_N - batch.rollout_logprobs_N).abs().max() > 1e-2, "the weights have moved"


@pytest.mark.slow
@pytest.mark.wide
def test_without_learning_the_mismatch_stays_what_it_is(smollm2_dir: Path, tmp_path: Path) -> None:
    """Two steps at a learning rate of 0: the engine and the trainer drift apart only if one of them changes."""
    config = rollgrad.load_config(REPOSITORY / "examples" / "sums.yaml", preset="dr_grpo")
    config.actor.model_name_or_path, config.actor.adam.lr = str(smollm2_dir), 0.0
    config.data.prompt_dataset = str(REPOSITORY / config.data.prompt_dataset)
    config.eval.dataset, config.eval.steps = None, -1
    config.rollout.batch_size, config.rollout.n_samples_per_prompt, config.rollout.max_new_tokens = 1, 4, 12
    config.train.max_steps = 2
    config.logger.console = False
    config.ckpt.output_dir, config.ckpt.state_minutes = str(tmp_path), None  # which would take as long as the run
    rollgrad.train(config, reward=lambda queries, prompts, labels: [float(len(query)) for query in queries])
    rows = logged(tmp_path)
    mismatch = torch.tensor([row["policy/mismatch_abs"] for row in rows])
    assert len(mismatch) == 2
    assert mismatch.max() < FLOAT32_TOLERANCE
    assert 0.5 < float(mismatch[1] / mismatch[0]) < 2.0, "it neither grows nor shrinks"
    assert all(row["policy/mismatch_effective_sample_share"] > 0.99 for row in rows)
