"""Rules across settings: every setting either changes what a run does or is refused in that combination.

Importable without torch, so that a bad command line is answered at once. Each broken rule is one sentence: what was
set, which rule it breaks, and the flag that fixes it. What only files or models can tell is not checked here.
"""

import math
import re
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import attrs

from rollgrad.application.config import (
    ActorConfig,
    AdvantageConfig,
    AlgoConfig,
    CorrectionConfig,
    CorrectionGate,
    CorrectionLevel,
    CorrectionMode,
    CriticConfig,
    EvalConfig,
    KLAgainst,
    KLConfig,
    KLEstimator,
    LRScheduler,
    Normalise,
    OldLogprobs,
    RewardConfig,
    RLConfig,
    RolloutConfig,
    TrainConfig,
    Verifier,
    Whiten,
)
from rollgrad.application.ranges import RANGES
from rollgrad.domain.catalogue import ESTIMATORS, POLICY_LOSSES, estimator_traits, policy_loss_traits
from rollgrad.domain.errors import ConfigurationError

REASONING_GYM = "reasoning_gym:"
"""Prefix of a dataset that is generated, and judged by its own scorer."""

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
    estimator_traits(config.algo.advantage.estimator)
    policy_loss_traits(config.actor.policy_loss_type)
    has_environment = has_environment or config.train.agent_func_path is not None
    _raise_first(
        _model_problems(config),
        _required_data_problems(config),
        _range_problems(config),
        _algorithm_problems(config),
        _policy_loss_problems(config),
        _kl_problems(config),
        _correction_problems(config),
        _sampling_problems(config),
        _shaping_problems(config, has_environment=has_environment),
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
    has_environment = has_environment or config.train.agent_func_path is not None
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
    if config.algo.preset is not None:
        yield (
            f"algo.preset is {config.algo.preset!r}, but a preset is expanded where a file or flags are read: in "
            "Python call rollgrad.load_config(preset=...)."
        )
    advantage = config.algo.advantage
    estimator = advantage.estimator
    traits = estimator_traits(estimator)
    samples = config.rollout.n_samples_per_prompt
    if "group" in traits.needs and samples < 2:
        yield (
            f"algo.advantage.estimator {estimator} compares the samples of a prompt, but "
            f"rollout.n_samples_per_prompt is {samples}: set --rollout.n_samples_per_prompt to 2 or more."
        )
    for key in ("gamma", "lambd", "critic_lambd", "length_adaptive_alpha"):
        value = getattr(advantage, key)
        if value != getattr(AdvantageConfig(), key) and key not in traits.uses:
            yield (
                f"algo.advantage.{key} is {value}, which the {estimator} estimator does not use: leave "
                f"--algo.advantage.{key} out, or set --algo.advantage.estimator to {_either(_users_of(key))}."
            )
    if advantage.length_adaptive_alpha is not None and advantage.lambd != AdvantageConfig().lambd:
        yield (
            f"algo.advantage.lambd is {advantage.lambd} and algo.advantage.length_adaptive_alpha is "
            f"{advantage.length_adaptive_alpha}, which replaces it: leave --algo.advantage.lambd out."
        )
    if advantage.no_std_norm and (advantage.whiten or traits.whiten) == Whiten.NONE:
        yield (
            f"algo.advantage.no_std_norm is True, but the {estimator} estimator's advantages are not whitened: leave "
            "--algo.advantage.no_std_norm out, or set --algo.advantage.whiten to batch or group."
        )
    critic = _changed(config.critic, CriticConfig())
    if "critic" not in traits.needs and critic:
        yield (
            f"critic.{critic} is set, but the {estimator} estimator has no critic: leave --critic.{critic} out, or set "
            f"--algo.advantage.estimator to gae."
        )
    frozen, steps = config.critic.freezing_steps, config.train.max_steps
    if steps is not None and frozen >= steps:
        yield (
            f"critic.freezing_steps is {frozen}, but the run has {steps} rollouts, so the actor would never be "
            "trained: lower --critic.freezing_steps or raise --train.max_steps."
        )
    kl = config.algo.kl
    if "teacher" in traits.needs and (
        config.ref.model_name_or_path is None or kl.init_coef == 0 or kl.use_loss or kl.estimator is not KLEstimator.K1
    ):
        yield (
            f"algo.advantage.estimator {estimator} learns from the log-probs of a teacher: name it with "
            "--ref.model_name_or_path, set --algo.kl.init_coef above 0 (1 is usual), and leave --algo.kl.use_loss and "
            "--algo.kl.estimator out."
        )


def _policy_loss_problems(config: RLConfig) -> Iterator[str]:
    actor, default = config.actor, ActorConfig()
    name = actor.policy_loss_type
    traits = policy_loss_traits(name)
    for key in ("eps_clip", "eps_clip_low_high"):
        if getattr(actor, key) is not None and traits.clip is None:
            yield f"actor.{key} is {getattr(actor, key)}, but the {name} loss does not clip: leave --actor.{key} out."
    for key in ("dual_clip", "sapo_tau", "cov_share", "cov_range", "cov_kl_coef"):
        value = getattr(actor, key)
        if value != getattr(default, key) and key not in traits.uses:
            users = [loss for loss, other in POLICY_LOSSES.items() if key in other.uses]
            yield (
                f"actor.{key} is {value}, which the {name} loss does not use: leave --actor.{key} out, or set "
                f"--actor.policy_loss_type to {_either(users)}."
            )
    if actor.eps_clip is not None and actor.eps_clip_low_high is not None:
        yield (
            f"actor.eps_clip is {actor.eps_clip} and actor.eps_clip_low_high is {actor.eps_clip_low_high}, which "
            "replaces it: leave --actor.eps_clip out."
        )
    if actor.entropy_target is None and actor.entropy_coef_step != default.entropy_coef_step:
        yield (
            f"actor.entropy_coef_step is {actor.entropy_coef_step}, but a fixed entropy weight has no step: set "
            "--actor.entropy_target, or leave --actor.entropy_coef_step out."
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
            "--algo.kl.estimator to k2, k3 or k3_unbiased."
        )
    if kl.estimator is KLEstimator.K3_UNBIASED and not kl.use_loss:
        yield (
            "algo.kl.estimator is k3_unbiased, which weighs a loss by the importance ratio, but KL is in the reward: "
            "turn on --algo.kl.use_loss, or set --algo.kl.estimator to k1, k2 or k3."
        )
    if kl.against is KLAgainst.ROLLOUT:
        if not kl.use_loss:
            yield (
                "algo.kl.against is rollout, but KL is in the reward, where the policy that sampled is the policy "
                "itself: turn on --algo.kl.use_loss."
            )
        if config.ref.model_name_or_path is not None:
            yield (
                f"ref.model_name_or_path is {config.ref.model_name_or_path!r}, but algo.kl.against is rollout, which "
                "needs no reference: leave --ref.model_name_or_path out, or set --algo.kl.against to reference."
            )


def _correction_problems(config: RLConfig) -> Iterator[str]:
    correction, default = config.algo.correction, CorrectionConfig()
    if correction.level is CorrectionLevel.OFF:
        changed = _changed(correction, default)
        if changed:
            yield (
                f"algo.correction.{changed} is {getattr(correction, changed)}, but algo.correction.level is off: set "
                f"--algo.correction.level to token, sequence or geometric, or leave --algo.correction.{changed} out."
            )
        return
    mode, gate = correction.mode, correction.gate
    masks_ratio = mode is CorrectionMode.MASK and gate is CorrectionGate.RATIO
    reads = {
        "low": mode is CorrectionMode.CLIP or masks_ratio,
        "high": mode is not CorrectionMode.MASK or masks_ratio,
        "threshold": gate is not CorrectionGate.RATIO,
    }
    for key, read in reads.items():
        value = getattr(correction, key)
        if not read and value != getattr(default, key):
            yield (
                f"algo.correction.{key} is {value}, which mode {mode} with gate {gate} does not use: leave "
                f"--algo.correction.{key} out."
            )
    if correction.low >= correction.high:
        yield (
            f"algo.correction.low is {correction.low} and algo.correction.high is {correction.high}, but the lower "
            "bound must be below the upper: change --algo.correction.low or --algo.correction.high."
        )
    if gate is CorrectionGate.OPSM and correction.level is CorrectionLevel.TOKEN:
        yield (
            "algo.correction.gate is opsm, which judges whole sequences, but algo.correction.level is token: set "
            "--algo.correction.level to sequence."
        )
    if config.algo.old_logprobs is OldLogprobs.ROLLOUT and mode is not CorrectionMode.MASK:
        yield (
            f"algo.correction.mode is {mode} with algo.old_logprobs rollout, whose ratio already is against the policy "
            "that sampled, so only leaving out remains: set --algo.correction.mode to mask, or --algo.old_logprobs to "
            "recompute."
        )


def _sampling_problems(config: RLConfig) -> Iterator[str]:
    """Which groups are played and kept."""
    algo, default, rollout = config.algo, AlgoConfig(), config.rollout
    filtering = algo.dynamic_filtering_enable or algo.dynamic_filtering_spread
    if filtering and rollout.n_samples_per_prompt < 2:
        key = "dynamic_filtering_enable" if algo.dynamic_filtering_enable else "dynamic_filtering_spread"
        yield (
            f"algo.{key} judges groups, but rollout.n_samples_per_prompt is {rollout.n_samples_per_prompt}: set "
            "--rollout.n_samples_per_prompt to 2 or more."
        )
    for key, used in (("range", algo.dynamic_filtering_enable), ("budget", filtering)):
        value = getattr(algo, f"dynamic_filtering_{key}")
        if not used and value != getattr(default, f"dynamic_filtering_{key}"):
            yield (
                f"algo.dynamic_filtering_{key} is {value}, but no group is filtered by it: turn on "
                f"--algo.dynamic_filtering_enable, or leave --algo.dynamic_filtering_{key} out."
            )
    groups = rollout.generate_batch_size
    if groups is not None and groups < rollout.batch_size:
        yield (
            f"rollout.generate_batch_size is {groups}, but a rollout trains on {rollout.batch_size} groups: raise "
            "--rollout.generate_batch_size, or leave it out."
        )
    over_sampling = groups is not None and groups > rollout.batch_size
    off_policy = algo.correction.level is not CorrectionLevel.OFF or algo.old_logprobs is not OldLogprobs.RECOMPUTE
    if over_sampling and not off_policy:
        yield (
            f"rollout.generate_batch_size is {groups} with rollout.batch_size {rollout.batch_size}, so some samples "
            "are one update old when they are trained on, which needs a correction: set --algo.correction.level (or "
            "--algo.preset tis), or --algo.old_logprobs to rollout."
        )
    if over_sampling and (config.ckpt.state_steps > 0 or config.ckpt.resume):
        key = "state_steps" if config.ckpt.state_steps > 0 else "resume"
        yield (
            f"ckpt.{key} is {getattr(config.ckpt, key)} with rollout.generate_batch_size {groups}, but groups kept for "
            f"the next rollout are not part of a training state: leave --ckpt.{key} or --rollout.generate_batch_size "
            "out."
        )
    if algo.old_logprobs is OldLogprobs.INTERPOLATE and not over_sampling:
        yield (
            "algo.old_logprobs is interpolate, but every sample is of the newest policy, so there is nothing between: "
            "set --algo.old_logprobs to rollout."
        )
    corrected = off_policy or algo.kl.against is KLAgainst.ROLLOUT
    if corrected and (rollout.top_p < 1 or rollout.top_k > 0):
        key = (
            f"algo.old_logprobs is {algo.old_logprobs}"
            if algo.old_logprobs is not OldLogprobs.RECOMPUTE
            else f"algo.correction.level is {algo.correction.level}"
            if algo.correction.level is not CorrectionLevel.OFF
            else "algo.kl.against is rollout"
        )
        yield (
            f"{key} with rollout.top_p {rollout.top_p} and rollout.top_k {rollout.top_k}, but the rollout's log-probs "
            "are then of a truncated distribution while training uses the full one, so their ratio is biased: set "
            "--rollout.top_p 1 and --rollout.top_k 0."
        )


def _shaping_problems(config: RLConfig, *, has_environment: bool) -> Iterator[str]:
    reward, default, limit = config.reward, RewardConfig(), config.rollout.max_new_tokens
    if (reward.normalize is Normalise.DATASET) != (reward.normalize_mean_std is not None):
        yield (
            f"reward.normalize is {reward.normalize} and reward.normalize_mean_std is {reward.normalize_mean_std}, but "
            "a dataset's moments are given and used together: set --reward.normalize dataset and "
            "--reward.normalize_mean_std MEAN STD."
        )
    if reward.overlong_buffer_len is None and reward.overlong_penalty_factor != default.overlong_penalty_factor:
        yield (
            f"reward.overlong_penalty_factor is {reward.overlong_penalty_factor}, but there is no length penalty: set "
            "--reward.overlong_buffer_len, or leave --reward.overlong_penalty_factor out."
        )
    if (reward.overlong_buffer_len or 0) > limit:
        yield (
            f"reward.overlong_buffer_len is {reward.overlong_buffer_len}, but a reply has at most {limit} tokens "
            "(rollout.max_new_tokens): lower --reward.overlong_buffer_len."
        )
    if not reward.cosine_length:
        for key in ("cosine_passed", "cosine_failed", "cosine_exceeded"):
            if getattr(reward, key) != getattr(default, key):
                yield (
                    f"reward.{key} is {getattr(reward, key)}, but the reward does not go by length: turn on "
                    f"--reward.cosine_length, or leave --reward.{key} out."
                )
    if reward.cosine_length and reward.overlong_buffer_len is not None:
        yield (
            "reward.cosine_length and reward.overlong_buffer_len both make the reward go by length: leave "
            "--reward.overlong_buffer_len or --reward.cosine_length out."
        )
    by_length = [
        key
        for key in ("cosine_length", "overlong_buffer_len", "stop_properly_penalty_coef")
        if getattr(reward, key) != getattr(default, key)
    ]
    if by_length and "greedy_baseline" in estimator_traits(config.algo.advantage.estimator).needs:
        yield (
            f"reward.{by_length[0]} is set with algo.advantage.estimator {config.algo.advantage.estimator}, whose "
            f"greedy baseline is not shaped by length: leave --reward.{by_length[0]} out."
        )
    if has_environment and (reward.cosine_length or reward.overlong_buffer_len is not None):
        key = "cosine_length" if reward.cosine_length else "overlong_buffer_len"
        yield (
            f"reward.{key} measures one reply against rollout.max_new_tokens, but an environment's episodes have many: "
            f"leave --reward.{key} out."
        )


def _optimizer_problems(config: RLConfig) -> Iterator[str]:
    models: tuple[tuple[str, ActorConfig | CriticConfig], ...] = (("actor", config.actor), ("critic", config.critic))
    for name, model in models:
        if model.lr_scheduler is LRScheduler.CONSTANT and model.min_lr_ratio != ActorConfig().min_lr_ratio:
            yield (
                f"{name}.min_lr_ratio is {model.min_lr_ratio}, but a constant learning rate has no floor: set "
                f"--{name}.lr_scheduler to linear or cosine_with_min_lr, or leave --{name}.min_lr_ratio out."
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
    for key in ("max_turns", "max_episode_tokens", "max_episode_seconds"):
        value = getattr(config.rollout, key)
        if value != getattr(RolloutConfig(), key) and not has_environment:
            yield (
                f"rollout.{key} is {value}, but episodes have one turn without an environment: name one with "
                f"--train.agent_func_path (environment= in Python), or leave --rollout.{key} out."
            )
    if config.train.agent_func_path is not None:
        reward = config.reward
        for key in ("function_path", "remote_url", "verifier"):
            if getattr(reward, key) is not None:
                yield (
                    f"reward.{key} is {getattr(reward, key)!r}, but rewards come from the steps of the environment in "
                    f"train.agent_func_path: leave --reward.{key} out (set it to None over a file)."
                )


def _reward_problems(config: RLConfig, datasets: str, *, has_reward: bool) -> Iterator[str]:
    reward = config.reward
    sources = [
        text
        for text, is_set in (
            (f"reward.function_path {reward.function_path!r}", reward.function_path is not None),
            (f"reward.remote_url {reward.remote_url!r}", reward.remote_url is not None),
            (f"reward.verifier {reward.verifier}", reward.verifier is not None),
        )
        if is_set
    ]
    generated = all(_is_generated(name) for name in dataset_names(datasets))
    if len(sources) > 1:
        yield f"{' and '.join(sources[:2])} are both set, but a run has one reward: keep one of them."
    teaches = "teacher" in estimator_traits(config.algo.advantage.estimator).needs
    if not sources and not generated and not has_reward and not teaches:
        yield "No reward is set: name one with --reward.function_path, --reward.remote_url or --reward.verifier."
    named = reward.function_path is not None or reward.remote_url is not None or has_reward
    if reward.weights is not None and not named:
        yield (
            f"reward.weights is {reward.weights}, but only a function or a server returns rewards with names: set "
            "--reward.function_path or --reward.remote_url, or leave --reward.weights out."
        )
    for key in ("remote_batch_size", "failure_value"):
        if reward.remote_url is None and getattr(reward, key) != getattr(RewardConfig(), key):
            yield (
                f"reward.{key} is {getattr(reward, key)}, but there is no reward server: set --reward.remote_url, or "
                f"leave --reward.{key} out."
            )
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


def _users_of(key: str) -> list[str]:
    return [name for name, traits in ESTIMATORS.items() if key in traits.uses]


def _either(names: Iterable[str]) -> str:
    return " or ".join(names)
