"""Asynchronous runs on a tiny real model: equal to synchronous ones without staleness, exact in every token with it."""

import json
import math
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

import rollgrad
from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.train import PartialRollout
from rollgrad.domain.algorithms.settings import CorrectionLevel
from rollgrad.domain.control.staleness import StalenessUnit, StalePolicy
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import RewardRequest
from rollgrad.domain.episodes.trajectory import NO_VERSION, Trajectory
from rollgrad.domain.ports.environment import Action, StepResult
from rollgrad.testing.reward_source import FakeRewardSource
from tests.adapted_models import plain
from tests.example_runs import logged

TOLERANCE = 1e-4
"""Largest difference of a float32 log-prob: products are summed in another order, no more."""


class TwoTurns:
    """Asks twice, and rewards the share of letters."""

    def __init__(self) -> None:
        self.turns = 0

    async def reset(self, prompt: Prompt) -> str:
        return ""

    async def step(self, action: Action) -> StepResult:
        self.turns += 1
        return StepResult(observation=" again:", reward=letters(action.text), terminated=self.turns == 2)

    async def close(self) -> None:
        pass


def letters(text: str) -> float:
    return sum(character.isalpha() for character in text) / (1 + len(text))


def judge(request: RewardRequest) -> float:
    return letters(request.response)


def single_turn(config: RLConfig) -> dict[str, Any]:
    return {"reward": FakeRewardSource(judge)}


def environment(config: RLConfig) -> dict[str, Any]:
    return {"environment": TwoTurns}


def attempts(config: RLConfig) -> dict[str, Any]:
    config.agent.attempts = 2
    config.rollout.stop_strings = ("\ufffd", *string.digits)  # a random model seldom ends a turn by itself
    return {"reward": FakeRewardSource(judge)}


MODES = [single_turn, environment, attempts]
Mode = Callable[[RLConfig], dict[str, Any]]


