"""Forward and backward of the packed model, and the memory of log-probs.

`share_of_peak` holds the FLOPs that had to be done (`machine.ModelCost`: 6 x weights per distinct token, 8 x V x H per
action token) against the matrix product measured in the same run.
"""

from typing import Any

import pytest
import torch
from attrs import evolve

from benchmarks.machine import Machine, ModelCost
from rollgrad.adapters.torch.head import token_logprobs
from rollgrad.adapters.torch.layout import build_layout
from rollgrad.adapters.torch.models import TorchPolicy
from rollgrad.adapters.torch.optimizer import OptimizerSettings
from rollgrad.domain.batch import PackedBatch, pack
from rollgrad.domain.losses.objectives import ClippedPolicyObjective
from rollgrad.domain.sampling import Generation, StopReason
from rollgrad.domain.trajectory import TrajectoryBuilder

PROMPTS, SAMPLES, PROMPT_TOKENS, REPLY_TOKENS = 4, 8, 64, 32
OBJECTIVE = ClippedPolicyObjective(clip_low=0.2, clip_high=0.2)


def packed(*, shared: bool) -> PackedBatch:
    """Random tokens; without `shared` every sample has a group of its own, so that no prompt is shared."""
    trajectories = []
    for prompt in range(PROMPTS):
        ids = torch.randint(0, 49152, (PROMPT_TOKENS,)).tolist()
        for sample in range(SAMPLES):
            number = prompt * SAMPLES + sample
            builder = TrajectoryBuilder(ids, group_id=prompt if shared else number, sample_id=number)
            tokens = torch.randint(0, 49152, (REPLY_TOKENS,)).tolist()
            logprobs, versions = [-1.0] * REPLY_TOKENS, [0] * REPLY_TOKENS
            builder.add_action(
                Generation(token_ids=tokens, logprobs=logprobs, versions=versions, stop_reason=StopReason.STOP)
            )
            trajectories.append(builder.build(stop_reason=StopReason.STOP))
    batch = pack(trajectories)
    weights_N = batch.action_mask_N / batch.action_mask_N.sum()
    return evolve(batch, advantages_N=torch.randn(batch.token_count), loss_weights_N=weights_N)


@pytest.mark.benchmark(group="update")
@pytest.mark.parametrize("shared", [True, False], ids=["prompt shared", "prompt repeated"])
def test_update(benchmark: Any, model: Any, machine: Machine, shared: bool) -> None:
    policy = TorchPolicy(model, None, OptimizerSettings(lr=0.0))
    batch = packed(shared=shared)
    benchmark.pedantic(lambda: policy.update([batch], OBJECTIVE), rounds=3, warmup_rounds=1)
    distinct, actions = len(build_layout(batch).tokens_M), int(batch.action_mask_N.sum())
    seconds = benchmark.stats.stats.median
    benchmark.extra_info.update(
        tokens_per_s=round(batch.token_count / seconds),
        distinct_tokens_per_s=round(distinct / seconds),
        share_of_peak=round(ModelCost.of(model).update(distinct, actions) / seconds / machine.flops, 3),
        peak_gflops=round(machine.flops / 1e9),
    )


@pytest.mark.benchmark(group="log-probs")
@pytest.mark.parametrize("kind", ["chunked", "full matrix"])
def test_logprob_memory(benchmark: Any, kind: str) -> None:
    rows, hidden, vocabulary = 1024, 64, 49152
    weight = torch.randn(vocabulary, hidden, requires_grad=True)
    states = torch.randn(rows, hidden, requires_grad=True)
    targets = torch.randint(0, vocabulary, (rows,))

    def chunked() -> None:
        token_logprobs(states, weight, None, targets, 1.0)[0].sum().backward()

    def full() -> None:
        (states @ weight.t()).log_softmax(-1).gather(1, targets[:, None]).sum().backward()

    work = chunked if kind == "chunked" else full
    benchmark.pedantic(work, rounds=3, warmup_rounds=1)
    benchmark.extra_info["peak_mib"] = round(peak_bytes(work) / 2**20)


def peak_bytes(work: Any) -> int:
    """Most bytes that `work()` holds at once, from the profiler's record of every allocation."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most
