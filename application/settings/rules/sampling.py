"""Rules of how episodes are sampled, kept and rewarded by length. See `validation`."""

from collections.abc import Iterable, Iterator

from rollgrad.application.settings.correction import correction_level, learns_from_stale, may_be_stale, off_policy
from rollgrad.application.settings.derived import longest_reply, samples_per_rollout
from rollgrad.application.settings.presets import traits_of
from rollgrad.application.settings.rules.asynchrony import correction_fix
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import RouterReplay
from rollgrad.application.settings.sections.reward import RewardConfig, Verifier
from rollgrad.application.settings.sections.rollout import Engine, RolloutConfig
from rollgrad.domain.algorithms.catalogue import ESTIMATORS
from rollgrad.domain.algorithms.settings import AdvantageSettings, CorrectionLevel, KLAgainst, OldLogprobs
from rollgrad.domain.algorithms.shaping_settings import Normalise

BY_LENGTH = ("cosine_length", "overlong_buffer_len", "group_length_coef", "stop_properly_penalty_coef")
"""Settings that change the sum of an episode's rewards by its length."""

SHAPING = (*BY_LENGTH, "normalize", "clip_range")
"""Settings that change the sum of an episode's rewards."""


def sampling_problems(config: RLConfig) -> Iterator[str]:
    """Yields the problems of playing and keeping groups."""
    algo, rollout = config.algo, config.rollout
    filtering = algo.dynamic_filtering_enable or algo.dynamic_filtering_spread
    if filtering and rollout.n_samples_per_prompt < 2:
        key = "dynamic_filtering_enable" if algo.dynamic_filtering_enable else "dynamic_filtering_spread"
        yield (
            f"algo.{key} judges groups, but rollout.n_samples_per_prompt is {rollout.n_samples_per_prompt}: set "
            "--rollout.n_samples_per_prompt to 2 or more."
        )
    groups = rollout.generate_batch_size
    if groups is not None and groups < rollout.batch_size:
        yield (
            f"rollout.generate_batch_size is {groups}, but a rollout trains on {rollout.batch_size} groups: raise "
            "--rollout.generate_batch_size, or leave it out."
        )
    overlaps = config.train.async_enable
    over_sampling = groups is not None and groups > rollout.batch_size and not overlaps
    if over_sampling and not learns_from_stale(config):
        yield (
            f"rollout.generate_batch_size is {groups} with rollout.batch_size {rollout.batch_size}, so some samples "
            f"are one update old when they are trained on, which needs a correction: {correction_fix(config)}."
        )
    if algo.old_logprobs is OldLogprobs.INTERPOLATE and not may_be_stale(config):
        yield (
            "algo.old_logprobs is interpolate, but every sample is of the newest policy, so there is nothing between: "
            "set --algo.old_logprobs to rollout."
        )
    if algo.old_logprobs is not OldLogprobs.RECOMPUTE and config.actor.lora.dropout > 0:
        yield (
            f"algo.old_logprobs is {algo.old_logprobs} with actor.lora.dropout {config.actor.lora.dropout}, but the "
            "policy before an update then has to be scored without dropout: leave one of --algo.old_logprobs and "
            "--actor.lora.dropout out."
        )
    corrected = off_policy(config) or algo.kl.against is KLAgainst.ROLLOUT
    if corrected and (rollout.top_p < 1 or rollout.top_k > 0):
        key = (
            f"algo.old_logprobs is {algo.old_logprobs}"
            if algo.old_logprobs is not OldLogprobs.RECOMPUTE
            else f"algo.correction.level is {correction_level(config)}"
            if correction_level(config) is not CorrectionLevel.OFF
            else "algo.kl.against is rollout"
        )
        yield (
            f"{key} with rollout.top_p {rollout.top_p} and rollout.top_k {rollout.top_k}, but the rollout's log-probs "
            "are then of a truncated distribution while training uses the full one, so their ratio is biased: set "
            "--rollout.top_p 1 and --rollout.top_k 0."
        )


