"""From trajectories to the gradient of a real model in packed passes, against the references put together, with each
sequence computed alone: in float64, by plain transformers."""

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.application.learning.experience import ExperienceService
from rollgrad.application.learning.update import UpdateService
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.algorithms.catalogue import ESTIMATORS, POLICY_LOSSES
from rollgrad.domain.algorithms.losses.high_entropy import high_entropy_tokens
from rollgrad.domain.algorithms.settings import Aggregation
from rollgrad.domain.batches.packed import Batch, PackedBatch
from rollgrad.domain.episodes.trajectory import Segment, SegmentKind, Trajectory
from rollgrad.domain.ports.models import PolicyObjective, TokenScores
from rollgrad.entrypoints.composition.rl.algorithm import (
    advantage_is_all,
    make_aggregation,
    make_learned_tokens,
    make_objective,
)
from rollgrad.entrypoints.config_io import structure_config
from rollgrad.testing.agent_executor import make_trajectory
from tests.shards import shards
from tests.unit.domain import references

EXAMPLES = int(os.environ.get("ROLLGRAD_EXAMPLES", "13"))
"""Combinations of settings, with each loss in turn; ROLLGRAD_EXAMPLES=300 before pytest is the long form."""
LOSSES = [loss for loss in POLICY_LOSSES if loss not in ("clip_cov", "kl_cov")]
"""Those that choose tokens by hashes of their places have no reference by sequence."""
NAMES = [
    name
    for name, traits in ESTIMATORS.items()
    if not {"critic", "teacher", "reward_parts", "greedy_baseline"} & {*traits.needs}
]
MODES = ("truncate", "clip", "mask")
GATES = ("ratio", "binary_kl", "tv", "opsm")
CORRECTION = {"low": 0.8, "high": 1.3, "threshold": 0.05}
VERSION = 3
KL = 0.1


class Graded(TorchPolicy):
    """A policy on several `ranks` that moves before its update, and keeps the gradient of a step in its place."""

    def __init__(self, path: Path, ranks: int) -> None:
        model = load_causal_lm(str(path), dtype=torch.float32, device=torch.device("cpu"), flag="--m")
        super().__init__(model, load_tokenizer(str(path), flag="--m"), OptimizerSettings(lr=0.0))
        self.ranks = ranks
        self.gradient: Tensor | None = None

    def score(self, batch: PackedBatch) -> TokenScores:
        own = shards(batch, self.ranks)
        scores = [super(Graded, self).score(part) for part in own.parts]
        columns = {name: [getattr(s, name) for s in scores] for name in ("logprobs_N", "entropy_N")}
        return TokenScores(**{name: own.merged(parts) for name, parts in columns.items()})

    def update(self, micro_batches: Sequence[Batch], objective: PolicyObjective[Batch]) -> dict[str, float]:
        move(self.module)
        for batch in micro_batches:
            for part in shards(batch, self.ranks).parts:
                objective(self._scores(part), part).loss.backward()  # type: ignore[no-untyped-call]
        self.gradient = flat_gradient(self.module)
        return {}


@torch.no_grad()
def move(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter += 0.01 * torch.randn(parameter.shape, generator=generator)


def flat_gradient(model: Any) -> Tensor:
    return torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])


