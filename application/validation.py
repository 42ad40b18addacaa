"""Rules across settings: every setting either changes what a run does or is refused in that combination.

Importable without torch, so that a bad command line is answered at once. Each broken rule is one sentence: what was
set, which rule it breaks, and the flag that fixes it. What only files or models can tell is not checked here.
"""

import math
import re
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import attrs

from rollgrad.application.config import (
    ActorConfig,
    CriticConfig,
    Estimator,
    EvalConfig,
    KLConfig,
    KLEstimator,
    LRScheduler,
    OldLogprobs,
    RLConfig,
    RolloutConfig,
    TrainConfig,
    Verifier,
)
from rollgrad.application.ranges import RANGES
from rollgrad.domain.errors import ConfigurationError

REASONING_GYM = "reasoning_gym:"
"""Prefix of a dataset that is generated, and judged by its own scorer."""

GROUP_ESTIMATORS = (Estimator.REINFORCE_BASELINE, Estimator.RLOO, Estimator.GROUP_NORM, Estimator.DR_GRPO)
DISCOUNTED_ESTIMATORS = (Estimator.GAE, Estimator.REINFORCE)
WHITENED_ESTIMATORS = (Estimator.GAE, Estimator.REINFORCE, Estimator.REINFORCE_BASELINE)
LABELLED_VERIFIERS = (Verifier.LAST_NUMBER, Verifier.EXACT_MATCH, Verifier.MATH)

PROBABILITY_TOLERANCE = 1e-6
"""Mixing probabilities are written in decimal, so their sum is 1 up to rounding."""


def validate(config: RLConfig, *, has_reward: bool = False, has_environment: bool = False) -> None:
    """Checks the settings of a training run.

    `has_reward`: the caller passes a reward object, which stands in for whatever reward is set. `has_environment`: the
    caller passes an environment, which rewards its own steps.

    Raises:
        ConfigurationError: the first rule that is broken.
    """
    _raise_first(
        _model_problems(config),
        _required_data_problems(config),
        _range_problems(config),
        _algorithm_problems(config),
        _kl_problems(config),
        _optimizer_problems(config),
        _rollout_problems(config),
        _data_problems(config),
        _reward_problems(config, config.data.prompt_dataset, has_reward=has_reward or has_environment),
        _turn_problems(config, has_environment=has_environment),
        _eval_problems(config),
    )


def validate_evaluation(config: RLConfig, *, has_reward: bool = False, has_environment: bool = False) -> None:
    """Checks the settings that evaluation alone reads: the model, `eval`, `reward` and the form of the prompts.

    Raises:
        ConfigurationError: the first rule that is broken.
    """
    _raise_first(
        _model_problems(config),
        _required_eval_problems(config),
        _range_problems(config),
        _prompt_form_problems(config),
        _reward_problems(config, config.eval.dataset or "", has_reward=has_reward or has_environment),
        _turn_problems(config, has_environment=has_environment),
        _eval_problems(config),
    )


def dataset_names(datasets: str) -> tuple[str, ...]:
    """The datasets of a comma-separated setting.

    >>> dataset_names("a.jsonl, reasoning_gym:basic_arithmetic")
    ('a.jsonl', 'reasoning_gym:basic_arithmetic')
    """
    return tuple(name.strip() for name in datasets.split(",") if name.strip())


def optimizer_steps_per_rollout(config: RLConfig) -> int:
    """Optimizer steps that one rollout feeds: passes over its samples times mini-batches of a pass."""
    samples = config.rollout.batch_size * config.rollout.n_samples_per_prompt
    return config.train.max_epochs * math.ceil(samples / (config.train.batch_size or samples))


def _raise_first(*rules: Iterator[str]) -> None:
    for problems in rules:
        for problem in problems:
            raise ConfigurationError(problem)


def _changed(section: Any, default: Any) -> str | None:
    """Dotted name within `section` of the first field that differs from `default`."""
    for field in attrs.fields(type(section)):
        value, unchanged = getattr(section, field.name), getattr(default, field.name)
        if value != unchanged:
            inner = _changed(value, unchanged) if attrs.has(type(value)) else None
            return f"{field.name}.{inner}" if inner else field.name
    return None


def _leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in attrs.fields(type(section)):
        value = getattr(section, field.name)
        if attrs.has(type(value)):
            yield from _leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def _model_problems(config: RLConfig) -> Iterator[str]:
    if not config.actor.model_name_or_path:
        yield "No model is set: name one with --actor.model_name_or_path."


def _required_data_problems(config: RLConfig) -> Iterator[str]:
    if not dataset_names(config.data.prompt_dataset):
        yield "No prompts are set: name a dataset with --data.prompt_dataset."


def _required_eval_problems(config: RLConfig) -> Iterator[str]:
    if not dataset_names(config.eval.dataset or ""):
        yield "No held-out prompts are set: name a dataset with --eval.dataset."


