"""Updates of the packed model, and the memory of log-probs.

`share_of_peak` is (6 x weights without embedding x distinct tokens + 8 x V x H x action tokens) / seconds over the
FLOP/s of a matrix product measured in the same run. Seconds are those of the whole update, AdamW included.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from benchmarks.machine import Machine, ModelCost
from rollgrad.adapters.models.torch.compiling import compile_layers
from rollgrad.adapters.models.torch.heads.chunked_logprobs import token_logprobs
from rollgrad.adapters.models.torch.layers.layout import build_layout
from rollgrad.adapters.models.torch.loading.loading import default_device, load_causal_lm
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.domain.algorithms.losses.objectives import PolicyLossObjective
from rollgrad.domain.batches.packed import RolloutBatch, pack
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.trajectory import TrajectoryBuilder

PROMPTS, SAMPLES, PROMPT_TOKENS, REPLY_TOKENS = 2, 8, 64, 32
VOCABULARY, HIDDEN = 49152, 576
LOGPROB_ROWS, SMOKE_LOGPROB_ROWS = 4096, 64
COMPILED_ROUNDS = 6
OBJECTIVE = PolicyLossObjective()


def packed(*, shared: bool, vocabulary: int) -> RolloutBatch:
    """Random tokens; without `shared` every sample has a group of its own, so that no prompt is shared."""
    trajectories = []
    for prompt in range(PROMPTS):
        ids = torch.randint(0, vocabulary, (PROMPT_TOKENS,)).tolist()
        for sample in range(SAMPLES):
            number = prompt * SAMPLES + sample
            builder = TrajectoryBuilder(ids, group_id=prompt if shared else number, sample_id=number)
            reply = torch.randint(0, vocabulary, (REPLY_TOKENS,)).tolist()
            builder.add_action(
                Generation(
                    token_ids=reply,
                    logprobs=[-1.0] * REPLY_TOKENS,
                    versions=[0] * REPLY_TOKENS,
                    stop_reason=StopReason.LENGTH,
                )
            )
            trajectories.append(builder.build(stop_reason=StopReason.LENGTH))
    batch = pack(trajectories)
    weights_N = batch.action_mask_N / batch.action_mask_N.sum()
    return evolve(batch, advantages_N=torch.randn(batch.token_count), loss_weights_N=weights_N)


@pytest.mark.benchmark(group="update")
@pytest.mark.parametrize("shared", [True, False], ids=["prompt once", "prompt repeated"])
def test_update(benchmark: Any, model_dir: Path, dtype: torch.dtype, machine: Machine, shared: bool) -> None:
    model = load_causal_lm(
        str(model_dir), dtype=dtype, device=default_device(), flag="model"
    )  # an optimizer keeps what it trains
    policy = TorchPolicy(model, None, OptimizerSettings(lr=0.0))
    batch = packed(shared=shared, vocabulary=model.config.vocab_size)
    benchmark.pedantic(lambda: policy.update([batch], OBJECTIVE), rounds=2, warmup_rounds=1 if shared else 0)
    distinct, actions = len(build_layout(batch).tokens_M), int(batch.action_mask_N.sum())
    seconds = benchmark.stats.stats.min
    flops = ModelCost.of(model).update(distinct, actions, head_flops=8)
    benchmark.extra_info.update(
        tokens_per_s=round(batch.token_count / seconds),
        distinct_tokens_per_s=round(distinct / seconds),
        share_of_peak=round(flops / seconds / machine.flops, 3),
        peak_gflops=round(machine.flops / 1e9),
    )


@pytest.mark.benchmark(group="update")
def test_compiled_update(benchmark: Any, model_dir: Path, dtype: torch.dtype, smoke: bool) -> None:
    """Updates with compiled layers (`actor.compile`) and without, in turns; `ratio` is that of their least seconds of
    the processor where it computes, of the clock on a GPU. `first_s` are the seconds of the first update, in which
    layers are compiled."""
    device = default_device()
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    policies = []
    for compiles in (False, True):
        model = load_causal_lm(str(model_dir), dtype=dtype, device=device, flag="model")
        if compiles:
            compile_layers(model)
        policies.append(TorchPolicy(model, None, OptimizerSettings(lr=0.0)))
    batch = packed(shared=True, vocabulary=model.config.vocab_size)

    def seconds(policy: TorchPolicy) -> float:
        began = clock()
        policy.update([batch], OBJECTIVE)
        return clock() - began

    plain, compiled = policies
    seconds(plain)
    began = time.perf_counter()
    seconds(compiled)
    first = time.perf_counter() - began
    turns: list[tuple[float, float]] = []
    rounds = 1 if smoke else COMPILED_ROUNDS
    benchmark.pedantic(lambda: turns.append((seconds(plain), seconds(compiled))), rounds=rounds)
    without, with_ = map(min, zip(*turns, strict=True))
    benchmark.extra_info.update(
        ratio=round(with_ / without, 3), first_s=round(first), plain_s=round(without, 2), compiled_s=round(with_, 2)
    )


@pytest.mark.benchmark(group="log-probs, forward and backward")
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "log_softmax"])
def test_logprob_memory(benchmark: Any, dtype: torch.dtype, smoke: bool, chunked: bool) -> None:
    """`peak_mib` counts everything allocated on the way, the two gradients included."""
    rows = SMOKE_LOGPROB_ROWS if smoke else LOGPROB_ROWS
    states_AH = torch.randn(rows, HIDDEN).to(dtype).requires_grad_()
    weight_VH = torch.randn(VOCABULARY, HIDDEN).to(dtype).requires_grad_()
    targets_A = torch.randint(0, VOCABULARY, (rows,))

    def work() -> None:
        states_AH.grad = weight_VH.grad = None
        if chunked:
            logprobs_A, _ = token_logprobs(states_AH, weight_VH, None, targets_A, 1.0)
        else:
            logits_AV = (states_AH @ weight_VH.t()).float()
            logprobs_A = logits_AV.log_softmax(-1).gather(1, targets_A[:, None])[:, 0]
        logprobs_A.sum().backward()

    benchmark.pedantic(work, rounds=1)
    states_AH.grad = weight_VH.grad = None
    benchmark.extra_info["peak_mib"] = round(peak_bytes(work) / 2**20)


def peak_bytes(work: Callable[[], None]) -> int:
    """Most bytes that `work()` holds at once, from the profiler's record of every allocation."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most