def alone(model: Any, trajectory: Trajectory) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of each token."""
    tokens = trajectory.token_ids_T
    log_softmax = model(tokens[None]).logits[0, :-1].log_softmax(-1)
    logprobs = log_softmax.gather(1, tokens[1:, None])[:, 0]
    none = logprobs.new_zeros(1)
    return torch.cat([none, logprobs]), torch.cat([none, -(log_softmax.exp() * log_softmax).sum(-1)])


def actions_of(trajectory: Trajectory) -> list[Segment]:
    return [segment for segment in trajectory.segments if segment.kind is SegmentKind.ACTION]


def played(seed: int, before: Any) -> list[Trajectory]:
    """Groups of episodes of one turn or two, the second of which may follow a history that was rewritten; many begin
    alike. Their samplers are near the policy."""
    rng, found = random.Random(seed), list[Trajectory]()
    for group in range(rng.randint(1, 2)):
        prompt = rng.choices(range(10, 250), k=rng.randint(2, 6))
        for sample in range(group * 10, group * 10 + rng.randint(2, 4)):
            first, second = ([rng.choice([5, 6]), *rng.choices(range(10, 250), k=rng.randint(0, 4))] for _ in range(2))
            of = {"group_id": group, "sample_id": sample}
            rewards = [rng.choice([0.0, 0.25]), rng.choice([0.0, 0.5, 1.0])]
            match rng.choice(["one", "two", "rewritten"]):
                case "one":
                    found.append(make_trajectory(prompt, first, rewards=rewards[1:], **of))
                case "two":
                    found.append(make_trajectory(prompt, first, [7, 8], second, rewards=rewards, **of))
                case _:
                    history = [*prompt, *first[: rng.randint(0, len(first))], 9]
                    found.append(make_trajectory(prompt, first, rewards=rewards[:1], **of))
                    found.append(make_trajectory(history, second, rewards=rewards[1:], version=1, **of))
    generator = torch.Generator().manual_seed(seed)
    for number, made in enumerate(found):
        with torch.no_grad():
            logprobs, _ = alone(before, made)
        noisy = (logprobs + 0.2 * torch.randn(len(made), generator=generator)).clamp(max=-1e-3).float()
        mask = torch.zeros(len(made), dtype=torch.bool)
        for segment in actions_of(made):
            mask[segment.start : segment.stop] = True
        states = tuple(evolve(s, state=0) if s.kind is SegmentKind.ACTION else s for s in made.segments)
        found[number] = evolve(made, logprobs_T=torch.where(mask, noisy, 0.0), segments=states)
    return found


def sequences_of(trajectories: Sequence[Trajectory]) -> list[references.Sequence]:
    turns: dict[tuple[int, int], int] = {}
    found = []
    for made in trajectories:
        none = [0.0] * len(made)
        one = references.Sequence(made.group_id, made.sample_id, [*none], [*none], [*none], [False] * len(made))
        one.turns = [-1] * len(made)
        for segment in actions_of(made):
            turn = turns.get((made.group_id, made.sample_id), 0)
            turns[made.group_id, made.sample_id] = turn + 1
            for t in range(segment.start, segment.stop):
                one.actions[t], one.turns[t] = True, turn
            one.rewards[segment.stop - 1] = segment.reward
        found.append(one)
    return found


def proximal_logprobs(choice: str, made: Trajectory, *, old: list[float], now: list[float]) -> list[float]:
    """Returns the log-probs that ratios start from; `old` and `now` are the policy's before and after it moved."""
    rollout: list[float] = made.logprobs_T.tolist()
    if choice == "recompute":
        return old
    if choice == "rollout":
        return rollout
    ages = [max(1, VERSION - version) for version in made.versions_T.tolist()]
    return [mu + (pi - mu) * (age - 1) / age for mu, pi, age in zip(rollout, now, ages, strict=True)]