def _range_problems(config: RLConfig) -> Iterator[str]:
    for key, value in _leaves(config):
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            yield f"{key} is {value}, but it must be finite: change --{key}."
    for key, (holds, rule) in RANGES.items():
        value = attrgetter(key)(config)
        if value is not None and not holds(value):
            yield f"{key} is {value!r}, but it must be {rule}: change --{key}."


def _algorithm_problems(config: RLConfig) -> Iterator[str]:
    advantage = config.algo.advantage
    estimator = advantage.estimator
    samples = config.rollout.n_samples_per_prompt
    if estimator in GROUP_ESTIMATORS and samples < 2:
        yield (
            f"algo.advantage.estimator {estimator} compares the samples of a prompt, but "
            f"rollout.n_samples_per_prompt is {samples}: set --rollout.n_samples_per_prompt to 2 or more."
        )
    for key, value, default, users in (
        ("gamma", advantage.gamma, 1.0, DISCOUNTED_ESTIMATORS),
        ("lambd", advantage.lambd, 1.0, (Estimator.GAE,)),
        ("no_std_norm", advantage.no_std_norm, False, WHITENED_ESTIMATORS),
    ):
        if value != default and estimator not in users:
            yield (
                f"algo.advantage.{key} is {value}, which the {estimator} estimator does not use: leave "
                f"--algo.advantage.{key} out, or set --algo.advantage.estimator to {_either(users)}."
            )
    critic = _changed(config.critic, CriticConfig())
    if estimator is not Estimator.GAE and critic:
        yield (
            f"critic.{critic} is set, but the {estimator} estimator has no critic: leave --critic.{critic} out, or set "
            f"--algo.advantage.estimator to gae."
        )


def _kl_problems(config: RLConfig) -> Iterator[str]:
    kl = config.algo.kl
    without_kl = "but algo.kl.init_coef is 0, which turns KL off: set --algo.kl.init_coef above 0, or leave"
    if kl.init_coef == 0:
        if config.ref.model_name_or_path is not None:
            yield (
                f"ref.model_name_or_path is {config.ref.model_name_or_path!r}, {without_kl} --ref.model_name_or_path "
                "out."
            )
        changed = _changed(kl, KLConfig())
        if changed:
            yield f"algo.kl.{changed} is {getattr(kl, changed)}, {without_kl} --algo.kl.{changed} out."
    if kl.target is None and kl.horizon != KLConfig().horizon:
        yield (
            f"algo.kl.horizon is {kl.horizon}, but a fixed KL weight has no horizon: set --algo.kl.target, or leave "
            "--algo.kl.horizon out."
        )
    if kl.use_loss and kl.estimator is KLEstimator.K1:
        yield (
            "algo.kl.use_loss is on with algo.kl.estimator k1, whose gradient is zero on average: set "
            "--algo.kl.estimator to k2 or k3."
        )


def _optimizer_problems(config: RLConfig) -> Iterator[str]:
    models: tuple[tuple[str, ActorConfig | CriticConfig], ...] = (("actor", config.actor), ("critic", config.critic))
    for name, model in models:
        if model.lr_scheduler is LRScheduler.CONSTANT and model.min_lr_ratio != ActorConfig().min_lr_ratio:
            yield (
                f"{name}.min_lr_ratio is {model.min_lr_ratio}, but a constant learning rate has no floor: set "
                f"--{name}.lr_scheduler to linear or cosine_with_min_lr, or leave --{name}.min_lr_ratio out."
            )
    actor = config.actor
    if actor.eps_clip_low_high is not None and actor.eps_clip != ActorConfig().eps_clip:
        yield (
            f"actor.eps_clip is {actor.eps_clip} and actor.eps_clip_low_high is {actor.eps_clip_low_high}, which "
            "replaces it: leave --actor.eps_clip out."
        )
    if config.train.max_steps is not None and config.train.num_episodes != TrainConfig().num_episodes:
        yield (
            f"train.max_steps is {config.train.max_steps} and train.num_episodes is {config.train.num_episodes}, but a "
            "run has one length: leave out --train.max_steps or --train.num_episodes."
        )


def _rollout_problems(config: RLConfig) -> Iterator[str]:
    rollout = config.rollout
    samples = rollout.batch_size * rollout.n_samples_per_prompt
    if (config.train.batch_size or 0) > samples:
        yield (
            f"train.batch_size is {config.train.batch_size}, but a rollout has {rollout.batch_size} prompts x "
            f"{rollout.n_samples_per_prompt} samples = {samples}: lower --train.batch_size or raise "
            "--rollout.batch_size."
        )
    if config.algo.old_logprobs is not OldLogprobs.ROLLOUT:
        return
    if optimizer_steps_per_rollout(config) == 1:
        yield (
            "algo.old_logprobs is rollout, but each rollout feeds a single optimizer step, whose ratio is 1 without "
            "it: leave --algo.old_logprobs out, or set --train.batch_size below the rollout's "
            f"{samples} samples."
        )
    if rollout.top_p < 1 or rollout.top_k > 0:
        yield (
            f"algo.old_logprobs is rollout with rollout.top_p {rollout.top_p} and rollout.top_k {rollout.top_k}, but "
            "the rollout's log-probs are then of a truncated distribution while training uses the full one: set "
            "--algo.old_logprobs to recompute, or --rollout.top_p 1 and --rollout.top_k 0."
        )


