"""GAE and returns of ragged sequences: here over packed tokens, elsewhere by a loop over time on padded tensors.

The loop is the one of OpenRLHF, TRL and verl: every sequence at once, one Python iteration a time step. Both get their
own layout for free, take turns, and must agree. Last line: `ratio R`, the loop's median seconds for GAE plus returns
over rollgrad's.

    python benchmarks/advantages.py --rounds 7
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import tyro
from attrs import define, evolve, field, frozen
from torch import Tensor

from rollgrad.domain.algorithms.estimators import ESTIMATORS, EstimatorInput, EstimatorParams

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.machine import OtherProcesses, measure

GAE_BYTES, RETURNS_BYTES = 21, 13
"""A token's least traffic: two rewards, the mask and for GAE the value are read; advantages and, for GAE, returns are
written; four bytes each, the mask one."""
ABSOLUTE, RELATIVE = 1e-3, 1e-4
"""Agreement of sums of up to 4,096 float32 numbers in different orders."""


@define(kw_only=True)
class Work:
    """The work that both do."""

    sequences: int = 1024
    """Sequences of a batch."""
    longest: int = 4096
    """Most action tokens of a sequence; lengths are uniform from 1 to this, and one has exactly as many."""
    prompt_tokens: int = 0
    """Tokens before each reply that are no actions: rollgrad's packed batch has them, the loop's tensors do not."""
    rounds: int = 7
    """Counted rounds, after one that is not counted."""
    gamma: float = 1.0
    """Discount of a token."""
    lambd: float = 0.95
    """GAE's lambda."""
    seed: int = 0
    """Seed of lengths and numbers."""
    smoke: bool = False
    """Smallest work, to see that the script runs."""


@frozen
class Padded:
    """[S, T] with actions first in each row, and whatever behind them."""

    rewards_ST: Tensor
    values_ST: Tensor
    mask_ST: Tensor


def make(work: Work) -> tuple[EstimatorInput, Padded]:
    """Returns equal numbers in both layouts: an outcome reward on the last token, small rewards on all, values."""
    torch.manual_seed(work.seed)
    actions_S = torch.randint(1, work.longest + 1, (work.sequences,))
    actions_S[0] = work.longest
    lengths_S = actions_S + work.prompt_tokens
    total, starts_S = int(lengths_S.sum()), lengths_S.cumsum(0) - lengths_S
    position_N = torch.arange(total) - torch.repeat_interleave(starts_S, lengths_S)
    mask_N = position_N >= work.prompt_tokens
    rewards_N = torch.zeros(total)
    rewards_N[lengths_S.cumsum(0) - 1] = torch.randn(work.sequences)
    token_rewards_N = torch.where(mask_N, 0.01 * torch.randn(total), 0.0)
    values_N = torch.randn(total)
    inputs = EstimatorInput(
        rewards_N=rewards_N,
        token_rewards_N=token_rewards_N,
        values_N=values_N,
        action_mask_N=mask_N,
        lengths_S=lengths_S,
        group_ids_S=torch.arange(work.sequences),
        sample_ids_S=torch.arange(work.sequences),
    )
    mask_ST = torch.arange(work.longest) < actions_S[:, None]
    rewards_ST, values_ST = torch.zeros(mask_ST.shape), torch.zeros(mask_ST.shape)
    rewards_ST[mask_ST] = (rewards_N + token_rewards_N)[mask_N]
    values_ST[mask_ST] = values_N[mask_N]
    return inputs, Padded(rewards_ST, values_ST, mask_ST)


