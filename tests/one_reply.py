"""A policy that learns one reply, and what it thinks of others."""

from collections.abc import Sequence

from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.domain.ports.models import LossOutput, TokenScores
from rollgrad.testing.agent_executor import make_trajectory

PROMPT = (65, 66, 67)


def learn(policy: TorchPolicy, steps: int = 3) -> None:
    """Changes all weights."""
    batch = pack([make_trajectory(PROMPT, [7, 8, 9, 200, 201])])

    def likelihood(scores: TokenScores, part: PackedBatch) -> LossOutput:
        return LossOutput(loss=-scores.logprobs_N.sum())

    for _ in range(steps):
        policy.update([batch], likelihood)


def scores(policy: TorchPolicy, prompt: Sequence[int], reply: Sequence[int]) -> list[float]:
    """The trainer's log-probs of `reply`."""
    return policy.score(pack([make_trajectory(prompt, reply)])).logprobs_N[len(prompt) :].tolist()