def _data_problems(config: RLConfig) -> Iterator[str]:
    data = config.data
    names = dataset_names(data.prompt_dataset)
    if data.prompt_probs is not None:
        if len(data.prompt_probs) != len(names):
            yield (
                f"data.prompt_probs has {len(data.prompt_probs)} numbers for {len(names)} datasets: give one for each "
                "dataset of --data.prompt_dataset."
            )
        total = sum(data.prompt_probs)
        if min(data.prompt_probs, default=0) < 0 or abs(total - 1) > PROBABILITY_TOLERANCE:
            yield (
                f"data.prompt_probs is {data.prompt_probs} with sum {total:g}, but probabilities are at least 0 and "
                "sum to 1: change --data.prompt_probs."
            )
    generated = any(_is_generated(name) for name in (*names, *dataset_names(config.eval.dataset or "")))
    if data.size != type(data)().size and not generated:
        yield (
            f"data.size is {data.size}, but no dataset is generated: leave --data.size out, or name a "
            f"{REASONING_GYM}TASK in --data.prompt_dataset."
        )
    yield from _prompt_form_problems(config)


def _prompt_form_problems(config: RLConfig) -> Iterator[str]:
    data = config.data
    if data.system_prompt is not None and not data.apply_chat_template:
        yield (
            f"data.system_prompt is {data.system_prompt!r}, but it needs the chat template: turn on "
            "--data.apply_chat_template, or leave --data.system_prompt out."
        )
    if data.input_template is not None:
        if data.apply_chat_template:
            yield (
                f"data.input_template is {data.input_template!r}, but the chat template is on: turn it off with "
                "--data.no_apply_chat_template, or leave --data.input_template out."
            )
        if "{}" not in data.input_template:
            yield (
                f"data.input_template is {data.input_template!r}, which has no {{}} where the prompt goes: change "
                "--data.input_template."
            )


def _turn_problems(config: RLConfig, *, has_environment: bool) -> Iterator[str]:
    if config.rollout.max_turns != RolloutConfig().max_turns and not has_environment:
        yield (
            f"rollout.max_turns is {config.rollout.max_turns}, but episodes have one turn without an environment: "
            "pass environment= to rollgrad.train, or remove --rollout.max_turns."
        )


def _reward_problems(config: RLConfig, datasets: str, *, has_reward: bool) -> Iterator[str]:
    reward = config.reward
    sources = [
        text
        for text, is_set in (
            (f"reward.function_path {reward.function_path!r}", reward.function_path is not None),
            (f"reward.verifier {reward.verifier}", reward.verifier is not None),
        )
        if is_set
    ]
    generated = all(_is_generated(name) for name in dataset_names(datasets))
    if len(sources) > 1:
        yield f"{' and '.join(sources)} are both set, but a run has one reward: keep one of them."
    if not sources and not generated and not has_reward:
        yield "No reward is set: name one with --reward.function_path or --reward.verifier."
    if reward.verifier is Verifier.FORMAT and reward.format_pattern is None:
        yield "reward.verifier is format, which needs a regular expression: set --reward.format_pattern."
    if reward.format_pattern is not None:
        if reward.verifier is not Verifier.FORMAT:
            yield (
                f"reward.format_pattern is {reward.format_pattern!r}, which only the format verifier reads: set "
                "--reward.verifier to format, or leave --reward.format_pattern out."
            )
        try:
            re.compile(reward.format_pattern)
        except re.error as error:
            yield (
                f"reward.format_pattern is {reward.format_pattern!r}, which is no regular expression ({error}): change "
                "--reward.format_pattern."
            )
    if reward.verifier in LABELLED_VERIFIERS and config.data.label_key is None and not generated:
        yield (
            f"reward.verifier {reward.verifier} compares replies with a label: name the label's column with "
            "--data.label_key."
        )


def _eval_problems(config: RLConfig) -> Iterator[str]:
    evaluation = config.eval
    changed = _changed(evaluation, EvalConfig())
    if not evaluation.dataset and changed:
        yield (
            f"eval.{changed} is {getattr(evaluation, changed)!r}, but there is nothing to evaluate on: set "
            f"--eval.dataset, or leave --eval.{changed} out."
        )
    if evaluation.n_samples_per_prompt > 1 and evaluation.temperature == 0:
        yield (
            f"eval.n_samples_per_prompt is {evaluation.n_samples_per_prompt} with eval.temperature 0, which draws the "
            "same reply each time: set --eval.temperature above 0, or --eval.n_samples_per_prompt 1."
        )


def _is_generated(name: str) -> bool:
    return name.startswith(REASONING_GYM)


def _either(estimators: tuple[Estimator, ...]) -> str:
    return " or ".join(estimators)