def gradient_alone(config: RLConfig, trajectories: Sequence[Trajectory], before: Any, after: Any) -> Tensor:
    """The gradient of the step, token by token and sequence by sequence."""
    algo, loss, batch = config.algo, config.actor.policy_loss_type, sequences_of(trajectories)
    options = references.Settings(gamma=algo.advantage.gamma, pass_k=algo.advantage.pass_k)
    estimator = algo.advantage.estimator
    rows, _ = references.raw(estimator, batch, options)
    rows = references.whitened_over(batch, rows, ESTIMATORS[estimator].whiten, std_norm=True)
    weights = iter(references.loss_weights(make_aggregation(config), batch, 8))
    with torch.no_grad():
        scored = [alone(before, made) for made in trajectories]
    mask = torch.tensor([action for one in batch for action in one.actions])
    learned = iter(high_entropy_tokens(torch.cat([h for _, h in scored]), mask, algo.top_entropy_quantile).tolist())
    clip = {"clip_low": config.actor.clip_low, "clip_high": config.actor.clip_high}
    correction, own_ratio = algo.correction, algo.old_logprobs == "rollout"
    total = torch.zeros((), dtype=torch.float64)
    for made, one, row, (old, _) in zip(trajectories, batch, rows, scored, strict=True):
        logprobs, _ = alone(after, made)
        now, rollout, count = logprobs.tolist(), made.logprobs_T.tolist(), len(made)
        proximal = proximal_logprobs(str(algo.old_logprobs), made, old=old.tolist(), now=now)
        tokens = references.Tokens(now, proximal, [x or 0.0 for x in row], one.actions, [0] * count, [False] * count)
        judged = evolve(tokens, logprobs=now if own_ratio else proximal, old=rollout)
        own = references.CorrectionSettings(
            str(correction.level), str(correction.mode), str(correction.gate), **CORRECTION, bypass=own_ratio
        )
        mine, kept = [next(weights) for _ in range(count)], [next(learned) for _ in range(count)]
        factors = [
            0.0 if not chosen else 1.0 if correction.level == "off" else references.correction_weight(own, t, judged)
            for t, chosen in enumerate(kept)
        ]
        shares = [weight * factor for weight, factor in zip(mine, factors, strict=True)]
        pulls = references.policy_loss_gradient(loss, tokens, references.LossSettings(**clip), shares)
        if algo.kl.use_loss:  # by k2, half the square of the log-ratio
            held = zip(pulls, mine, now, rollout, strict=True)
            pulls = [pull + weight * KL * (pi - mu) for pull, weight, pi, mu in held]
        total = total + (torch.tensor(pulls, dtype=torch.float64) * logprobs).sum()
    after.zero_grad()
    total.backward()  # type: ignore[no-untyped-call]
    return flat_gradient(after)


@pytest.fixture(scope="module")
def plain(tiny_model_dir: Path) -> tuple[Any, Any]:
    """The model before the update, and as it has moved since."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": torch.float64, "attn_implementation": "eager"}
    before, after = (AutoModelForCausalLM.from_pretrained(tiny_model_dir, **options).eval() for _ in range(2))
    move(after)
    return before, after


@pytest.mark.parametrize("number", range(EXAMPLES))
def test_a_step_is_that_of_each_sequence_alone(tiny_model_dir: Path, plain: tuple[Any, Any], number: int) -> None:
    rng, loss = random.Random(number), LOSSES[number % len(LOSSES)]
    kl, ranks, max_tokens = rng.random() < 0.5, rng.choice([1, 2, 4]), rng.choice([24, 60, 10_000])
    level = rng.choice(["off", "token", "sequence", "geometric"])
    against: dict[str, Any] = {"use_loss": True, "against": "rollout", "estimator": "k2"}
    config = structure_config(
        {
            "actor": {
                "model_name_or_path": "m",
                "policy_loss_type": loss,
                "loss_aggregation": rng.choice(list(Aggregation)),
            },
            "algo": {
                "advantage": {"estimator": rng.choice(NAMES), "gamma": 0.9, "pass_k": 2},
                "correction": {"level": level, "mode": rng.choice(MODES), "gate": rng.choice(GATES), **CORRECTION},
                "kl": {"init_coef": KL, **against} if kl else {"init_coef": 0.0},
                "old_logprobs": rng.choice(["recompute", "rollout", "interpolate"]),
                "top_entropy_quantile": rng.choice([1.0, 0.4]),
            },
            "data": {"prompt_dataset": "d.jsonl"},
            "rollout": {"max_new_tokens": 8},
        }
    )
    before, after = plain
    trajectories = played(number, before)
    policy = Graded(tiny_model_dir, ranks)
    batch = (
        ExperienceService(
            policy,
            reference=None,
            critic=None,
            algo=config.algo,
            reward=config.reward,
            max_length=8,
            max_tokens=max_tokens,
            shares=ranks,
            steps_per_rollout=2,
        )
        .make(trajectories, KL)
        .batch
    )
    UpdateService(
        policy,
        None,
        aggregation=Aggregation(make_aggregation(config)),
        max_length=8,
        batch_size=None,
        epochs=1,
        max_tokens=max_tokens,
        shares=ranks,
        seed=0,
        skip_idle=advantage_is_all(config),
        learn=make_learned_tokens(config),
    ).run(batch, make_objective(config, kl_coef=KL, entropy_coef=0.0, version=VERSION))
    wanted = gradient_alone(config, trajectories, before, after)
    assert policy.gradient is not None
    assert float((policy.gradient - wanted).norm()) <= 1e-4 * float(wanted.norm()) + 1e-6