def replay_problems(config: RLConfig) -> Iterator[str]:
    """Yields the problems of replaying the experts of a mixture."""
    replay, ds, engine = config.actor.router_replay, config.ds, config.rollout.engine
    if replay is RouterReplay.NONE:
        return
    if replay is RouterReplay.ENGINE and engine is Engine.SERVER:
        yield (
            f"actor.router_replay is engine with rollout.engine {engine}, which is not asked to which experts it sent "
            "tokens: set --actor.router_replay trainer, or --rollout.engine vllm or embedded."
        )
    if replay is RouterReplay.ENGINE and engine is Engine.VLLM and (stages := config.vllm.pipeline_parallel_size) > 1:
        yield (
            f"actor.router_replay is engine with vllm.pipeline_parallel_size {stages}, but vLLM says to which experts "
            "it sent tokens only where every process has all layers: set --vllm.tensor_parallel_size instead, or "
            "--actor.router_replay trainer."
        )
    if replay is RouterReplay.TRAINER and config.algo.old_logprobs is not OldLogprobs.RECOMPUTE:
        yield (
            f"actor.router_replay is trainer with algo.old_logprobs {config.algo.old_logprobs}, but experts are those "
            "of the pass that computes these log-probs: leave one of --actor.router_replay and --algo.old_logprobs out."
        )
    if config.cluster.enable and ds.tensor_parallel_size > 1:
        yield (
            f"actor.router_replay is {replay} with ds.tensor_parallel_size {ds.tensor_parallel_size}, but routers of "
            "layers that processes share choose for themselves: leave one of --actor.router_replay and "
            "--ds.tensor_parallel_size out."
        )
    if config.cluster.enable and replay is RouterReplay.TRAINER and ds.sequence_parallel_size > 1:
        yield (
            f"actor.router_replay is trainer with ds.sequence_parallel_size {ds.sequence_parallel_size}, but a process "
            "sees the experts of its own tokens alone: leave one of --actor.router_replay and "
            "--ds.sequence_parallel_size out."
        )


def shaping_problems(config: RLConfig, *, has_environment: bool) -> Iterator[str]:
    """Yields the problems of reward shaping."""
    reward = config.reward
    yield from _normalise_problems(reward)
    yield from _length_problems(config, plays=has_environment or config.agent.plays)
    if config.algo.mask_truncated and reward.stop_properly_penalty_coef is not None:
        yield (
            f"reward.stop_properly_penalty_coef is {reward.stop_properly_penalty_coef}, which says what a truncated "
            "reply is worth, but algo.mask_truncated learns nothing from one: leave "
            "--reward.stop_properly_penalty_coef or --algo.mask_truncated out."
        )
    yield from _vote_problems(config)
    window, longest = config.algo.mask_repetition, config.rollout.max_new_tokens
    if window is not None and window > longest:
        yield (
            f"algo.mask_repetition is {window}, but no reply has more than {longest} tokens (rollout.max_new_tokens): "
            "lower --algo.mask_repetition, or leave it out."
        )
    traits = traits_of(config.algo.advantage.estimator)
    yield from _unshaped_problems(config) if "reward_parts" in traits.needs else ()
    yield from _unrewarded_problems(config) if "teacher" in traits.needs else ()
    yield from _negative_problems(config) if "rewards_from_0" in traits.needs else ()
    by_length = _changed(reward, BY_LENGTH)
    if by_length and "greedy_baseline" in traits.needs:
        yield (
            f"reward.{by_length[0]} is set with algo.advantage.estimator {config.algo.advantage.estimator}, whose "
            f"greedy baseline is not shaped by length: leave --reward.{by_length[0]} out."
        )


def _normalise_problems(reward: RewardConfig) -> Iterator[str]:
    """Yields the problems of normalised rewards."""
    if (reward.normalize is Normalise.DATASET) != (reward.normalize_mean_std is not None):
        yield (
            f"reward.normalize is {reward.normalize} and reward.normalize_mean_std is {reward.normalize_mean_std}, but "
            "a dataset's moments are given and used together: set --reward.normalize dataset and "
            "--reward.normalize_mean_std MEAN STD."
        )
    if reward.normalize is Normalise.MODEL and reward.model_name_or_path is None:
        yield (
            "reward.normalize is model, which takes the mean and std that a reward model was saved with, but there is "
            "none: set --reward.model_name_or_path, or leave --reward.normalize out."
        )