def loop_gae(padded: Padded, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns, step by step from the end."""
    rewards_ST, values_ST = padded.rewards_ST * padded.mask_ST, padded.values_ST * padded.mask_ST
    steps = rewards_ST.shape[1]
    advantage_S = torch.zeros(len(rewards_ST))
    columns = []
    for t in reversed(range(steps)):
        next_S = values_ST[:, t + 1] if t < steps - 1 else torch.zeros(len(rewards_ST))
        delta_S = rewards_ST[:, t] + gamma * next_S - values_ST[:, t]
        advantage_S = delta_S + gamma * lambd * advantage_S
        columns.append(advantage_S)
    advantages_ST = torch.stack(columns[::-1], dim=1)
    return advantages_ST, advantages_ST + values_ST


def loop_returns(padded: Padded, gamma: float) -> Tensor:
    """Discounted rewards to come, step by step from the end."""
    rewards_ST = padded.rewards_ST * padded.mask_ST
    returns_ST = torch.zeros_like(rewards_ST)
    return_S = torch.zeros(len(rewards_ST))
    for t in reversed(range(rewards_ST.shape[1])):
        return_S = rewards_ST[:, t] + gamma * return_S
        returns_ST[:, t] = return_S
    return returns_ST


@define
class Contender:
    """GAE and returns one way, and how long each took."""

    name: str
    gae: Callable[[], object]
    returns: Callable[[], object]
    gae_seconds: list[float] = field(factory=list)
    returns_seconds: list[float] = field(factory=list)

    def round(self) -> None:
        """Does and times both."""
        self.gae_seconds.append(seconds(self.gae))
        self.returns_seconds.append(seconds(self.returns))

    @property
    def median(self) -> float:
        """Median seconds of GAE plus returns over the counted rounds."""
        return statistics.median(
            gae + returns for gae, returns in list(zip(self.gae_seconds, self.returns_seconds, strict=True))[1:]
        )

    def report(self, floor: float) -> str:
        """Milliseconds of all parts and rounds."""
        gae, returns = (statistics.median(times[1:]) for times in (self.gae_seconds, self.returns_seconds))
        pairs = zip(self.gae_seconds[1:], self.returns_seconds[1:], strict=True)
        each = " ".join(f"{1e3 * (a + b):.0f}" for a, b in pairs)
        return (
            f"{self.name:9} GAE {1e3 * gae:6.1f} ms, returns {1e3 * returns:6.1f} ms, both {1e3 * self.median:6.1f} ms "
            f"({self.median / floor:.1f} x the floor); rounds: {each}"
        )


def seconds(work: Callable[[], object]) -> float:
    """How long `work` took."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def check(inputs: EstimatorInput, padded: Padded, params: EstimatorParams) -> None:
    """Both ways give the same numbers.

    Raises:
        AssertionError: they do not.
    """
    gae, reinforce = (ESTIMATORS[name](inputs, params) for name in ("gae", "reinforce"))
    advantages_ST, targets_ST = loop_gae(padded, params.gamma, params.lambd)
    returns_ST = loop_returns(padded, params.gamma)
    pairs = ((gae.advantages_N, advantages_ST), (gae.returns_N, targets_ST), (reinforce.returns_N, returns_ST))
    for ours_N, theirs_ST in pairs:
        theirs_A = theirs_ST[padded.mask_ST]
        torch.testing.assert_close(ours_N[inputs.action_mask_N], theirs_A, rtol=RELATIVE, atol=ABSOLUTE)
    worst = max(
        float((ours_N[inputs.action_mask_N] - theirs_ST[padded.mask_ST]).abs().max()) for ours_N, theirs_ST in pairs
    )
    print(f"both agree: largest difference {worst:.1e}")


def main(work: Work) -> None:
    """Measures both in turns and prints what came of it."""
    if work.smoke:
        work = evolve(work, sequences=8, longest=16, rounds=1)
    inputs, padded = make(work)
    params = EstimatorParams(gamma=work.gamma, lambd=work.lambd)
    check(inputs, padded, params)
    ours = Contender(
        "rollgrad", lambda: ESTIMATORS["gae"](inputs, params), lambda: ESTIMATORS["reinforce"](inputs, params)
    )
    loop = Contender("loop", lambda: loop_gae(padded, work.gamma, work.lambd), lambda: loop_returns(padded, work.gamma))
    others = OtherProcesses()
    for _ in range(work.rounds + 1):
        ours.round()
        loop.round()
    share = others.share()
    bandwidth = measure(torch.float32, smoke=work.smoke).bandwidth
    tokens, slots = len(inputs.action_mask_N), padded.mask_ST.numel()
    actions = int(inputs.action_mask_N.sum())
    least = tokens * (GAE_BYTES + RETURNS_BYTES)
    floor = least / bandwidth
    print(
        f"{work.sequences:,} sequences of up to {work.longest:,} action tokens: {actions:,} actions of {tokens:,} "
        f"tokens packed, {slots:,} places padded; float32, {torch.get_num_threads()} threads, other processes took "
        f"{share:.0%}"
    )
    print(
        f"least traffic {tokens * GAE_BYTES / 1e6:.0f} + {tokens * RETURNS_BYTES / 1e6:.0f} MB (GAE + returns) at "
        f"{bandwidth / 1e9:.1f} GB/s read, measured now: floor {1e3 * floor:.1f} ms"
    )
    print(ours.report(floor))
    print(loop.report(floor))
    print(f"rollgrad: {actions / ours.median / 1e6:.0f} M action tokens/s through both")
    print(f"ratio {loop.median / ours.median:.2f}")


if __name__ == "__main__":
    main(tyro.cli(Work, description=__doc__))
