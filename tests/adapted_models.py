"""Common parts of tests of adapters: a batch, learning from it, and transformers' own log-probs of its tokens."""

from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.domain.ports.models import LossOutput, TokenScores
from rollgrad.testing.agent_executor import make_trajectory


def branching_batch() -> PackedBatch:
    """Returns four episodes of one prompt, with weights."""
    packed = pack([make_trajectory([5, 6, 7], [20 + i] * (i + 1), [9], [30, 31], group_id=0) for i in range(4)])
    return evolve(packed, loss_weights_N=torch.where(packed.action_mask_N, 0.1, 0.0))


def likelihood(scores: TokenScores, part: PackedBatch) -> LossOutput:
    """Returns minus the weighted sum of log-probs."""
    return LossOutput(loss=-(part.filled("loss_weights_N") * scores.logprobs_N).sum())


def learn(policy: TorchPolicy, batch: PackedBatch, steps: int = 3) -> dict[str, float]:
    """Takes so many optimizer steps; returns the metrics of the last."""
    metrics: dict[str, float] = {}
    for _ in range(steps):
        metrics = policy.update([batch], likelihood)
    return metrics


def plain(path: Path, dtype: torch.dtype = torch.float64) -> Any:
    """Returns the model of transformers at `path`."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def logprobs(model: Any, batch: PackedBatch) -> Tensor:
    """Returns the log-prob of every action token, from transformers' own attention, a sequence a call."""
    rows = []
    for tokens in batch.tokens_N.split(batch.lengths_S.tolist()):
        log_softmax = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        rows.append(torch.cat([log_softmax.new_zeros(1), log_softmax.gather(1, tokens[1:, None])[:, 0]]))
    return torch.where(batch.action_mask_N, torch.cat(rows), 0.0)