def _length_problems(config: RLConfig, *, plays: bool) -> Iterator[str]:
    """Yields the problems of rewards that go by length; `plays`: whether episodes may have several turns."""
    reward = config.reward
    limit = longest_reply(config, plays=plays)
    if limit is not None and (reward.overlong_buffer_len or 0) > limit:
        one, key = ("an episode", "max_episode_tokens") if plays else ("a reply", "max_new_tokens")
        yield (
            f"reward.overlong_buffer_len is {reward.overlong_buffer_len}, but {one} has at most {limit} tokens "
            f"(rollout.{key}): lower --reward.overlong_buffer_len."
        )
    if reward.cosine_length and reward.overlong_buffer_len is not None:
        yield (
            "reward.cosine_length and reward.overlong_buffer_len both make the reward go by length: leave "
            "--reward.overlong_buffer_len or --reward.cosine_length out."
        )
    samples = config.rollout.n_samples_per_prompt
    if reward.group_length_coef and samples < 2:
        yield (
            f"reward.group_length_coef is {reward.group_length_coef}, which compares a prompt's samples by length, "
            f"but rollout.n_samples_per_prompt is {samples}: set --rollout.n_samples_per_prompt to 2 or more."
        )
    if reward.group_length_coef and reward.cosine_length:
        yield (
            "reward.cosine_length and reward.group_length_coef both make the reward go by length: leave "
            "--reward.group_length_coef or --reward.cosine_length out."
        )
    if limit is None and (reward.cosine_length or reward.overlong_buffer_len is not None):
        key = "cosine_length" if reward.cosine_length else "overlong_buffer_len"
        yield (
            f"reward.{key} is {getattr(reward, key)}, which measures the sampled tokens of an episode of several turns "
            "against rollout.max_episode_tokens, but that is not set: set --rollout.max_episode_tokens, or leave "
            f"--reward.{key} out."
        )


def _changed(reward: RewardConfig, keys: Iterable[str]) -> list[str]:
    """Returns those of the settings `keys` that are not at their defaults."""
    default = RewardConfig()
    return [key for key in keys if getattr(reward, key) != getattr(default, key)]


def _unshaped_problems(config: RLConfig) -> Iterator[str]:
    """Shaping of a sum of rewards with an estimator that reads the named ones."""
    for key in _changed(config.reward, SHAPING):
        yield (
            f"reward.{key} is {getattr(config.reward, key)} with algo.advantage.estimator "
            f"{config.algo.advantage.estimator}, which normalises each named reward apart and never sees their "
            f"sum, which is what would be changed: leave --reward.{key} out, and return what it is for as one more "
            "named reward of the reward function."
        )


def _unrewarded_problems(config: RLConfig) -> Iterator[str]:
    """Shaping of rewards with an estimator that reads none."""
    for key in _changed(config.reward, (*SHAPING, "weights")):
        yield (
            f"reward.{key} is {getattr(config.reward, key)} with algo.advantage.estimator "
            f"{config.algo.advantage.estimator}, which learns from the teacher and never sees a reward: leave "
            f"--reward.{key} out."
        )


def _negative_problems(config: RLConfig) -> Iterator[str]:
    """Shaping that makes rewards negative with an estimator that takes none below 0."""
    reward = config.reward
    if reward.clip_range is not None and reward.clip_range[0] >= 0:
        return  # clipping is the last step
    makes_negative = {
        "normalize": reward.normalize in (Normalise.RUNNING, Normalise.DATASET),
        "overlong_buffer_len": reward.overlong_buffer_len is not None,
        "group_length_coef": reward.group_length_coef > 0,
        "stop_properly_penalty_coef": (reward.stop_properly_penalty_coef or 0.0) < 0,
        "cosine_length": reward.cosine_length
        and min(*reward.cosine_passed, *reward.cosine_failed, reward.cosine_exceeded) < 0,
    }
    for key, negative in makes_negative.items():
        if negative:
            yield (
                f"reward.{key} is {getattr(reward, key)}, which makes rewards negative, but algo.advantage.estimator "
                f"{config.algo.advantage.estimator} takes none below 0: leave --reward.{key} out, or set "
                "--reward.clip_range with a lower bound of 0."
            )


