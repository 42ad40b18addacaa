"""Settings of the algorithm; those of rewards are in `shaping_settings`. What a configuration holds is what the
algorithm reads. Importable without torch."""

from enum import StrEnum

from attrs import define

from rollgrad.domain.algorithms.catalogue import policy_loss_traits
from rollgrad.domain.settings import (
    COUNT,
    INTERVAL,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    SOME_SHARE,
    Condition,
    Range,
    setting,
)


class KLEstimator(StrEnum):
    """Schulman's approximations of the KL divergence from the sampled tokens, k3 weighed by the importance ratio, the
    absolute log-ratio, and the divergence itself, summed over the vocabulary."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    K3_UNBIASED = "k3_unbiased"
    ABS = "abs"
    FULL = "full"


class KLAgainst(StrEnum):
    """Policy from which KL is measured."""

    REFERENCE = "reference"
    ROLLOUT = "rollout"


WITH_KL = Condition(
    lambda here, run: here.init_coef > 0, "{at}init_coef is 0, which turns KL off", "set --{at}init_coef above 0"
)
WHOLE_KL = Condition(
    lambda here, run: here.estimator == KLEstimator.FULL,
    "only the full estimator compares whole distributions",
    "set --{at}estimator to full",
)
MOVING = Condition(
    lambda here, run: here.ref_sync_steps is not None, "the reference never moves", "set --{at}ref_sync_steps"
)
ADAPTIVE_KL = Condition(
    lambda here, run: here.target is not None, "a fixed KL weight has no horizon", "set --{at}target"
)


@define(kw_only=True)
class KLSettings:
    """Keeping near the reference."""

    init_coef: float = setting(0.0, "Weight of the KL term; 0 loads no reference at all.", NOT_NEGATIVE)
    estimator: str = setting(
        KLEstimator.K1.value,
        "k1, k2, k3, k3_unbiased, abs or full. In the reward use k1; as a loss use k2, k3, k3_unbiased, abs, or full, "
        "which is exact: it sums over the vocabulary at each token, with the reference in the policy's processes "
        "unless top_k is set; or a name that algo.extension_path defines.",
        only_if=WITH_KL,
    )
    top_k: int | None = setting(
        None,
        "With the full estimator, compare so many of the reference's most likely tokens, and all others as one. The "
        "reference, wherever it is, predicts them before updates. Default: the whole vocabulary, with the reference "
        "beside the policy.",
        COUNT,
        only_if=(WITH_KL, WHOLE_KL),
    )
    beta: float = setting(
        1.0,
        "Divergence of the full estimator: 1 is KL(policy || reference), 0 is KL(reference || policy), between them is "
        "the generalised Jensen-Shannon divergence (Agarwal et al. 2023, arXiv:2306.13649).",
        SHARE,
        only_if=(WITH_KL, WHOLE_KL),
    )
    against: KLAgainst = setting(
        KLAgainst.REFERENCE,
        "The frozen reference, or the policy that sampled the rollout (as a loss; loads no reference).",
        only_if=WITH_KL,
    )
    use_loss: bool = setting(False, "Add KL to the loss rather than to the reward.", only_if=WITH_KL)
    teacher_template: str | None = setting(
        None,
        "Text that the reference reads in the place of a prompt's last user message, so that it teaches what it knows "
        "from more (opsd, sdpo); the text itself, or a file. Fields: {prompt}, the text of that message; {label}; "
        "{NAME}, a column of the row; of judged replies {passed_reply}, another reply to the prompt that passed, "
        "{passed_answer}, the same without its <think>...</think>, and {reward_feedback}, what the reward says of a "
        "reply that did not pass. A part in [[ ]] is left out where a field in it has nothing; a reply of which fields"
        " outside have nothing is not taught.",
        only_if=WITH_KL,
    )
    ref_sync_steps: int | None = setting(
        None,
        "Optimizer steps after each of which the reference, then in the policy's processes, moves toward the policy; "
        "with ref_mixup 1 it becomes the policy (ProRL, Liu et al. 2025, arXiv:2505.24864). None: it never moves.",
        COUNT,
        only_if=WITH_KL,
    )
    ref_mixup: float = setting(
        0.6,
        "Share of the policy in the weights of the reference that has moved; the rest is the reference before.",
        SOME_SHARE,
        only_if=MOVING,
    )
    target: float | None = setting(
        None,
        "KL per action token that an adaptive controller steers to; none keeps the weight fixed.",
        POSITIVE,
        only_if=WITH_KL,
    )
    horizon: float = setting(
        10000.0, "Samples over which the adaptive controller reacts.", POSITIVE, only_if=(WITH_KL, ADAPTIVE_KL)
    )


class Whiten(StrEnum):
    """Over what advantages are centred and scaled."""

    NONE = "none"
    BATCH = "batch"
    GROUP = "group"


@define(kw_only=True)
class AdvantageSettings:
    """Advantages from rewards."""

    estimator: str = setting(
        "gae",
        "gae (PPO), turn_gae, reinforce (REINFORCE++), reinforce_baseline, rloo, rloo_sequence, group_norm (GRPO), "
        "dr_grpo, lite_ppo, opo, optimal_token_baseline, gpg, maxrl, pass_at_k, gdpo, turn_group_norm, "
        "process_group_norm, gigpo, remax, flash_reinforce, on_policy_distill, iw_opd, or a name that "
        "algo.extension_path defines.",
    )
    gamma: float = setting(1.0, "Discount per action token (per turn for the turn estimators).", SHARE)
    lambd: float = setting(1.0, "GAE's lambda per action token.", SHARE)
    critic_lambd: float | None = setting(
        None, "Lambda of the critic's targets; default: lambd (VAPO's decoupled GAE sets 1).", SHARE
    )
    length_adaptive_alpha: float | None = setting(
        None, "GAE's lambda becomes 1 - 1 / (alpha x length) for each reply (VAPO: 0.05); none keeps lambd.", POSITIVE
    )
    prefix_weight: float = setting(
        0.5,
        "By how much iw_opd counts tokens more where the reply so far is what the teacher would write.",
        NOT_NEGATIVE,
    )
    pass_k: int = setting(
        2, "Samples of a prompt of which the best counts, with pass_at_k; a group has more than these.", COUNT
    )
    step_weight: float = setting(
        1.0,
        "Weight of the comparison of turns that were played in the same state, beside that of whole episodes, with "
        "gigpo.",
        NOT_NEGATIVE,
    )
    whiten: Whiten | None = setting(
        None,
        "Centre and scale advantages over nothing, the batch's action tokens or each group's; default: the "
        "estimator's own (batch for gae, reinforce and reinforce_baseline, else none).",
    )
    no_std_norm: bool = setting(
        False, "Whiten by the mean only; gigpo then compares episodes and turns by their means only, too (F_norm = 1)."
    )


class CorrectionLevel(StrEnum):
    """Scope of the importance ratio of an off-policy correction."""

    AUTO = "auto"
    """token where samples may be stale and nothing else corrects them, else off."""
    OFF = "off"
    TOKEN = "token"
    SEQUENCE = "sequence"
    GEOMETRIC = "geometric"


class CorrectionMode(StrEnum):
    """Treatment of a ratio outside the bounds."""

    TRUNCATE = "truncate"
    CLIP = "clip"
    MASK = "mask"


class CorrectionGate(StrEnum):
    """Further condition that leaves a token or a sequence out."""

    RATIO = "ratio"
    BINARY_KL = "binary_kl"
    TV = "tv"
    OPSM = "opsm"
    SECOND_MOMENT = "second_moment"
    """Tokens with the largest (log w)^2 of an optimizer step, until the mean of the others is small."""


@define(kw_only=True)
class CorrectionSettings:
    """Off-policy correction: what a token weighs that another policy sampled."""

    level: CorrectionLevel = setting(
        CorrectionLevel.AUTO,
        "Scope of the importance ratio: token, sequence (the product of its tokens'), geometric (their geometric "
        "mean), or off for no correction. auto is token where samples may be older than the weights "
        "(train.async_enable with max_staleness 1 or more, over-sampling) or vLLM quantises (vllm.extra.quantization, "
        "kv_cache_dtype), unless algo.old_logprobs corrects for it; else off. --dry_run and the start of a run say "
        "which.",
    )
    mode: CorrectionMode = setting(
        CorrectionMode.TRUNCATE, "truncate the ratio at high, clip it to low and high, or mask what lies outside."
    )
    gate: CorrectionGate = setting(
        CorrectionGate.RATIO,
        "What else leaves a token or sequence out: nothing, binary_kl, tv, opsm (negative advantages only), or "
        "second_moment (M2PO: the tokens furthest off, until the mean of the others' squared log-ratios is at most "
        "threshold).",
    )
    low: float = setting(0.5, "Lower bound of the ratio; clip and mask.", NOT_NEGATIVE)
    high: float = setting(2.0, "Upper bound of the ratio.", POSITIVE)
    threshold: float = setting(
        5e-3,
        "Largest divergence that the gates binary_kl, tv and opsm let pass, and largest second moment.",
        POSITIVE,
    )


class OldLogprobs(StrEnum):
    """Source of the log-probs of the policy before the update."""

    RECOMPUTE = "recompute"
    ROLLOUT = "rollout"
    INTERPOLATE = "interpolate"


class Aggregation(StrEnum):
    """Aggregation of token losses into one number."""

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN = "sequence_mean"
    PROMPT_MEAN = "prompt_mean"
    CONSTANT_LENGTH = "constant_length"
    SEQUENCE_SUM = "sequence_sum"
    TOKEN_SUM = "token_sum"


ADAPTIVE_ENTROPY = Condition(
    lambda here, run: here.entropy_target is not None,
    "a fixed entropy weight has no step",
    "set --{at}entropy_target",
)


@define(kw_only=True, slots=False)  # the actor is a model besides
class PolicyLossSettings:
    """The policy loss, its clip range, and what is added to it."""

    policy_loss_type: str = setting(
        "ppo",
        "ppo, gspo, gspo_token, sequence_ppo, gmpo, cispo, sapo, vespo, topr, clip_cov, kl_cov, dppo_tv, dppo_kl, "
        "policy_gradient, dro, or a name that algo.extension_path defines.",
    )
    eps_clip: float | None = setting(
        None,
        "Clip range, both sides, in the loss's own measure; default: the loss's own (ppo 0.2, gspo 3e-4 and 4e-4, "
        "...).",
        SHARE,
    )
    eps_clip_low_high: tuple[float, float] | None = setting(
        None,
        "Separate lower and upper clip range (DAPO's clip-higher); replaces eps_clip.",
        Range(
            lambda clip: 0 <= clip[0] <= 1 and clip[1] >= 0, "a lower range from 0 to 1, and an upper range at least 0"
        ),
    )
    dual_clip: float | None = setting(
        None,
        "Bound on the loss of negative advantages (dual-clip PPO); must exceed 1.",
        Range(lambda value: value > 1, "greater than 1"),
    )
    sapo_tau: tuple[float, float] = setting(
        (1.0, 1.05),
        "Temperatures of SAPO's gate for positive and negative advantages.",
        Range(lambda tau: min(tau) > 0, "two numbers greater than 0"),
    )
    vespo_k: tuple[float, float] = setting(
        (2.0, 3.0),
        "Power of a sequence's ratio in VESPO's weight, for positive and negative advantages.",
        Range(lambda k: min(k) >= 0, "two numbers of at least 0"),
    )
    vespo_lambda: tuple[float, float] = setting(
        (3.0, 2.0),
        "Rate at which VESPO's weight decays with a sequence's ratio, for positive and negative advantages.",
        Range(lambda rate: min(rate) > 0, "two numbers greater than 0"),
    )
    dro_beta: float = setting(0.05, "Weight of dro's squared log-ratio, which holds the policy near.", POSITIVE)
    cov_share: float = setting(2e-4, "Share of tokens that clip_cov and kl_cov treat apart.", SOME_SHARE)
    cov_range: tuple[float, float] = setting(
        (1.0, 5.0),
        "Covariance of log-prob and advantage from which and up to which clip_cov may choose a token.",
        INTERVAL,
    )
    cov_kl_coef: float = setting(1.0, "Weight of kl_cov's penalty at the chosen tokens.", NOT_NEGATIVE)
    entropy_coef: float = setting(
        0.0, "Weight of the entropy bonus; with entropy_target its starting value.", NOT_NEGATIVE
    )
    entropy_target: float | None = setting(
        None, "Entropy per token, in nats, below which an adaptive bonus acts; none keeps the weight fixed.", POSITIVE
    )
    entropy_coef_step: float = setting(
        5e-3, "How much the adaptive weight moves each rollout.", POSITIVE, only_if=ADAPTIVE_ENTROPY
    )
    positive_nll_coef: float = setting(
        0.0, "Weight of the likelihood of replies that passed, as an additional loss (VAPO).", NOT_NEGATIVE
    )
    loss_aggregation: Aggregation | None = setting(
        None,
        "How token losses become one number; default: the loss's own (ppo token_mean, gspo sequence_mean, ...); "
        "constant_length is Dr. GRPO's form, sequence_sum that of LUSPO; token_sum divides by nothing.",
    )

    @property
    def clip_low(self) -> float:
        """Clip range below, in the loss's own measure."""
        return self._clip_range[0]

    @property
    def clip_high(self) -> float:
        """Clip range above, in the loss's own measure."""
        return self._clip_range[1]

    @property
    def _clip_range(self) -> tuple[float, float]:
        """The clip range as set, or else the loss's own."""
        if self.eps_clip_low_high is not None:
            return self.eps_clip_low_high
        if self.eps_clip is not None:
            return self.eps_clip, self.eps_clip
        return policy_loss_traits(self.policy_loss_type).clip or (0.0, 0.0)
