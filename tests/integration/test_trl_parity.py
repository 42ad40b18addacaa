"""Losses, gradients, advantages and off-policy weights against TRL's own code on the same numbers.

TRL's trainers run as they are from rewards to loss; only generation, the reward functions and the model are replaced,
by tensors that the test gives. Where both differ on purpose, a test states the difference.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve, fields_dict, frozen
from torch import Tensor

from rollgrad.adapters.data.datasets.teacher_template import TeacherTemplate, without_thinking
from rollgrad.application.learning.teacher_prompts import ToldOfReplies
from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.application.settings.presets import PRESETS
from rollgrad.domain.algorithms.estimators import EstimatorInput, EstimatorParams, estimate, group
from rollgrad.domain.algorithms.losses.aggregation import loss_weights
from rollgrad.domain.algorithms.losses.contract import PolicyLossParams
from rollgrad.domain.algorithms.losses.corrections import correction_weights
from rollgrad.domain.algorithms.losses.distillation import divergence
from rollgrad.domain.algorithms.losses.high_entropy import high_entropy_tokens
from rollgrad.domain.algorithms.losses.objectives import PolicyLossObjective
from rollgrad.domain.algorithms.settings import CorrectionSettings
from rollgrad.domain.batches.packed import RolloutBatch
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.ports.models import TokenScores
from rollgrad.testing.agent_executor import make_trajectory

TOLERANCE = 1e-5
TRL_STD_FLOOR = 1e-4
"""TRL adds this to a standard deviation, where rollgrad adds 1e-9."""
GROUPS, SAMPLES, MAX_LENGTH = 3, 4, 16
BETA, CLIP = 0.3, (0.15, 0.25)
OF_LOSSES = ("dual_clip", "sapo_tau", "vespo_k", "vespo_lambda")
"""Settings of losses besides the clip range."""


@frozen(kw_only=True, eq=False)
class Case:
    """Packed random sequences: a prompt, then a reply whose actions may have a tool's tokens between them."""

    lengths_S: Tensor
    prompts_S: Tensor
    mask_N: Tensor
    logprobs_N: Tensor
    old_N: Tensor
    rollout_N: Tensor
    ref_N: Tensor
    entropy_N: Tensor
    rewards_S: Tensor

    @classmethod
    def make(cls, *, tools: bool = True, spread: float = 0.3, off: float = 0.3, seed: int = 0) -> "Case":
        """`spread`: how far the policies are apart; `off`: how far the sampler is from the proximal one."""
        torch.manual_seed(seed)
        count = GROUPS * SAMPLES
        prompts_S = (torch.arange(count) // SAMPLES) + 1
        lengths_S = prompts_S + torch.randint(3, 10, (count,))
        total = int(lengths_S.sum())
        starts_S = lengths_S.cumsum(0) - lengths_S
        position_N = torch.arange(total) - torch.repeat_interleave(starts_S + prompts_S, lengths_S)
        mask_N = position_N >= 0
        if tools:
            mask_N &= position_N != 1
        old_N = -2 * torch.rand(total) - 0.5
        return cls(
            lengths_S=lengths_S,
            prompts_S=prompts_S,
            mask_N=mask_N,
            logprobs_N=old_N + spread * torch.randn(total),
            old_N=old_N,
            rollout_N=old_N + off * torch.randn(total),
            ref_N=old_N + spread * torch.randn(total),
            entropy_N=torch.rand(total),
            rewards_S=torch.randn(count),
        )

    @property
    def starts_S(self) -> Tensor:
        return self.lengths_S.cumsum(0) - self.lengths_S

    @property
    def sequence_N(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(self.lengths_S)), self.lengths_S)

    @property
    def groups_S(self) -> Tensor:
        return torch.arange(len(self.lengths_S)) // SAMPLES

    def padded(self, values_N: Tensor) -> Tensor:
        """Replies only, [B, T], zeros behind them; differentiable."""
        rows = [
            values_N[start + prompt : start + length]
            for start, prompt, length in zip(
                self.starts_S.tolist(), self.prompts_S.tolist(), self.lengths_S.tolist(), strict=True
            )
        ]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def packed(self, values_BT: Tensor) -> Tensor:
        """[N] with 0 at what is no action."""
        values_N = torch.zeros(len(self.mask_N), dtype=values_BT.dtype)
        replies_N = self.reply_N
        values_N[replies_N] = values_BT[self.padded(replies_N.float()).bool()]
        return torch.where(self.mask_N, values_N, 0)

    @property
    def reply_N(self) -> Tensor:
        """Actions and the tools' tokens between them."""
        position_N = torch.arange(len(self.mask_N)) - self.starts_S[self.sequence_N]
        return position_N >= self.prompts_S[self.sequence_N]


def piece(case: Case, low: int, high: int) -> Case:
    """The sequences from `low` to `high`."""
    tokens_N = (case.sequence_N >= low) & (case.sequence_N < high)
    columns = {name: getattr(case, name) for name in fields_dict(Case)}
    return Case(
        **{name: column[low:high] if name.endswith("_S") else column[tokens_N] for name, column in columns.items()}
    )


class OneProcess:
    """Stands in for accelerate."""

    device = torch.device("cpu")
    num_processes = 1
    process_index = 0
    sync_gradients = True

    def gather(self, values: Tensor) -> Tensor:
        return values

    def pad_across_processes(self, values: Tensor, dim: int, pad_index: float) -> Tensor:
        return values

    def reduce(self, values: Tensor, reduction: str) -> Tensor:
        return values