def _vote_problems(config: RLConfig) -> Iterator[str]:
    """Yields the problems of rewards by a vote."""
    reward, samples = config.reward, config.rollout.n_samples_per_prompt
    if not reward.majority_vote:
        return
    out = "leave --reward.majority_vote out"
    if samples < 2:
        yield (
            f"reward.majority_vote is on, but rollout.n_samples_per_prompt is {samples}: set "
            f"--rollout.n_samples_per_prompt to 2 or more, or {out}."
        )
    mute = {
        "verifier": reward.verifier is Verifier.FORMAT,
        "model_name_or_path": reward.model_name_or_path is not None,
        "remote_url": reward.remote_url is not None,
        "judge_url": reward.judge_url is not None,
    }
    for key in (key for key, is_set in mute.items() if is_set):
        yield (
            f"reward.majority_vote is on, but reward.{key} {getattr(reward, key)} does not say what a reply answers: "
            f"set --reward.verifier to last_number, exact_match or math, or {out}."
        )
    if len(reward.sources) > 1:
        yield (
            "reward.majority_vote is on, which takes the place of every reward, but several are set "
            f"({', '.join(name for _, name in reward.sources)}): keep the one that says what a reply answers, or {out}."
        )
    if config.agent.attempts > 1:
        yield (
            f"reward.majority_vote is on, but agent.attempts is {config.agent.attempts}, which tells a wrong answer, "
            f"and until the last reply nobody knows which are: leave --agent.attempts out, or {out}."
        )
    if "greedy_baseline" in traits_of(config.algo.advantage.estimator).needs:
        yield (
            f"reward.majority_vote is on, but algo.advantage.estimator {config.algo.advantage.estimator} compares with "
            f"a greedy rollout, which has no part in the vote: set --algo.advantage.estimator to group_norm, or {out}."
        )


def rollout_problems(config: RLConfig) -> Iterator[str]:
    """Yields the problems of the size of optimizer steps."""
    rollout = config.rollout
    samples = samples_per_rollout(config)
    if (config.train.batch_size or 0) > samples:
        yield (
            f"train.batch_size is {config.train.batch_size}, but a rollout has {rollout.batch_size} prompts x "
            f"{rollout.n_samples_per_prompt} samples = {samples}: lower --train.batch_size or raise "
            "--rollout.batch_size."
        )


def turn_problems(config: RLConfig, *, has_environment: bool) -> Iterator[str]:
    """Yields the problems of episodes of several turns."""
    for key in ("max_turns", "max_episode_tokens", "max_episode_seconds"):
        value = getattr(config.rollout, key)
        if value != getattr(RolloutConfig(), key) and not (has_environment or config.agent.plays):
            yield (
                f"rollout.{key} is {value}, but episodes have one turn without an agent: set --agent.tools, "
                f"--agent.attempts, --agent.command or --train.agent_func_path (environment= in Python), or leave "
                f"--rollout.{key} out."
            )


def turn_estimator_problems(config: RLConfig, *, has_environment: bool) -> Iterator[str]:
    """Yields the problems of counting by turns where there is one."""
    advantage = config.algo.advantage
    compares = advantage.estimator in ESTIMATORS and "states" in ESTIMATORS[advantage.estimator].needs
    if compares and not (has_environment or config.agent.plays):
        yield (
            f"algo.advantage.estimator {advantage.estimator} compares turns that were played in the same state, but "
            "episodes have one turn without an agent: set --agent.tools, --agent.attempts, --agent.command or "
            "--train.agent_func_path (environment= in Python), or --algo.advantage.estimator to group_norm."
        )
    for key in ("gamma", "lambd", "critic_lambd"):
        value = getattr(advantage, key)
        by_turn = advantage.estimator.startswith("turn_") and value != getattr(AdvantageSettings(), key)
        if by_turn and not (has_environment or config.agent.plays):
            yield (
                f"algo.advantage.{key} is {value}, which the {advantage.estimator} estimator counts by turns, but "
                f"episodes have one turn without an agent: leave --algo.advantage.{key} out, or set "
                "--algo.advantage.estimator to gae."
            )