@pytest.fixture
def make(tiny_model_dir: Path, tmp_path: Path) -> Callable[..., RLConfig]:
    rows = [{"input": f"What is {a} plus {b}?", "label": str(a + b)} for a in range(1, 4) for b in range(1, 4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def config(name: str, **train: Any) -> RLConfig:
        made = RLConfig()
        made.actor.model_name_or_path, made.actor.dtype = str(tiny_model_dir), "float32"  # type: ignore[assignment]
        made.actor.adam.lr = 1e-3
        made.algo.advantage.estimator = "group_norm"
        made.data.prompt_dataset, made.data.label_key = str(tmp_path / "prompts.jsonl"), "label"
        made.rollout.batch_size, made.rollout.n_samples_per_prompt, made.rollout.max_new_tokens = 2, 2, 12
        made.train.max_steps, made.train.seed = 4, 5
        made.ckpt.output_dir, made.logger.console = str(tmp_path / name), False
        for key, value in train.items():
            setattr(made.train, key, value)
        return made

    return config


def rows(config: RLConfig) -> list[dict[str, float]]:
    return logged(Path(config.ckpt.output_dir))


def parameters(path: Path) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in plain(path, torch.float32).named_parameters()}


@pytest.mark.parametrize("mode", MODES)
def test_without_staleness_the_parameters_are_those_of_a_synchronous_run(
    make: Callable[..., RLConfig], mode: Mode
) -> None:
    sync, overlapping = make("sync"), make("async", async_enable=True, max_staleness=0)
    results = [rollgrad.train(config, **mode(config)) for config in (sync, overlapping)]
    ours, theirs = parameters(results[1].model), parameters(results[0].model)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for mine, other in zip(rows(overlapping), rows(sync), strict=True):
        # The engine's log-probs are rounded by who is decoded together, which no run repeats exactly.
        same = [key for key in other if not key.startswith(("time/", "memory/", "policy/mismatch"))]
        assert {key: mine[key] for key in same} == pytest.approx({key: other[key] for key in same}, rel=1e-5)
        assert mine["staleness/max"] == 0


@pytest.mark.parametrize(
    ("max_staleness", "mode", "partial"),
    [
        pytest.param(staleness, mode, partial, marks=() if place == kind else pytest.mark.wide)
        for place, (staleness, mode) in enumerate([(1, single_turn), (2, environment), (3, attempts)])
        for kind, partial in enumerate(PartialRollout)
    ],
)
def test_stale_samples_are_corrected_and_trained_on(
    make: Callable[..., RLConfig], tiny_model_dir: Path, partial: PartialRollout, max_staleness: int, mode: Mode
) -> None:
    config = make("out", async_enable=True, max_staleness=max_staleness, max_steps=6, partial_rollout=partial)
    config.algo.correction.level = CorrectionLevel.TOKEN
    result = rollgrad.train(config, **mode(config))
    assert result.steps == 6
    for row in rows(config):
        assert all(math.isfinite(value) for value in row.values())
        assert row["staleness/max"] <= max_staleness
        assert sum(row[f"staleness/share_lag_{lag}"] for lag in range(max_staleness + 1)) == pytest.approx(1.0)
        assert 0 <= row["time/trainer_idle_share"] <= 1
        assert 0 <= row["time/generation_idle_share"] <= 1
    assert max(row["staleness/max"] for row in rows(config)) > 0, "rollouts and updates did overlap"
    before, after = parameters(tiny_model_dir), parameters(result.model)
    assert max(float((before[name] - after[name]).abs().max()) for name in before) > 1e-4


def test_dropping_counts_what_it_drops(make: Callable[..., RLConfig]) -> None:
    config = make("out", async_enable=True, stale_policy=StalePolicy.DROP, staleness_unit=StalenessUnit.TOKEN)
    config.ckpt.state_steps = 4
    result = rollgrad.train(config, **single_turn(config))
    state = json.loads((result.output_dir / "model.state.json").read_text())
    assert state["trained"] == 4 * 2
    dropped = sum(row.get("rollout/rejected_stale", 0.0) for row in rows(config))
    assert state["next_group"] == state["trained"] + dropped


def log_softmax_at(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


@torch.no_grad()
def under_its_own_weights(models: Sequence[Any], t: Trajectory) -> torch.Tensor:
    """Log-prob of each sampled token under the weights that drew it, over the whole sequence before it."""
    full = [log_softmax_at(model(t.token_ids_T[None]).logits[0, :-1], t.token_ids_T[1:]) for model in models]
    actions = (t.versions_T != NO_VERSION).nonzero()[:, 0]
    return torch.stack([full[int(t.versions_T[i])][i - 1] for i in actions])


@torch.no_grad()
def with_kept_keys(models: Sequence[Any], t: Trajectory) -> torch.Tensor:
    """Log-probs where keys and values are those of the weights that a token was first passed through."""
    from transformers import DynamicCache

    versions = t.versions_T.tolist()
    first = next(i for i, version in enumerate(versions) if version != NO_VERSION)
    found, cache, start = [], DynamicCache(), 0
    for index in range(first, len(versions)):
        if index + 1 == len(versions) or versions[index + 1] != versions[index]:
            chunk = t.token_ids_T[None, start:index]
            logits = models[versions[index]](chunk, past_key_values=cache, use_cache=True).logits[0]
            picked = log_softmax_at(logits, t.token_ids_T[start + 1 : index + 1])
            found.append(picked[max(0, first - 1 - start) :])
            start = index
    return torch.cat(found)


@pytest.mark.parametrize(
    ("partial", "expected"),
    [
        (PartialRollout.NONE, under_its_own_weights),
        (PartialRollout.KEEP, with_kept_keys),
        (PartialRollout.RECOMPUTE, under_its_own_weights),
    ],
    ids=["none", "keep", "recompute"],
)
def test_each_token_has_the_logprob_of_the_weights_that_drew_it(
    make: Callable[..., RLConfig],
    tiny_model_dir: Path,
    partial: PartialRollout,
    expected: Callable[[Sequence[Any], Trajectory], torch.Tensor],
) -> None:
    config = make("out", async_enable=True, max_staleness=3, max_steps=6, partial_rollout=partial)
    config.algo.correction.level = CorrectionLevel.TOKEN
    config.rollout.max_new_tokens, config.ckpt.save_steps = 150, 1
    config.actor.adam.lr = 1e-2  # weights that differ clearly from version to version
    seen: list[Trajectory] = []

    def keep(step: int, groups: Sequence[RolloutGroup]) -> None:
        seen.extend(t for group in groups for t in group.trajectories)

    result = rollgrad.train(config, sample_log=keep, **single_turn(config))
    paths = [tiny_model_dir, *(result.output_dir / f"step_{step}" for step in range(1, 6)), result.model]
    models = [plain(path, torch.float32) for path in paths]
    mixed = 0
    for t in seen:
        sampled = t.versions_T != NO_VERSION
        wanted = expected(models, t)
        torch.testing.assert_close(t.logprobs_T[sampled], wanted, atol=TOLERANCE, rtol=TOLERANCE)
        versions = t.versions_T[sampled]
        assert (versions.diff() >= 0).all()
        mixed += len(versions.unique()) > 1
    assert (mixed > 0) is (partial is not PartialRollout.NONE)
    assert len({t.sample_id for t in seen}) == 6 * 2 * 2


def test_an_interrupted_run_goes_on(make: Callable[..., RLConfig]) -> None:
    """Ctrl-C while groups are in flight, then --ckpt.resume: every prompt of the run is trained on once."""
    seen: list[int] = []

    def interrupt(step: int, groups: Sequence[RolloutGroup]) -> None:
        seen.extend(group.group_id for group in groups)
        if step == 2:
            import asyncio

            task = next(t for t in asyncio.all_tasks() if t.get_coro().__name__ == "heeding_signals")  # type: ignore[union-attr]
            task.cancel()

    config = make("out", async_enable=True, max_steps=5)
    config.ckpt.state_steps = 1
    first = rollgrad.train(config, sample_log=interrupt, **single_turn(config))
    assert (first.interrupted, first.steps) == (True, len(seen) // 2)
    again = make("out", async_enable=True, max_steps=5)
    again.ckpt.state_steps, again.ckpt.resume = 1, True
    second = rollgrad.train(
        again, sample_log=lambda step, groups: seen.extend(g.group_id for g in groups), **single_turn(again)
    )
    assert (second.interrupted, second.steps) == (False, 5)
    assert sorted(seen) == list(range(5 * 2))
    assert [row["step"] for row in rows(again)] == [1, 2, 3, 4, 5]


def test_by_default_a_run_that_overlaps_corrects_stale_samples_and_says_so(make: Callable[..., RLConfig]) -> None:
    config = make("out", async_enable=True, max_steps=6)
    config.actor.adam.lr = 1e-2
    with capture_logs() as logs:
        rollgrad.train(config, **single_turn(config))
    (said,) = [entry for entry in logs if entry["event"] == "off-policy correction"]
    assert (said["weights"], said["bounds"]) == ("token importance ratio, truncate", "at most 2.0")
    fresh, stale = [], []
    for row in rows(config):
        (stale if row["staleness/max"] else fresh).append(row["policy/correction_weight"])
    assert stale
    assert all(abs(weight - 1) > TOLERANCE for weight in stale)
    assert fresh == pytest.approx([1.0] * len(fresh), abs=TOLERANCE)

    config = make("sync", max_steps=2)
    with capture_logs() as logs:
        rollgrad.train(config, **single_turn(config))
    assert [entry["weights"] for entry in logs if entry["event"] == "off-policy correction"] == ["none"]
    assert not any("policy/correction_weight" in row for row in rows(config))
