"""Signs that a run cannot learn: for each a condition on the metrics of one step, with its threshold, and what is said
of it. Pure. Does not own: how long a sign has to last (`findings`).
"""

import math

from rollgrad.domain.algorithms.equality import reaches
from rollgrad.domain.control.length_signs import LENGTH_RULES, length_bounds, truncated
from rollgrad.domain.control.machine_signs import MACHINE_RULES
from rollgrad.domain.control.rule import LearningSettings, Metrics, Rule, in_rollouts, in_steps
from rollgrad.domain.control.tool_signs import TOOL_RULES

WINDOW = 3
"""Rollouts in a row that a sign needs: chance, or a batch of easy prompts, gives one rollout without any spread."""

COLLAPSED_ENTROPY = 0.01
"""Nats per token below which samples of a prompt hardly differ; replies of trained models have 0.1 to 2."""

MISMATCH_KL, MISMATCH_GROWTH = 0.01, 5.0
"""KL in nats per token, and growth over that of the first rollouts whose tokens were of weights as old, from which on
trainer and engine drift apart. Equal weights in bfloat16 differ by about 0.001."""

STALE_SHARE = 0.25
"""Share of played groups that are dropped as too old from which on much work is in vain."""

FAILED_SHARE = 0.02
"""Share of failed episodes that a flaky service does not explain, three rollouts in a row."""

DUPLICATE_SHARE, PASSED_SHARE = 0.8, 0.5
"""The first is the share of replies that equal an earlier one of their group from which on samples tell nothing. The
second is the share of groups that have solved their prompts from which on that is no sign: a prompt may have one right
reply."""

CLIPPED_SHARE = 0.3
"""Share of tokens whose ratio is clipped from which on the updates are too large; usual are 0 to 0.2."""

FAR_FROM_REFERENCE = 1.0
"""KL to the reference in nats per token from which on a policy has left it: a sentence of 20 tokens is then e^20 times
less likely under the reference. Usual are 0 to 0.2."""

KL_OUTWEIGHS, REWARD_ROSE = 3.0, 0.1
"""Size of the KL term at a token, times that of the reward, from which on it leaves nothing of it; and rise of the mean
reward over that of the first rollouts, as a share of the distance between the least and the greatest, from which on the
policy has learned: near the best that the KL term allows, it outweighs what is left of the reward."""

NO_GRADIENT = 1e-8
"""Norm of a gradient up to which Adam's steps come to nothing: its usual epsilon, which no element exceeds then."""

PART = "reward/part/"
"""Beginning of the names of metrics that are the contributions of named rewards to the mean reward."""

PART_LEFT = 0.5
"""Share of a named reward's first contribution at which another one seems to be learned at its expense."""

COMPARED = ("rollout/response_length_mean", "policy/mismatch_kl", "reward/mean")

ALIKE = 2 / 3
"""Share of a rollout's age from which on that of an earlier one is as great: were KL to grow with the square of the
age, it would be 2.3 times as much, still well below `MISMATCH_GROWTH`."""


def is_compared(name: str) -> bool:
    """Returns whether signs find the mean of a metric over the first `WINDOW` rollouts as old as this one (`age`) as
    `first/name`."""
    return name in COMPARED or name.startswith(PART)


def age(name: str, metrics: Metrics) -> float:
    """Returns how old a rollout is, so that a metric is compared with that of one as old: an asynchronous run begins,
    also anew, with replies of the newest weights, which are the shortest. A KL grows with the way of the weights since
    then, which is shorter while the learning rate warms up: of it, age counts times learning rate."""
    lag = metrics.get("staleness/mean", 0.0)
    return lag * metrics.get("policy/lr", 0.0) if name == "policy/mismatch_kl" else lag


def _constant_reward(metrics: Metrics, run: LearningSettings) -> float | None:
    lowest, highest = metrics.get("reward/min"), metrics.get("reward/max")
    several = metrics.get("rollout/samples", 2.0) > 1  # one reply is never told from another
    return lowest if run.judged_by_outcome and several and lowest is not None and lowest == highest else None


