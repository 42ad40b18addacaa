"""Which off-policy correction acts by default, and that it mends the gradient of stale samples."""

from typing import Any

import pytest
import torch
from attrs import evolve
from structlog.testing import capture_logs
from torch import Tensor

from rollgrad.application.settings.correction import correction_level, correction_summary, log_correction, may_be_stale
from rollgrad.application.settings.presets import PRESETS
from rollgrad.application.settings.quantized import quantized_engine
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.algorithms.settings import CorrectionLevel, CorrectionMode, OldLogprobs
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.domain.ports.models import TokenScores
from rollgrad.entrypoints.composition.rl.algorithm import make_objective
from rollgrad.entrypoints.config_io import structure_config
from rollgrad.testing.agent_executor import make_trajectory

OFF, TOKEN = CorrectionLevel.OFF, CorrectionLevel.TOKEN


def configured(**settings: Any) -> RLConfig:
    config = RLConfig()
    for name, value in settings.items():
        section, *rest = name.split("__")
        holder: Any = getattr(config, section)
        for key in rest[:-1]:
            holder = getattr(holder, key)
        setattr(holder, rest[-1], value)
    return config


OVERLAPPING: dict[str, Any] = {"train__async_enable": True}
EIGHT_BITS: dict[str, Any] = {"rollout__engine": Engine.VLLM, "vllm__extra": {"quantization": "fp8"}}


@pytest.mark.parametrize(
    ("settings", "stale", "level"),
    [
        ({}, False, OFF),
        ({"algo__correction__level": TOKEN}, False, TOKEN),
        (OVERLAPPING, True, TOKEN),
        (OVERLAPPING | {"train__max_staleness": 0}, False, OFF),
        (OVERLAPPING | {"train__max_staleness": 4}, True, TOKEN),
        (OVERLAPPING | {"algo__correction__level": OFF}, True, OFF),
        (OVERLAPPING | {"algo__correction__level": CorrectionLevel.GEOMETRIC}, True, CorrectionLevel.GEOMETRIC),
        (OVERLAPPING | {"algo__old_logprobs": OldLogprobs.ROLLOUT}, True, OFF),
        (OVERLAPPING | {"algo__old_logprobs": OldLogprobs.INTERPOLATE}, True, OFF),
        (OVERLAPPING | {"rollout__top_p": 0.9}, True, OFF),
        (OVERLAPPING | {"rollout__top_k": 5}, True, OFF),
        ({"rollout__generate_batch_size": 129}, True, TOKEN),
        ({"rollout__generate_batch_size": 128}, False, OFF),
        (EIGHT_BITS, False, TOKEN),
        ({"vllm__extra": {"kv_cache_dtype": "fp8"}, "rollout__engine": Engine.VLLM}, False, TOKEN),
        ({"vllm__extra": {"kv_cache_dtype": "bfloat16"}, "rollout__engine": Engine.VLLM}, False, OFF),
        ({"vllm__extra": {"quantization": None, "seed": 1}, "rollout__engine": Engine.VLLM}, False, OFF),
        (EIGHT_BITS | {"rollout__engine": Engine.EMBEDDED}, False, OFF),
        (EIGHT_BITS | {"algo__old_logprobs": OldLogprobs.ROLLOUT}, False, OFF),
        (EIGHT_BITS | {"algo__correction__level": OFF}, False, OFF),
    ],
    ids=str,
)
def test_the_default_corrects_what_another_policy_samples_and_nothing_else_corrects(
    settings: dict[str, Any], stale: bool, level: CorrectionLevel
) -> None:
    config = configured(**settings)
    assert may_be_stale(config) is stale
    assert correction_level(config) is level
    (logged,) = capture(config)
    apart = stale or quantized_engine(config) is not None
    alone = apart and level is OFF and config.algo.old_logprobs is OldLogprobs.RECOMPUTE
    assert logged["log_level"] == ("warning" if alone else "info")
    assert logged["why"]
    assert (logged["weights"] == "none") is (level is OFF)


def capture(config: RLConfig) -> list[Any]:
    with capture_logs() as logs:
        log_correction(config)
    return logs


def test_the_summary_names_log_probs_and_bounds() -> None:
    one_step = correction_summary(configured(**OVERLAPPING))
    assert one_step == {
        "weights": "token importance ratio, truncate",
        "between": "the policy under training and the log-probs recorded when sampling",
        "bounds": "at most 2.0",
        "why": "samples may be older than the weights",
    }
    several = correction_summary(configured(**OVERLAPPING, train__max_epochs=2))
    assert several["between"].startswith("the policy before the update and")
    quantized = correction_summary(configured(**EIGHT_BITS))["why"]
    assert quantized.endswith("but of an engine that quantises (vllm.extra.quantization fp8)")
    masked = correction_summary(configured(**OVERLAPPING, algo__correction__mode=CorrectionMode.MASK))
    assert masked["bounds"] == "0 outside 0.5 to 2.0"


@pytest.mark.parametrize("name", PRESETS)
def test_no_preset_leaves_stale_samples_uncorrected(name: str) -> None:
    nested: dict[str, Any] = {"train": {"async_enable": True}}
    for key, value in PRESETS[name].items():
        *sections, last = key.split(".")
        branch = nested
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[last] = value
    config = structure_config(nested)
    assert correction_level(config) is not OFF or config.algo.old_logprobs is not OldLogprobs.RECOMPUTE


