"""The section `algo`: the algorithm."""

from attrs import define

from rollgrad.domain.algorithms.catalogue import estimator_settings, policy_loss_settings
from rollgrad.domain.algorithms.settings import AdvantageSettings, CorrectionSettings, KLSettings, OldLogprobs
from rollgrad.domain.settings import COUNT, INTERVAL, NOT_NEGATIVE, SOME_SHARE, Condition, OwnSettings, section, setting

FILTERS_SCORES = Condition(
    lambda here, run: here.dynamic_filtering_enable,
    "no group is filtered by it",
    "turn on --algo.dynamic_filtering_enable",
)
FILTERS = Condition(
    lambda here, run: here.dynamic_filtering_enable or here.dynamic_filtering_spread or here.dynamic_filtering_path,
    "no group is filtered by it",
    "turn on --algo.dynamic_filtering_enable",
)


@define(kw_only=True)
class AlgoConfig:
    """The algorithm."""

    preset: str | None = setting(
        None,
        "Named recipes, several separated by commas (dapo,tis): vetted settings that a file and flags override, "
        "shown by --print_config. See docs/algorithms.md.",
    )
    extension_path: str | None = setting(
        None,
        "Python file, or module (my_lib.losses), with estimators and policy losses of your own, registered by "
        "@estimator and @policy_loss.",
    )
    advantage: AdvantageSettings = section(AdvantageSettings, "From rewards to advantages.")
    kl: KLSettings = section(KLSettings, "Keeping near the reference.")
    estimators: OwnSettings = section(
        OwnSettings,
        "Settings that estimators bring, by their names: those of algo.extension_path, with settings= of @estimator.",
        estimator_settings,
    )
    losses: OwnSettings = section(
        OwnSettings,
        "Settings that policy losses bring, by their names: those of algo.extension_path, with settings= of "
        "@policy_loss.",
        policy_loss_settings,
    )
    old_logprobs: OldLogprobs = setting(
        OldLogprobs.RECOMPUTE,
        "Log-probs in the ratio's denominator (proximal policy): the trainer's own before the update, the rollout's "
        "(one forward pass less), or interpolated between rollout and current policy by the age of each token. A "
        "single step on fresh samples needs none of them: the ratio is 1.",
    )
    correction: CorrectionSettings = section(CorrectionSettings, "Off-policy correction.")
    score_centering_top_k: int = setting(
        0,
        "Subtract from each token's gradient its mean over what the sampler might have drawn there (score centering). "
        "The number is that of the sampler's most likely tokens, by which the mean is known; 128 is usual, 0 turns it "
        "off.",
        NOT_NEGATIVE,
    )
    top_entropy_quantile: float = setting(
        1.0,
        "Share of an optimizer step's action tokens at which the policy loss counts: those where the policy before the "
        "update was most uncertain (0.2 of Wang et al. 2025, arXiv:2506.01939); 1 counts it at every token.",
        SOME_SHARE,
    )
    mask_truncated: bool = setting(
        False,
        "Learn nothing from replies that were cut off: they are left out of the loss of policy and critic, so that a "
        "long reply is not punished for being unfinished (DAPO's overlong filtering); baselines still count their "
        "rewards.",
    )
    mask_repetition: int | None = setting(
        None,
        "Learn nothing from rollouts that repeat themselves: those with so many sampled tokens in a row that each had "
        "a probability above 0.99 (3000 is usual); none turns it off.",
        COUNT,
    )
    dynamic_filtering_enable: bool = setting(
        False,
        "Train only on groups whose scores differ, so that they are neither all right nor all wrong; each other one "
        "is replaced by a new prompt at once (DAPO's dynamic sampling).",
    )
    dynamic_filtering_range: tuple[float, float] | None = setting(
        None,
        "Mean scores between which, both excluded, a group is kept instead; mind how scores are coded (0 1 finds no "
        "middle between -1 and 1).",
        INTERVAL,
        only_if=FILTERS_SCORES,
    )
    dynamic_filtering_spread: bool = setting(
        False, "Train only on groups whose rewards differ; each other one is replaced by a new prompt."
    )
    dynamic_filtering_path: str | None = setting(
        None,
        "Python file, or module (my_lib.filters), with a function keep(group) that is true of the groups to train on; "
        "FILE:NAME takes one of another name. Each other group is replaced by a new prompt.",
    )
    dynamic_filtering_budget: float = setting(
        10.0,
        "Prompts that may be played for a rollout, as a multiple of rollout.batch_size; more is an error.",
        COUNT,
        only_if=FILTERS,
    )