def _describe_constant_reward(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    value, replies = metrics["reward/min"], f"{metrics['rollout/samples']:.0f} replies"
    evidence = f"The reward was {value:g} for every reply of {in_rollouts(rollouts)} ({replies} each)"
    if reaches(value, run.pass_threshold):
        return f"{evidence}: all prompts are solved, there is nothing left to learn.", "--data.prompt_dataset"
    settings = "samples.jsonl, the reward (--reward.verifier, --reward.function_path, ...) and --data.label_key"
    if truncated(metrics, run):
        cut = f"{metrics['rollout/truncated_share']:.0%} of the latest were cut off"
        return f"{evidence}, and {cut}: it tells no reply from another.", f"{length_bounds(run)}, then at {settings}"
    return f"{evidence}: it tells no reply from another.", settings


def _no_spread(metrics: Metrics, run: LearningSettings) -> bool | None:
    if not (run.judged_by_outcome and run.compared_in_groups) or _constant_reward(metrics, run) is not None:
        return None
    return (metrics.get("rollout/zero_spread_share") == 1 and metrics.get("advantage/abs_mean") == 0) or None


def _describe_no_spread(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    evidence = (
        f"In every group of {in_rollouts(rollouts)} all replies to a prompt had the same reward (mean "
        f"{metrics['reward/mean']:.3g}), so that all advantages are 0."
    )
    return evidence, "--rollout.n_samples_per_prompt, --rollout.temperature and the reward"


def _no_gradient(metrics: Metrics, run: LearningSettings) -> bool | None:
    explained = _constant_reward(metrics, run) is not None or _no_spread(metrics, run)
    return (metrics.get("policy/grad_norm", 1.0) <= NO_GRADIENT and not explained) or None


def _describe_no_gradient(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    evidence = (
        f"The gradient of the policy was {metrics['policy/grad_norm']:.2g} in {in_rollouts(rollouts)} (mean size of an "
        f"advantage {metrics.get('advantage/abs_mean', 0.0):.3g}): the weights stay as they are."
    )
    if metrics.get("rollout/samples") == 1:
        return evidence, "--rollout.batch_size and --rollout.n_samples_per_prompt: a rollout has one reply"
    return evidence, "--algo.advantage.estimator and the reward"


def _reference_left(metrics: Metrics, run: LearningSettings) -> bool | None:
    return (run.judged_by_outcome and metrics.get("policy/ref_kl", 0.0) >= FAR_FROM_REFERENCE) or None


def _describe_reference_left(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    evidence = (
        f"The KL to the reference was {FAR_FROM_REFERENCE:g} nat per token or more in {in_rollouts(rollouts)} (now "
        f"{metrics['policy/ref_kl']:.2g}): little is left of what the model could do before."
    )
    return evidence, "--actor.adam.lr, --algo.kl.init_coef, and replies in samples.jsonl"


def _kl_against_reward(metrics: Metrics, run: LearningSettings) -> tuple[float, float] | None:
    """Returns the sizes of the KL term and of the reward in an advantage; None where one of them is not known.

    The mean KL is half the mean square of a token's log-ratio (Schulman's k2, to second order). In the loss, the
    log-ratio times the weight of the KL term stands beside the advantage, which is measured in groups with spread. In
    the reward, the log-ratios of all tokens to the end of the reply add up at random, beside a reward that estimators
    may have scaled to 1.
    """
    kl, spread = metrics.get("policy/ref_kl"), 1 - metrics.get("rollout/zero_spread_share", 0.0)
    if kl is None or "policy/kl_coef" not in metrics or spread <= 0:
        return None
    of_kl = metrics["policy/kl_coef"] * math.sqrt(2 * max(0.0, kl))
    if not run.kl_in_reward:
        return of_kl, metrics.get("advantage/abs_mean", math.inf) / spread
    of_reward = (metrics.get("reward/max", math.inf) - metrics.get("reward/min", 0.0)) / 2
    return of_kl * math.sqrt(metrics.get("rollout/response_length_mean", 1.0)), max(1.0, of_reward)


def _kl_outweighs(metrics: Metrics, run: LearningSettings) -> bool | None:
    first, sizes = metrics.get("first/reward/mean"), _kl_against_reward(metrics, run)
    if not (run.judged_by_outcome and run.held_by_kl) or first is None or sizes is None:
        return None
    distance = metrics["reward/max"] - metrics["reward/min"]
    rose = metrics["reward/mean"] > first + REWARD_ROSE * distance
    return (sizes[0] >= KL_OUTWEIGHS * sizes[1] > 0 and distance > 0 and not rose) or None


def _describe_kl_outweighs(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    sizes = _kl_against_reward(metrics, run)
    assert sizes is not None
    evidence = (
        f"The KL term, whose weight is {metrics['policy/kl_coef']:.3g}, outweighed the reward (about {sizes[0]:.2g} "
        f"against {sizes[1]:.2g} in an advantage) in {in_rollouts(rollouts)}, whose mean reward was no better than "
        f"that of the first (now {metrics['reward/mean']:.3g}, then {metrics['first/reward/mean']:.3g})."
    )
    return evidence, "--algo.kl.init_coef, which is too high, and --algo.kl.target"


def _collapsed(metrics: Metrics, run: LearningSettings) -> bool | None:
    return metrics.get("rollout/entropy", 1.0) < COLLAPSED_ENTROPY or None


def _describe_collapsed(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    evidence = (
        f"The entropy was below {COLLAPSED_ENTROPY} nats per token in {in_rollouts(rollouts)} (now "
        f"{metrics['rollout/entropy']:.2g}): all samples of a prompt are nearly the same."
    )
    return evidence, "--rollout.temperature, --actor.adam.lr and --actor.entropy_coef"


def _no_step(metrics: Metrics, run: LearningSettings) -> bool | None:
    return metrics.get("train/grad_norm") == 0 or None


def _describe_no_step(metrics: Metrics, run: LearningSettings, steps: int) -> tuple[str, str]:
    evidence = f"The gradient was 0 in {in_steps(steps)}: the weights stay as they are."
    return evidence, "the trained tokens (rollgrad data show), the loss and --actor.lora.target_modules"


def _reference_kept(metrics: Metrics, run: LearningSettings) -> bool | None:
    first = metrics.get("train/chosen_reward") == 0 and metrics.get("train/rejected_reward") == 0
    return (first and "train/chosen_fell_share" in metrics) or None


def _describe_reference_kept(metrics: Metrics, run: LearningSettings, steps: int) -> tuple[str, str]:
    evidence = f"All replies were exactly as likely as under the reference in {in_steps(steps)}: nothing is learned."
    return evidence, "--actor.adam.lr, which is too low for the format of the weights, and --actor.dtype"


def _chosen_fell(metrics: Metrics, run: LearningSettings) -> bool | None:
    return metrics.get("train/chosen_fell_share") == 1 or None


def _describe_chosen_fell(metrics: Metrics, run: LearningSettings, steps: int) -> tuple[str, str]:
    evidence = (
        f"Every chosen reply of {in_steps(steps)} was less likely than under the reference (mean log-prob now "
        f"{metrics['train/chosen_logprob']:.3g}): the model unlearns what it should prefer."
    )
    return evidence, "--actor.adam.lr and --dpo.beta, or add sft to --dpo.loss"


def _mismatch(metrics: Metrics, run: LearningSettings) -> bool | None:
    now, first = metrics.get("policy/mismatch_kl"), metrics.get("first/policy/mismatch_kl")
    if now is None or first is None:
        return None
    return now >= max(MISMATCH_KL, MISMATCH_GROWTH * first) or None


def _describe_mismatch(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    then = "in the first with tokens as old" if metrics.get("staleness/mean", 0.0) else "at first"
    evidence = (
        f"Trainer and engine disagree more and more about the same tokens: their KL was "
        f"{metrics['policy/mismatch_kl']:.2g} nats per token in {in_rollouts(rollouts)}, and "
        f"{metrics['first/policy/mismatch_kl']:.2g} {then}."
    )
    return evidence, "--algo.correction.level, --actor.adam.lr and --train.max_staleness"


def _stale(metrics: Metrics, run: LearningSettings) -> bool | None:
    played = metrics.get("rollout/prompts_played", 0.0)
    return (played > 0 and metrics.get("rollout/rejected_stale", 0.0) / played >= STALE_SHARE) or None


def _describe_stale(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    evidence = (
        f"{metrics['rollout/rejected_stale']:.0f} of {metrics['rollout/prompts_played']:.0f} groups were dropped in "
        f"{in_rollouts(rollouts)}, as their tokens were too old when they could be trained on: that work is in vain."
    )
    return evidence, "--train.max_staleness and --rollout.max_new_tokens"


def _failures(metrics: Metrics) -> dict[str, float]:
    """Returns the failed episodes by kind, but for those to which no reward applies."""
    prefix = "rollout/failed_"
    found = {name.removeprefix(prefix): count for name, count in metrics.items() if name.startswith(prefix)}
    return {kind: count for kind, count in found.items() if kind != "not_applicable"}


def _failing(metrics: Metrics, run: LearningSettings) -> bool | None:
    failed = sum(_failures(metrics).values())
    return (failed > 0 and failed >= FAILED_SHARE * (metrics.get("rollout/samples", 0.0) + failed)) or None


def _describe_failing(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    failures = _failures(metrics)
    counts = ", ".join(f"{count:.0f} by {kind}" for kind, count in sorted(failures.items()))
    episodes = metrics.get("rollout/samples", 0.0) + sum(failures.values())
    evidence = f"Episodes failed in {in_rollouts(rollouts)} (of the last {episodes:.0f}: {counts}), and are left out."
    causes = {
        "reward": "the reward and --reward.timeout",
        "environment": "the environment and its tools",
        "infrastructure": "the engines' log",
        "data": "--data.max_len",
    }
    most = max(failures, key=lambda kind: failures[kind])
    return evidence, f"{causes.get(most, 'the log')}, where each failure is named"


def _duplicates(metrics: Metrics, run: LearningSettings) -> bool | None:
    if run.one_token or _collapsed(metrics, run):
        # Answers of one token repeat anyway; a collapsed entropy is a finding itself, and causes duplicates.
        return None
    repeated = metrics.get("rollout/duplicate_share", 0.0) >= DUPLICATE_SHARE
    return (repeated and metrics.get("rollout/all_passed_share", 0.0) < PASSED_SHARE) or None


def _describe_duplicates(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    evidence = (
        f"{metrics['rollout/duplicate_share']:.0%} of the replies of {in_rollouts(rollouts)} repeat another one to the "
        "same prompt word for word: they tell nothing that it does not."
    )
    return evidence, "--rollout.temperature, --rollout.top_p and --rollout.top_k"


def _clipped_share(metrics: Metrics) -> float:
    return metrics.get("policy/clip_low_share", 0.0) + metrics.get("policy/clip_high_share", 0.0)


def _clipped(metrics: Metrics, run: LearningSettings) -> bool | None:
    return _clipped_share(metrics) >= CLIPPED_SHARE or None


def _describe_clipped(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    evidence = (
        f"The ratio of {_clipped_share(metrics):.0%} of the tokens was clipped in {in_rollouts(rollouts)}: the policy "
        "moves too far from the one that sampled them."
    )
    return evidence, "--actor.adam.lr, --actor.eps_clip_low_high, --train.max_epochs and --train.batch_size"


def _fallen_parts(metrics: Metrics) -> dict[str, tuple[float, float]]:
    """Returns the named rewards that lost `PART_LEFT` of what they contributed at first: both contributions."""
    known = {
        name: (metrics[f"first/{name}"], value)
        for name, value in metrics.items()
        if name.startswith(PART) and f"first/{name}" in metrics
    }
    return {name.removeprefix(PART): (first, now) for name, (first, now) in known.items() if now <= PART_LEFT * first}


def _part_falls(metrics: Metrics, run: LearningSettings) -> str | None:
    grew = metrics.get("reward/mean", 0.0) > metrics.get("first/reward/mean", float("inf"))
    fallen = [name for name, (first, _) in sorted(_fallen_parts(metrics).items()) if first > 0]
    return fallen[0] if grew and fallen else None


def _describe_part_falls(metrics: Metrics, run: LearningSettings, rollouts: int) -> tuple[str, str]:
    name = _part_falls(metrics, run)
    assert name is not None
    first, now = _fallen_parts(metrics)[name]
    evidence = (
        f"The reward rose to {metrics['reward/mean']:.3g}, while its part {name} fell from {first:.2g} to {now:.2g} in "
        f"{in_rollouts(rollouts)}: the other parts are learned at its expense."
    )
    return evidence, "the reward, and --reward.weights"


RULES = {
    "constant_reward": Rule(sign=_constant_reward, describe=_describe_constant_reward, no_update=True),
    "no_spread": Rule(sign=_no_spread, describe=_describe_no_spread, no_update=True),
    **LENGTH_RULES,
    "no_gradient": Rule(sign=_no_gradient, describe=_describe_no_gradient, no_update=True),
    "no_step": Rule(sign=_no_step, describe=_describe_no_step, no_update=True),
    "reference_kept": Rule(sign=_reference_kept, describe=_describe_reference_kept),
    "chosen_fell": Rule(sign=_chosen_fell, describe=_describe_chosen_fell),
    "reference_left": Rule(sign=_reference_left, describe=_describe_reference_left),
    "kl_outweighs": Rule(sign=_kl_outweighs, describe=_describe_kl_outweighs),
    "entropy_collapsed": Rule(sign=_collapsed, describe=_describe_collapsed),
    "mismatch_grows": Rule(sign=_mismatch, describe=_describe_mismatch),
    "stale": Rule(sign=_stale, describe=_describe_stale),
    "failing": Rule(sign=_failing, describe=_describe_failing),
    "duplicates": Rule(sign=_duplicates, describe=_describe_duplicates),
    "clipped": Rule(sign=_clipped, describe=_describe_clipped),
    "part_falls": Rule(sign=_part_falls, describe=_describe_part_falls),
    **TOOL_RULES,
    **MACHINE_RULES,
}