REWARDS_V = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
"""Advantage of each of three replies of one token."""

SAMPLED = (5, 3, 2)
"""How often the old policy drew each of them: exactly as likely as it holds them, so that the batch's mean is its
expectation."""

TOKENS = (7, 8, 9)


def stale_batch(old_logprobs_V: Tensor | None) -> PackedBatch:
    drawn = [reply for reply, count in enumerate(SAMPLED) for _ in range(count)]
    batch = pack([make_trajectory([1], [TOKENS[reply]], sample_id=index) for index, reply in enumerate(drawn)])
    actions_N = batch.action_mask_N

    def column(values_V: Tensor) -> Tensor:
        full_N = torch.zeros(batch.token_count, dtype=torch.float64)
        return full_N.masked_scatter(actions_N, values_V.detach()[drawn])

    sampler_V = (torch.tensor(SAMPLED, dtype=torch.float64) / sum(SAMPLED)).log()
    return evolve(
        batch,
        rollout_logprobs_N=column(sampler_V),
        advantages_N=column(REWARDS_V),
        old_logprobs_N=None if old_logprobs_V is None else column(old_logprobs_V),
        loss_weights_N=actions_N.double() / len(drawn),
    )


def gradient(config: RLConfig, logits_V: Tensor, *, old: bool) -> Tensor:
    """Returns the gradient of the objective that the run would minimise, by the policy's logits."""
    logits_V = logits_V.clone().requires_grad_()
    logprobs_V = logits_V.log_softmax(0)
    batch = stale_batch(logprobs_V if old else None)
    index_N = torch.tensor([TOKENS.index(int(t)) if int(t) in TOKENS else 0 for t in batch.tokens_N])
    scores = TokenScores(logprobs_N=logprobs_V[index_N], entropy_N=torch.zeros(batch.token_count))
    objective = make_objective(config, kl_coef=0.0, entropy_coef=0.0, version=1)
    objective(scores, batch).loss.backward()
    assert logits_V.grad is not None
    return logits_V.grad


def reference(logits_V: Tensor, cap: float) -> Tensor:
    """-E_mu[min(pi / mu, cap) A grad log pi], in float64 by hand (Yao et al. 2025)."""
    pi_V, mu_V = logits_V.softmax(0), torch.tensor(SAMPLED, dtype=torch.float64) / sum(SAMPLED)
    weight_V = (pi_V / mu_V).clamp(max=cap)
    scores_VV = torch.eye(3, dtype=torch.float64) - pi_V  # grad of log pi(a) by the logits: one-hot(a) - pi
    return -((mu_V * weight_V * REWARDS_V)[:, None] * scores_VV).sum(0)


NEAR = torch.tensor([0.4, 0.35, 0.25], dtype=torch.float64).log()
"""No ratio above 2: truncated importance sampling is unbiased."""

FAR = torch.tensor([0.1, 0.1, 0.8], dtype=torch.float64).log()
"""A ratio of 4, which is truncated."""


@pytest.mark.parametrize("steps", [1, 2], ids=["one step", "several steps"])
@pytest.mark.parametrize("logits_V", [NEAR, FAR], ids=["near", "far"])
def test_stale_samples_give_a_biased_gradient_and_the_default_mends_it(logits_V: Tensor, steps: int) -> None:
    default = configured(**OVERLAPPING, train__max_epochs=steps)
    on_policy, truncated = reference(logits_V, cap=float("inf")), reference(logits_V, cap=2.0)
    corrected = gradient(default, logits_V, old=steps > 1)
    torch.testing.assert_close(corrected, truncated, rtol=1e-12, atol=1e-12)
    if logits_V is NEAR:
        torch.testing.assert_close(corrected, on_policy, rtol=1e-12, atol=1e-12)
    uncorrected = gradient(
        configured(**OVERLAPPING, train__max_epochs=steps, algo__correction__level=OFF), logits_V, old=steps > 1
    )
    assert float((uncorrected - on_policy).norm()) > 0.1 * float(on_policy.norm())
    assert float((uncorrected - on_policy).norm()) > float((corrected - on_policy).norm())


def test_runs_on_fresh_samples_have_the_loss_they_had() -> None:
    plain = configured(algo__correction__level=OFF)
    for settings in ({}, OVERLAPPING | {"train__max_staleness": 0}):
        assert torch.equal(gradient(configured(**settings), NEAR, old=False), gradient(plain, NEAR, old=False))


@pytest.mark.parametrize(("level", "top_k", "said"), [(OFF, 0, "warning"), (OFF, 128, "info"), (TOKEN, 128, "info")])
def test_score_centering_is_told_and_stale_samples_may_do_with_it_alone(
    level: CorrectionLevel, top_k: int, said: str
) -> None:
    config = configured(**OVERLAPPING, algo__correction__level=level, algo__score_centering_top_k=top_k)
    with capture_logs() as logs:
        log_correction(config)
    (log,) = logs
    assert log["log_level"] == said
    assert log.get("score_centering") == ("by the sampler's 128 likeliest tokens" if top_k else None)