class Gathering(OneProcess):
    """Says that the whole step has `tokens` action tokens."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens

    def gather(self, values: Tensor) -> Tensor:
        return self._tokens if values.dtype == torch.int64 and values.dim() == 0 else values


class StandIn:
    """A model that only says which tensors are meant."""

    training = True
    is_gradient_checkpointing = False


@frozen(eq=False)
class Outcome:
    """TRL's loss, its gradient for each token's log-prob, and what it computed before: advantages and ratios."""

    loss: Tensor
    gradient_N: Tensor
    inputs: dict[str, Tensor]


def trainer_class(kind: str) -> Any:
    """TRL's class of that name. It imports vLLM, which takes longer than all tests of this file: only who runs them
    should wait for it."""
    if kind == "GMPOTrainer":
        from trl.experimental.gmpo import GMPOTrainer

        return GMPOTrainer
    import trl

    return getattr(trl, kind)


def run_trl(kind: str, case: Case, **settings: Any) -> Outcome:
    """From the rewards to the loss in a trainer of `kind`; `settings` replace its attributes, or fields of its
    arguments."""
    args: dict[str, Any] = {
        "per_device_train_batch_size": len(case.lengths_S),
        "gradient_checkpointing_kwargs": None,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "use_bias_correction_kl": False,
        "delta": None,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
    }
    args |= {name: settings.pop(name) for name in list(settings) if name in args}
    logprobs_N = case.logprobs_N.clone().requires_grad_()
    policy, reference = StandIn(), StandIn()
    replies = case.padded(case.reply_N.float()).bool()
    mask_BT = case.padded(case.mask_N.float()).bool()
    ends = settings.pop("ends", [7] * len(replies))  # the last token of each reply; 7 ends one
    ids = [[7] * (int(n) - 1) + [end] for n, end in zip(replies.sum(1), ends, strict=True)]

    def rows(values_BT: Tensor) -> list[list[Any]]:
        return [row[: len(own)].tolist() for row, own in zip(values_BT, ids, strict=True)]

    generated: tuple[Any, ...] = ([[5] * int(n) for n in case.prompts_S], ids, ["reply"] * len(ids))
    if kind != "RLOOTrainer":
        sampled = rows(case.padded(case.rollout_N)) if settings.get("use_vllm") else None
        generated = (*generated[:2], rows(mask_BT.long()), generated[2], sampled, {}, None, None)

    def scores(model: StandIn, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        current_N = logprobs_N if torch.is_grad_enabled() else case.old_N
        values_N = case.ref_N if model is reference else current_N
        return case.padded(values_N), case.padded(case.entropy_N), None

    attributes: dict[str, Any] = {
        "accelerator": OneProcess(),
        "args": SimpleNamespace(**args),
        "model": policy,
        "ref_model": reference,
        "_get_per_token_logps_and_entropies": scores,
        "_generate": lambda prompts: generated,
        "_calculate_rewards": lambda *_: case.rewards_S[:, None],
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "reward_weights": torch.ones(1),
        "reward_funcs": [None],
        "reward_func_names": ["reward"],
        "num_generations": SAMPLES,
        "num_iterations": 2,
        "scale_rewards": "none",
        "multi_objective_aggregation": "sum_then_normalize",
        "normalize_advantages": False,
        "reward_clip_range": None,
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": CLIP[0],
        "epsilon_high": CLIP[1],
        "beta": 0.0,
        "max_completion_length": MAX_LENGTH,
        "current_gradient_accumulation_steps": 1,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_min": None,
        "vllm_importance_sampling_clip_max": 3.0,
        "top_entropy_quantile": 1.0,
        "use_adaptive_entropy": False,
        "_entropy_bonus_enabled": False,
        "entropy_coef": 0.0,
        "aux_loss_enabled": False,
        "mask_truncated_completions": False,
        "eos_token_ids": [7],
        "pad_to_multiple_of": None,
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "log_multimodal": False,
        "_metrics": {"train": defaultdict(list)},
        "_logs": defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)},
        "_pending_extra_logs": {},
        "_pending_metrics": {},
    }
    trainer: Any = object.__new__(trainer_class(kind))
    for name, value in (attributes | settings).items():
        setattr(trainer, name, value)
    inputs = trainer._generate_and_score_completions([{"prompt": "sum"}] * len(ids))
    loss = trainer._compute_loss(policy, inputs)
    (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
    return Outcome(loss.detach(), gradient_N, inputs)


def estimator_input(case: Case, token_rewards_N: Tensor | None = None) -> EstimatorInput:
    rewards_N = torch.zeros(len(case.mask_N))
    rewards_N[case.lengths_S.cumsum(0) - 1] = case.rewards_S
    return EstimatorInput(
        rewards_N=rewards_N,
        token_rewards_N=torch.zeros(len(case.mask_N)) if token_rewards_N is None else token_rewards_N,
        action_mask_N=case.mask_N,
        lengths_S=case.lengths_S,
        group_ids_S=case.groups_S,
        sample_ids_S=torch.arange(len(case.lengths_S)),
        reward_parts_SK=case.rewards_S[:, None],
        part_weights_K=torch.ones(1),
    )


def our_advantages(case: Case, name: str = "dr_grpo", token_rewards_N: Tensor | None = None) -> Tensor:
    return estimate(name, estimator_input(case, token_rewards_N), EstimatorParams(), whiten="none").advantages_N


def of_sequences(case: Case, values_N: Tensor) -> Tensor:
    """The value that all action tokens of a sequence have, [S]."""
    low_S, high_S = (
        torch.zeros(len(case.lengths_S)).scatter_reduce(
            0, case.sequence_N[case.mask_N], values_N[case.mask_N], reduce, include_self=False
        )
        for reduce in ("amin", "amax")
    )
    torch.testing.assert_close(low_S, high_S, rtol=0, atol=0)
    return low_S


def run_ours(
    case: Case,
    aggregation: str,
    objective: PolicyLossObjective,
    *,
    advantages_N: Tensor | None = None,
    learned_N: Tensor | None = None,
    max_length: int = MAX_LENGTH,
) -> tuple[Tensor, Tensor]:
    """(loss, gradient for each token's log-prob): the sum of weight x token loss of `objective`."""
    logprobs_N = case.logprobs_N.clone().requires_grad_()
    total, count = len(case.mask_N), len(case.lengths_S)
    batch = RolloutBatch(
        tokens_N=torch.zeros(total, dtype=torch.int64),
        action_mask_N=case.mask_N,
        turn_ids_N=torch.where(case.mask_N, 0, -1),
        rewards_N=torch.zeros(total),
        rollout_logprobs_N=case.rollout_N,
        versions_N=torch.zeros(total, dtype=torch.int32),
        lengths_S=case.lengths_S,
        prompt_lengths_S=case.prompts_S,
        group_ids_S=case.groups_S,
        sample_ids_S=torch.arange(count),
        scores_S=case.rewards_S,
        truncated_S=torch.zeros(count, dtype=torch.bool),
        old_logprobs_N=case.old_N,
        ref_logprobs_N=case.ref_N,
        advantages_N=our_advantages(case) if advantages_N is None else advantages_N,
        learned_N=learned_N,
        loss_weights_N=loss_weights(
            aggregation,
            action_mask_N=case.mask_N,
            lengths_S=case.lengths_S,
            group_ids_S=case.groups_S,
            rollout_ids_S=torch.arange(count),
            max_length=max_length,
        ),
    )
    loss = objective(TokenScores(logprobs_N=logprobs_N, entropy_N=case.entropy_N), batch).loss
    (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
    return loss.detach(), gradient_N


def objective_of(loss: str = "ppo", clip: tuple[float, float] = CLIP, **rest: Any) -> PolicyLossObjective:
    params = {name: rest.pop(name) for name in OF_LOSSES if name in rest}
    return PolicyLossObjective(loss=loss, params=PolicyLossParams(eps_clip_low_high=clip, **params), **rest)


def agree(trl: Outcome, ours: tuple[Tensor, Tensor]) -> None:
    assert trl.gradient_N.abs().max() > 1e-3, "the gradients that are compared must not all be 0"
    torch.testing.assert_close(ours[0], trl.loss, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(ours[1], trl.gradient_N, rtol=TOLERANCE, atol=TOLERANCE)


def correction(case: Case, level: str, mode: str, *, bypass: bool = False, **rest: Any) -> Tensor:
    return correction_weights(
        CorrectionSettings(level=level, mode=mode, **rest),
        logprobs_N=case.old_N,
        rollout_logprobs_N=case.rollout_N,
        advantages_N=our_advantages(case),
        action_mask_N=case.mask_N,
        sequence_N=case.sequence_N,
        sequences=len(case.lengths_S),
        bypass=bypass,
    )


@pytest.fixture(params=[0, 1, 2])
def case(request: pytest.FixtureRequest) -> Case:
    return Case.make(seed=request.param)


@pytest.mark.parametrize("beta", [0.0, BETA])
@pytest.mark.parametrize(
    ("loss_type", "aggregation"),
    [
        ("grpo", "sequence_mean"),
        ("dapo", "token_mean"),
        ("bnpo", "token_mean"),
        ("dr_grpo", "constant_length"),
    ],
)
def test_the_clipped_loss_with_k3_equals_trls(case: Case, loss_type: str, aggregation: str, beta: float) -> None:
    trl = run_trl("GRPOTrainer", case, loss_type=loss_type, beta=beta)
    agree(trl, run_ours(case, aggregation, objective_of(kl_coef=beta)))


def test_trls_delta_is_our_dual_clip(case: Case) -> None:
    """min(rho, delta) changes a negative advantage alone as long as delta is above 1 + clip_high."""
    wide = evolve(case, logprobs_N=case.old_N + 1.5 * (case.logprobs_N - case.old_N) / 0.3)
    trl = run_trl("GRPOTrainer", wide, delta=1.8)
    agree(trl, run_ours(wide, "sequence_mean", objective_of(dual_clip=1.8)))
    assert not torch.allclose(trl.gradient_N, run_trl("GRPOTrainer", wide).gradient_N), "delta must have mattered"


@pytest.mark.parametrize(("loss_type", "aggregation"), [("grpo", "sequence_mean"), ("dapo", "token_mean")])
def test_sequence_level_is_gspo(case: Case, loss_type: str, aggregation: str) -> None:
    trl = run_trl("GRPOTrainer", case, loss_type=loss_type, importance_sampling_level="sequence", beta=BETA)
    agree(trl, run_ours(case, aggregation, objective_of("gspo", kl_coef=BETA)))


@pytest.mark.parametrize("beta", [0.0, BETA])
@pytest.mark.parametrize(("level", "loss"), [("sequence", "gspo"), ("token", "ppo")])
def test_luspo_is_a_sum_over_sequences(case: Case, level: str, loss: str, beta: float) -> None:
    trl = run_trl("GRPOTrainer", case, loss_type="luspo", importance_sampling_level=level, beta=beta)
    agree(trl, run_ours(case, "sequence_sum", objective_of(loss, kl_coef=beta)))


def test_the_loss_of_cispo_equals_trls(case: Case) -> None:
    """TRL's epsilon_high is the ceiling itself, ours what it exceeds 1 by; neither bounds below."""
    trl = run_trl("GRPOTrainer", case, loss_type="cispo", epsilon_high=1.2)
    agree(trl, run_ours(case, "token_mean", objective_of("cispo", (1.0, 0.2))))


def test_the_loss_of_sapo_equals_trls(case: Case) -> None:
    trl = run_trl("GRPOTrainer", case, loss_type="sapo", sapo_temperature_pos=0.8, sapo_temperature_neg=1.3, beta=BETA)
    agree(trl, run_ours(case, "sequence_mean", objective_of("sapo", sapo_tau=(0.8, 1.3), kl_coef=BETA)))


@pytest.mark.parametrize("spread", [0.1, 0.8])
def test_the_loss_of_gmpo_equals_trls(case: Case, spread: float) -> None:
    """Ratios lie within the clip range, or some are clipped."""
    wide = evolve(case, logprobs_N=case.old_N + spread * (case.logprobs_N - case.old_N) / 0.3)
    trl = run_trl("GMPOTrainer", wide, epsilon_low=0.4, epsilon_high=0.5, beta=BETA)
    agree(trl, run_ours(wide, "sequence_mean", objective_of("gmpo", (0.4, 0.5), kl_coef=BETA)))


@pytest.mark.parametrize("spread", [0.05, 0.3, 0.8])
def test_the_loss_of_vespo_equals_trls(spread: float) -> None:
    """From ratios of sequences near 1 to such as weigh nothing."""
    case = Case.make(spread=spread)
    powers = {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.0}
    trl = run_trl("GRPOTrainer", case, loss_type="vespo", beta=BETA, **powers)
    ours = objective_of("vespo", kl_coef=BETA, vespo_k=(1.5, 2.0), vespo_lambda=(2.5, 1.0))
    agree(trl, run_ours(case, "token_mean", ours))


@pytest.mark.parametrize("weight", [0.0, 0.5, 2.0])
def test_importance_weighted_distillation_equals_trls(case: Case, weight: float) -> None:
    """The policy gradient with our advantages, against TRL's loss of logits over a vocabulary of two."""
    from trl.experimental.iw_opd import IWOPDTrainer

    trainer: Any = object.__new__(IWOPDTrainer)
    trainer.__dict__.update(temperature=1.0, iw_opd_gamma=weight, iw_opd_epsilon=1e-8)
    trainer.__dict__.update(model=StandIn(), _metrics={"train": defaultdict(list)})
    logprobs_N = case.logprobs_N.clamp(max=-0.05).requires_grad_()
    chosen_BT = case.padded(logprobs_N)
    chosen_BT = torch.where(case.padded(case.mask_N.float()).bool(), chosen_BT, -0.5)
    logits = torch.stack([chosen_BT, (-torch.expm1(chosen_BT)).log()], dim=-1)
    loss = trainer._compute_iw_opd_loss(
        student_logits=logits,
        completion_tokens=torch.zeros(chosen_BT.shape, dtype=torch.int64),
        labels=torch.where(case.padded(case.mask_N.float()).bool(), 0, -100),
        teacher_actual_logprobs=case.padded(case.ref_N),
        rollout_logprobs=case.padded(case.rollout_N),
    )
    (gradient_N,) = torch.autograd.grad(loss, logprobs_N)
    distances_N = torch.where(case.mask_N, case.ref_N - case.rollout_N, 0.0)
    inputs = estimator_input(case, distances_N)
    advantages_N = estimate("iw_opd", inputs, EstimatorParams(prefix_weight=weight)).advantages_N
    moved = evolve(case, logprobs_N=logprobs_N.detach())
    ours = run_ours(moved, "token_mean", objective_of("policy_gradient"), advantages_N=advantages_N)
    agree(Outcome(loss.detach(), gradient_N, {}), ours)


@pytest.mark.parametrize("opening", [[], [{"role": "system", "content": "Be brief."}]])
@pytest.mark.parametrize(
    "context", ["Count from 3 on.", [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "7"}]]
)
def test_a_self_taught_model_is_told_what_sdft_tells_it(opening: list[dict[str, str]], context: Any) -> None:
    """Its template for the last user message, with the column privileged_context of the row."""
    from trl.experimental.sdft.sdft_config import SDFTConfig
    from trl.experimental.sdft.sdft_trainer import DemonstrationTeacherContextBuilder

    template = PRESETS["sdft"]["algo.kl.teacher_template"]
    assert template == SDFTConfig.__dataclass_fields__["teacher_prompt_template"].default
    builder = DemonstrationTeacherContextBuilder(
        SimpleNamespace(args=SimpleNamespace(teacher_prompt_template=template))
    )
    messages = [*opening, {"role": "user", "content": "3 + 4?"}]
    row = {"prompt": messages, "privileged_context": context}
    told = TeacherTemplate(template).messages(messages, None, row, "sums")
    assert told == builder._compose_teacher_prompt(messages, row["privileged_context"])


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_a_self_taught_model_has_sdfts_divergence(alpha: float) -> None:
    """It is that of the whole vocabulary, whose weight TRL calls alpha; the preset has TRL's."""
    from trl.experimental.sdft.loss_utils import compute_full_logit_self_distillation_loss
    from trl.experimental.sdft.sdft_config import SDFTConfig

    assert SDFTConfig.__dataclass_fields__["distillation_alpha"].default == PRESETS["sdft"]["algo.kl.beta"]
    generator = torch.Generator().manual_seed(3)
    student = torch.randn(1, 5, 11, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(1, 5, 11, generator=generator, dtype=torch.float64)
    theirs = compute_full_logit_self_distillation_loss(student, teacher, distillation_alpha=alpha)[0]
    ours = divergence(teacher[0].log_softmax(1), student[0].log_softmax(1), beta=alpha)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    gradients = [torch.autograd.grad(each.sum(), student, retain_graph=True)[0] for each in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


def test_a_self_taught_model_has_sdfts_gradient(case: Case) -> None:
    """The advantage of a sampled token is the log-ratio to the teacher, whatever that has read."""
    from trl.experimental.sdft.loss_utils import compute_sampled_token_self_distillation_loss

    generator = torch.Generator().manual_seed(9)
    student = torch.randn(1, len(case.mask_N), 11, generator=generator).requires_grad_()
    teacher = torch.randn(1, len(case.mask_N), 11, generator=generator)
    ids = torch.randint(11, (1, len(case.mask_N)), generator=generator)
    losses = compute_sampled_token_self_distillation_loss(student, teacher, ids, distillation_alpha=1.0)
    (wanted,) = torch.autograd.grad(losses[0][case.mask_N].mean(), student)
    own_N, its_N = (logits.log_softmax(2).gather(2, ids[:, :, None])[0, :, 0] for logits in (student, teacher))
    distances_N = torch.where(case.mask_N, its_N - own_N.detach(), 0.0)
    advantages_N = our_advantages(case, "on_policy_distill", distances_N)
    moved = evolve(case, logprobs_N=own_N.detach())
    loss, gradient_N = run_ours(moved, "token_mean", objective_of("policy_gradient"), advantages_N=advantages_N)
    (found,) = torch.autograd.grad(own_N, student, gradient_N)
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(loss, losses[0][case.mask_N].mean().detach(), rtol=TOLERANCE, atol=TOLERANCE)


def test_bias_corrected_kl_is_k3_unbiased(case: Case) -> None:
    trl = run_trl("GRPOTrainer", case, beta=BETA, use_bias_correction_kl=True)
    agree(trl, run_ours(case, "sequence_mean", objective_of(kl_coef=BETA, kl_estimator="k3_unbiased")))


def test_entropy_bonus_agrees_for_token_mean(case: Case) -> None:
    """TRL's bonus is always a mean over tokens, ours has the loss's own weights: the same here, not elsewhere."""
    token, sequence = (
        run_trl("GRPOTrainer", case, loss_type=loss_type, entropy_coef=0.1, _entropy_bonus_enabled=True)
        for loss_type in ("bnpo", "grpo")
    )
    agree(token, run_ours(case, "token_mean", objective_of(entropy_coef=0.1)))
    ours, gradient_N = run_ours(case, "sequence_mean", objective_of(entropy_coef=0.1))
    torch.testing.assert_close(gradient_N, sequence.gradient_N, rtol=TOLERANCE, atol=TOLERANCE)
    assert abs(ours - sequence.loss) > TOLERANCE


def test_masked_truncated_replies_are_left_out(case: Case) -> None:
    """Their rewards are in the mean of their group all the same."""
    cut_S = torch.arange(GROUPS * SAMPLES) % 3 == 0
    ends = [8 if cut else 7 for cut in cut_S.tolist()]
    trl = run_trl("GRPOTrainer", case, loss_type="dapo", mask_truncated_completions=True, ends=ends)
    finished = evolve(case, mask_N=case.mask_N & ~cut_S[case.sequence_N])
    agree(trl, run_ours(finished, "token_mean", objective_of(), advantages_N=our_advantages(case)))


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_sdpo_tells_teachers_of_the_same_replies(seed: int, answers: bool) -> None:
    """Which rollouts are taught, by which other one of their group, with or without its thinking, by what is said of
    them, and in which words."""
    from trl.experimental.sdpo import SDPOConfig
    from trl.experimental.sdpo.sdpo_trainer import SuccessfulRolloutTeacherContextBuilder

    generator = torch.Generator().manual_seed(seed)
    scores = (torch.rand(GROUPS * SAMPLES, generator=generator) * 2).round() / 2
    conversations = [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Sum {{{group}}}?"}]
        for group in range(GROUPS)
    ]
    wanted: list[Any] = []

    def written(ids: Any) -> str:
        return f"<think>\nof {int(ids[0])}\n</think>\n\nreply <think></think>{int(ids[0])} "

    def tokenized(messages: list[Any]) -> list[list[int]]:
        wanted.extend(messages)
        return [[1]] * len(messages)

    names = ("success_reward_threshold", "reprompt_template", "solution_template", "max_reprompt_len")
    names += ("dont_reprompt_on_self_success", "environment_feedback_only_without_solution")
    names += ("use_successful_as_teacher", "include_environment_feedback", "remove_thinking_from_demonstration")
    names += ("feedback_template",)
    fields = SDPOConfig.__dataclass_fields__
    said = (torch.rand(GROUPS * SAMPLES, generator=generator) < 0.5) & (scores < 1)
    words = [f"{{{i}}} fails" if has else None for i, has in enumerate(said.tolist())]
    stand_in = SimpleNamespace(
        accelerator=OneProcess(),
        args=SimpleNamespace(
            **{name: fields[name].default for name in names}
            | {"include_environment_feedback": True, "remove_thinking_from_demonstration": answers}
        ),
        model=StandIn(),
        num_generations=SAMPLES,
        processing_class=SimpleNamespace(decode=lambda ids, **_: written(ids)),
        _tokenizer=SimpleNamespace(pad_token_id=0),
        _tokenize_prompts_untruncated=tokenized,
    )
    ids = 10 + torch.arange(GROUPS * SAMPLES)[:, None]
    made = SuccessfulRolloutTeacherContextBuilder(stand_in).build(
        {"completion_ids": ids, "completion_mask": torch.ones_like(ids)},
        [conversations[i // SAMPLES] for i in range(GROUPS * SAMPLES)],
        scores,
        words,
    )
    groups = [
        RolloutGroup(
            group_id=group,
            prompt=Prompt(token_ids=(1,), text="", messages=tuple(conversations[group])),
            trajectories=tuple(
                evolve(
                    make_trajectory([1], [10 + i], group_id=group, sample_id=i),
                    score=float(scores[i]),
                    feedback=words[i],
                )
                for i in range(group * SAMPLES, (group + 1) * SAMPLES)
            ),
        )
        for group in range(GROUPS)
    ]
    text = PRESETS["sdpo"]["algo.kl.teacher_template"]
    template = TeacherTemplate(text if answers else text.replace("{passed_answer}", "{passed_reply}"))
    told: list[Any] = []

    def tell(prompt: Prompt, passed: str | None, feedback: str | None) -> tuple[int, ...] | None:
        answer = None if passed is None else without_thinking(passed)
        known = {"passed_reply": passed, "passed_answer": answer, "reward_feedback": feedback}
        if not template.teaches(known):
            return None
        told.append(template.messages(prompt.messages, None, {}, "", known))
        return (len(told) - 1,)

    found = ToldOfReplies(tell=tell, decode=written, pass_threshold=1.0)(groups)
    taught = [i for i, each in enumerate(made["self_distillation_mask"].tolist()) if each]
    assert sorted(sample for _, sample in found) == taught
    assert 0 < len(taught) < GROUPS * SAMPLES or seed
    for i in taught:
        assert told[found[i // SAMPLES, i][0]] == wanted[i]


def test_sdpo_learns_from_the_sampled_tokens_by_the_same_loss(case: Case) -> None:
    from trl.experimental.sdpo.loss_utils import compute_sampled_token_self_distillation_loss

    generator = torch.Generator().manual_seed(0)
    student = torch.randn(len(case.mask_N), 5, generator=generator, requires_grad=True)
    teacher = torch.randn(len(case.mask_N), 5, generator=generator)
    tokens_N = torch.randint(5, (len(case.mask_N),), generator=generator)
    losses_N = compute_sampled_token_self_distillation_loss(student, teacher, tokens_N, distillation_alpha=1.0)
    (wanted,) = torch.autograd.grad(losses_N[case.mask_N].mean(), student, retain_graph=True)
    own_N, taught_N = (each.log_softmax(1).gather(1, tokens_N[:, None])[:, 0] for each in (student, teacher))
    moved = evolve(case, logprobs_N=own_N.detach(), old_N=own_N.detach(), rollout_N=own_N.detach())
    advantages_N = our_advantages(moved, "on_policy_distill", (taught_N - own_N).detach())
    _, gradient_N = run_ours(moved, "token_mean", objective_of(), advantages_N=advantages_N)
    (found,) = torch.autograd.grad(own_N, student, gradient_N)
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("share", [0.2, 0.5])
@pytest.mark.parametrize(("loss_type", "aggregation"), [("grpo", "sequence_mean"), ("dapo", "token_mean")])
def test_the_most_uncertain_tokens_are_learned_from(case: Case, share: float, loss_type: str, aggregation: str) -> None:
    """TRL reads the entropies of the policy under training, we those before the update: the same here."""
    trl = run_trl("GRPOTrainer", case, loss_type=loss_type, top_entropy_quantile=share, beta=BETA)
    learned_N = high_entropy_tokens(case.entropy_N, case.mask_N, share)
    assert 0 < learned_N.sum() < case.mask_N.sum()
    agree(trl, run_ours(case, aggregation, objective_of(kl_coef=BETA), learned_N=learned_N))
    sequence = run_trl("GRPOTrainer", case, importance_sampling_level="sequence", top_entropy_quantile=share)
    agree(sequence, run_ours(case, "sequence_mean", objective_of("gspo"), learned_N=learned_N))


@pytest.mark.parametrize("threshold", [-0.05, 0.0, 0.05])
def test_off_policy_sequence_mask_is_opsm(case: Case, threshold: float) -> None:
    """Without vLLM, TRL's sampler is its old policy: our bypass."""
    sampled = evolve(case, rollout_N=case.old_N)
    trl = run_trl("GRPOTrainer", sampled, off_policy_mask_threshold=threshold, beta=BETA)
    opsm = CorrectionSettings(level="sequence", mode="mask", gate="opsm", threshold=threshold)
    agree(trl, run_ours(sampled, "sequence_mean", objective_of(correction=opsm, bypass=True, kl_coef=BETA)))


@pytest.mark.parametrize("threshold", [-0.05, 0.0, 0.05])
def test_off_policy_mask_keeps_the_same_sequences(case: Case, threshold: float) -> None:
    advantages_S = of_sequences(case, our_advantages(case))
    kept_S = trainer_class("GRPOTrainer").get_off_policy_mask(
        advantages=advantages_S[:, None],
        per_token_logps=case.padded(case.old_N),
        sampling_per_token_logps=case.padded(case.rollout_N),
        mask=case.padded(case.mask_N.float()),
        off_policy_threshold=threshold,
    )[:, 0]
    weights_N = correction(case, "sequence", "mask", gate="opsm", threshold=threshold, bypass=True)
    assert 0 < kept_S.sum() < len(kept_S)
    torch.testing.assert_close(of_sequences(case, weights_N), kept_S)


@pytest.mark.parametrize(
    ("mode", "level", "ours", "low"),
    [
        ("token_truncate", "token", "truncate", None),
        ("token_truncate", "token", "clip", 0.8),
        ("token_mask", "token", "mask", 0.8),
        ("sequence_truncate", "sequence", "truncate", None),
        ("sequence_truncate", "sequence", "clip", 0.8),
    ],
)
@pytest.mark.parametrize(("loss_type", "aggregation"), [("grpo", "sequence_mean"), ("dapo", "token_mean")])
def test_importance_sampling_for_vllm_equals_trls(
    case: Case, mode: str, level: str, ours: str, low: float | None, loss_type: str, aggregation: str
) -> None:
    trl = run_trl(
        "GRPOTrainer",
        case,
        loss_type=loss_type,
        use_vllm=True,
        beta=BETA,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=1.3,
    )
    ratio_BT = trl.inputs["importance_sampling_ratio"].expand(len(case.lengths_S), -1)
    ratio_BT = ratio_BT.expand_as(case.padded(case.mask_N.float()))
    chosen = CorrectionSettings(level=level, mode=ours, low=0.0 if low is None else low, high=1.3)
    weights_N = correction(case, level, ours, low=chosen.low, high=chosen.high)
    torch.testing.assert_close(weights_N, case.packed(ratio_BT), rtol=TOLERANCE, atol=TOLERANCE)
    agree(trl, run_ours(case, aggregation, objective_of(correction=chosen, kl_coef=BETA)))


def test_vllm_sequence_mask_keeps_the_same_but_weighs_by_the_sequence(case: Case) -> None:
    """TRL multiplies what it keeps by the ratio of the whole sequence, we by each token's own."""
    trl = run_trl(
        "GRPOTrainer",
        case,
        use_vllm=True,
        vllm_importance_sampling_mode="sequence_mask",
        vllm_importance_sampling_clip_min=0.5,
        vllm_importance_sampling_clip_max=2.0,
    )
    theirs_S = trl.inputs["importance_sampling_ratio"][:, 0]
    kept_S = theirs_S > 0
    assert 0 < kept_S.sum() < len(kept_S)
    ours_N = correction(case, "sequence", "mask", low=0.5, high=2.0)
    own_N = correction(case, "token", "truncate", high=torch.inf)
    torch.testing.assert_close(ours_N, torch.where(kept_S[case.sequence_N], own_N, 0.0))
    product_S = correction(case, "sequence", "truncate", high=torch.inf)
    torch.testing.assert_close(
        of_sequences(case, torch.where(kept_S[case.sequence_N], product_S, 0.0)), theirs_S, rtol=TOLERANCE, atol=0
    )


@pytest.mark.parametrize("beta", [0.0, BETA])
def test_advantages_and_loss_of_rloo_equal_trls(beta: float) -> None:
    """Advantages and loss: TRL's KL is part of the reward before the baseline, as in `rloo_sequence`."""
    case = Case.make(tools=False)
    penalty_N = -beta * torch.where(case.mask_N, case.old_N - case.ref_N, 0.0)
    trl = run_trl("RLOOTrainer", case, beta=beta)
    advantages_N = our_advantages(case, "rloo_sequence", penalty_N)
    torch.testing.assert_close(
        of_sequences(case, advantages_N), trl.inputs["advantages"], rtol=TOLERANCE, atol=TOLERANCE
    )
    agree(trl, run_ours(case, "sequence_mean", objective_of("sequence_ppo"), advantages_N=advantages_N))
    plain_S = of_sequences(case, our_advantages(case, "rloo"))
    assert torch.allclose(plain_S, trl.inputs["advantages"], rtol=TOLERANCE, atol=TOLERANCE) == (beta == 0.0)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"scale_rewards": "none"}, "dr_grpo"),
        ({"scale_rewards": "group"}, "group_norm"),
        ({"scale_rewards": "batch"}, "lite_ppo"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "gdpo"),
    ],
)
def test_advantages_of_grpo_equal_trls(
    case: Case, settings: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both agree but for the number that is added to a standard deviation, which is 1e-4 over it in relative terms."""
    theirs_S = run_trl("GRPOTrainer", case, **settings).inputs["advantages"]
    ours_S = of_sequences(case, our_advantages(case, name))
    assert ((ours_S - theirs_S).abs() <= 1e-3 * ours_S.abs() + TOLERANCE).all()
    monkeypatch.setattr(group, "STD_FLOOR", TRL_STD_FLOOR)
    torch.testing.assert_close(of_sequences(case, our_advantages(case, name)), theirs_S, rtol=TOLERANCE, atol=TOLERANCE)


def test_advantages_of_grpo_scaled_over_the_batch_equal_trls(case: Case) -> None:
    """TRL divides by the unbiased deviation of the raw rewards of all sequences, as our lite_ppo. Whitening over the
    batch divides by that of the centred advantages over action tokens, a common factor of this."""
    theirs_S = run_trl("GRPOTrainer", case, scale_rewards="batch").inputs["advantages"]
    centred_N = our_advantages(case)
    scaled_S = of_sequences(case, centred_N) / (case.rewards_S.std() + TRL_STD_FLOOR)
    torch.testing.assert_close(scaled_S, theirs_S, rtol=TOLERANCE, atol=TOLERANCE)
    whitened_N = estimate("dr_grpo", estimator_input(case), EstimatorParams(), whiten="batch").advantages_N
    actions = centred_N[case.mask_N]
    theirs_N = case.packed(theirs_S[:, None].expand_as(case.padded(case.mask_N.float())))
    factor = (case.rewards_S.std() + TRL_STD_FLOOR) / actions.std(correction=0)
    expected_A = factor * theirs_N[case.mask_N] - actions.mean() / actions.std(correction=0)
    torch.testing.assert_close(whitened_N[case.mask_N], expected_A, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_group_of_equal_rewards_teaches_nothing_in_either(case: Case) -> None:
    equal = evolve(case, rewards_S=torch.full_like(case.rewards_S, 0.1))
    theirs_S = run_trl("GRPOTrainer", equal, scale_rewards="group").inputs["advantages"]
    assert not of_sequences(equal, our_advantages(equal, "group_norm")).any()
    assert not theirs_S.any()


@pytest.mark.parametrize(
    ("loss_type", "aggregation", "split_free"),
    [
        ("grpo", "sequence_mean", True),
        ("dr_grpo", "constant_length", True),
        ("dapo", "token_mean", True),
        ("bnpo", "token_mean", False),
    ],
)
def test_accumulated_gradients_equal_those_of_the_whole_batch(
    case: Case, loss_type: str, aggregation: str, split_free: bool
) -> None:
    """Two micro-batches in TRL against the whole here: `bnpo` is a mean of their means, the others are ours."""
    both = piece(case, 0, 2 * SAMPLES)
    loss, gradient_N = run_ours(both, aggregation, objective_of())
    parts = [
        run_trl(
            "GRPOTrainer",
            piece(case, low, low + SAMPLES),
            loss_type=loss_type,
            current_gradient_accumulation_steps=2,
            steps_per_generation=2,
            accelerator=Gathering(both.mask_N.sum()),
        )
        for low in (0, SAMPLES)
    ]
    total = Outcome(parts[0].loss + parts[1].loss, torch.cat([part.gradient_N for part in parts]), {})
    if split_free:
        agree(total, (loss, gradient_N))
    else:
        assert (gradient_N - total.gradient_N).abs().max() > 1e-3


@pytest.mark.parametrize(("loss_type", "aggregation"), [("dapo", "token_mean"), ("grpo", "sequence_mean")])
def test_each_optimizer_step_of_a_generation_is_a_mean_of_its_own(case: Case, loss_type: str, aggregation: str) -> None:
    """TRL divides the sums of `dapo` by the mean number of tokens of the generation's steps."""
    both = piece(case, 0, 2 * SAMPLES)
    for low in (0, SAMPLES):
        step = piece(case, low, low + SAMPLES)
        trl = run_trl(
            "GRPOTrainer",
            step,
            loss_type=loss_type,
            steps_per_generation=2,
            accelerator=Gathering(both.mask_N.sum()),
        )
        loss, gradient_N = run_ours(step, aggregation, objective_of())
        share = 2 * step.mask_N.sum() / both.mask_N.sum() if loss_type == "dapo" else torch.ones(())
        agree(trl, (loss * share, gradient_N * share))


def test_a_sequence_without_actions_counts_in_trl_only(case: Case) -> None:
    """TRL's mean over sequences includes those without actions, ours does not."""
    masked = evolve(case, mask_N=case.mask_N & (case.sequence_N != 0))
    count = len(case.lengths_S)
    centred_S = case.rewards_S - case.rewards_S.view(GROUPS, SAMPLES).mean(1).repeat_interleave(SAMPLES)
    advantages_N = torch.where(masked.mask_N, centred_S[case.sequence_N], 0.0)
    for loss_type, aggregation in (("grpo", "sequence_mean"), ("dr_grpo", "constant_length")):
        trl = run_trl("GRPOTrainer", masked, loss_type=loss_type)
        loss, gradient_N = run_ours(masked, aggregation, objective_of(), advantages_N=advantages_N)
        share = (count - 1) / count
        agree(trl, (loss * share, gradient_N * share))
