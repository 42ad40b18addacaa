"""Makes the reward source from the settings of `reward`."""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from rollgrad.adapters.chat.pictures import ImageRenderer, load_processor, sees_images
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.models.torch.loading.loading import (
    load_causal_lm,
    load_reward_tokens,
    load_tokenizer,
    resolve_dtype,
)
from rollgrad.adapters.models.torch.loading.weight_shards import Shard
from rollgrad.adapters.models.torch.rewards.reward_model import RewardModel, check_head
from rollgrad.adapters.models.torch.rewards.reward_text import same_vocabulary
from rollgrad.adapters.models.torch.rewards.step_reward import StepRewardModel
from rollgrad.adapters.models.torch.rewards.together import Divide
from rollgrad.adapters.rewards.function import FunctionReward
from rollgrad.adapters.rewards.http import HttpReward
from rollgrad.adapters.rewards.judge import JudgePrompt, LLMJudge
from rollgrad.adapters.rewards.weighted import WeightedRewards
from rollgrad.application.settings.function_path import several
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.reward import StepReward
from rollgrad.domain.algorithms.catalogue import estimator_traits
from rollgrad.domain.algorithms.shaping_settings import Normalise
from rollgrad.domain.errors import ConfigurationError, raise_together
from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.entrypoints.composition.models import ACTOR_FLAG, compute_device
from rollgrad.entrypoints.composition.rl.data import dataset_kind
from rollgrad.entrypoints.composition.vocabulary import reward_token_ids

FLAG = "--reward.model_name_or_path"
Brought = RewardSource | Callable[..., Any]
"""A reward that a caller brings."""


KINDS = {"function_path": "function", "model_name_or_path": "model", "remote_url": "remote", "judge_url": "judge"}
"""Kinds of reward sources by the setting that sets them, where they differ."""


def reward_kinds(config: RLConfig, spec: str) -> list[str]:
    """Returns the kinds of reward sources, at least one; `none` if agents must give their own rewards."""
    given = list(dict.fromkeys(KINDS.get(key, key) for key, _ in config.reward.sources))
    if given:
        return given
    if dataset_kind(spec) == "reasoning_gym":
        return ["reasoning_gym"]
    return ["teacher" if "teacher" in estimator_traits(config.algo.advantage.estimator).needs else "none"]


def make_functions(config: RLConfig) -> dict[str, FunctionReward]:
    """Returns the rewards of the functions that are named, by the names of their parts."""
    reward, paths = config.reward, several(config.reward.function_path)
    if len(reward.sources) == 1:
        return {path: FunctionReward.load(path, timeout=reward.timeout, weights=reward.weights) for path in paths}
    names = [name for key, name in reward.sources if key == "function_path"]
    return {
        name: FunctionReward.load(path, timeout=reward.timeout, name=name)
        for name, path in zip(names, paths, strict=True)
    }


def named_rewards(
    config: RLConfig, spec: str, sources: Mapping[str, Callable[[], Any]], without: Container[str] = ()
) -> dict[str, Any]:
    """Returns the reward sources of a run by name, except those of the kinds `without`; `sources` makes them, by
    kind."""
    names = {KINDS.get(key, key): name for key, name in config.reward.sources}
    found: dict[str, Any] = {}
    for kind in reward_kinds(config, spec):
        if kind not in without:
            made = sources[kind]()
            found |= made if kind == "function" else {names.get(kind, kind): made}
    return found


def make_reward(config: RLConfig, spec: str, sources: Mapping[str, Callable[[], Any]]) -> RewardSource | None:
    """Returns the reward of a run, of which `sources` makes what it consists of, by kind; None if there is none."""
    named = named_rewards(config, spec, sources)
    if len(named) > 1:
        return WeightedRewards(named, config.reward.weights)
    (only,) = named.values()
    source: RewardSource | None = only
    return source


def brought_reward(reward: Brought | Sequence[Brought], config: RLConfig) -> RewardSource:
    """Returns the reward that a caller brings: a source, a function, or several of them, which are summed.

    Raises:
        ConfigurationError: one of them can judge nothing, or two have the same name; all problems together.
    """
    several_rewards = isinstance(reward, list | tuple)
    given: Sequence[Any] = reward if several_rewards else [reward]  # type: ignore[assignment]
    useless = [each for each in given if not (isinstance(each, RewardSource) or callable(each))]
    raise_together(
        [
            ConfigurationError(
                f"reward {'has' if several_rewards else 'is'} a {type(each).__name__}, which cannot be called: give a "
                "function of replies, or several in a list."
            )
            for each in useless
        ]
    )
    weights, timeout = config.reward.weights, config.reward.timeout
    names = [str(getattr(each, "__name__", type(each).__name__)) for each in given]
    if len(given) == 1:
        (one,), (name,) = given, names
        return (
            one if isinstance(one, RewardSource) else FunctionReward(one, timeout=timeout, name=name, weights=weights)
        )
    if not given:
        raise ConfigurationError("reward is an empty list: give a function of replies, or leave it out.")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigurationError(
            f"Two of the rewards {', '.join(names)} are called {', '.join(twice)}: give functions of other names."
        )
    return WeightedRewards(
        {
            name: each if isinstance(each, RewardSource) else FunctionReward(each, timeout=timeout, name=name)
            for name, each in zip(names, given, strict=True)
        },
        weights,
    )


def make_remote_reward(config: RLConfig) -> HttpReward:
    """Returns the client of the reward servers."""
    reward = config.reward
    return HttpReward(
        _addresses(reward.remote_url),
        timeout=reward.timeout,
        batch_size=reward.remote_batch_size,
        weights=reward.weights if len(reward.sources) == 1 else None,
        failure_value=reward.failure_value,
    )


def make_judge(config: RLConfig) -> LLMJudge:
    """Returns the client of the judging language model."""
    reward = config.reward
    assert reward.judge_model is not None
    assert reward.judge_prompt is not None
    return LLMJudge(
        _addresses(reward.judge_url),
        model=reward.judge_model,
        prompt=JudgePrompt.read(reward.judge_prompt, rubric=reward.judge_rubric_key is not None),
        timeout=reward.timeout,
        bounds=reward.judge_range,
        rubric_key=reward.judge_rubric_key,
    )


def _addresses(setting: str | None) -> list[str]:
    return [url.strip() for url in (setting or "").split(",") if url.strip()]


def make_reward_model(
    config: RLConfig, shard: Shard | None = None, divide: Divide | None = None
) -> RewardModel | StepRewardModel:
    """Returns the model that scores replies, in the actor's format: a process reward model where its config.json names
    reward tokens. `shard` divides it over processes while it loads, `divide` afterwards.

    Raises:
        CheckpointError: there is no such model.
        ConfigurationError: a setting is one for the other kind of models.
    """
    tokens, name = check_reward_model(config), str(config.reward.model_name_or_path)
    if tokens is not None:
        return _step_model(config, name, tokens, shard, divide)
    device = compute_device(config.actor)
    policy_tokenizer = load_tokenizer(config.actor.model_name_or_path, flag=ACTOR_FLAG)
    images, codec = (None, None) if config.data.image_key is None else _sight(config, name, policy_tokenizer)
    return RewardModel.load(
        name,
        dtype=resolve_dtype(config.actor.dtype, device),
        device=device,
        flag=FLAG,
        policy_tokenizer=policy_tokenizer,
        normalize=config.reward.normalize is Normalise.MODEL,
        shard=shard,
        divide=divide,
        images=images,
        codec=codec,
    )


def check_reward_model(config: RLConfig) -> tuple[str, str] | None:
    """Checks that the settings are for the kind of reward model that is named, by its config.json and the shapes of its
    weights; returns the tokens for right and wrong of a process reward model, None of another.

    Raises:
        CheckpointError: there is no such model, or it judges nothing.
        ConfigurationError: a setting is one for the other kind of models.
    """
    reward, name = config.reward, str(config.reward.model_name_or_path)
    tokens = load_reward_tokens(name, flag=FLAG)
    if tokens is not None:
        if config.data.image_key is not None:
            raise ConfigurationError(
                f"data.image_key is {config.data.image_key!r}, but {name!r} is a process reward model, which is given "
                f"no images: set {FLAG} to one of `rollgrad train rm` with --data.image_key."
            )
        if reward.normalize is Normalise.MODEL:
            raise ConfigurationError(
                f"reward.normalize is model, but the process reward model {name!r} has no mean and std: leave "
                "--reward.normalize out."
            )
        return tokens
    for setting, default in (("step_reward", StepReward.MIN), ("step_separator", "\n")):
        if getattr(reward, setting) != default:
            raise ConfigurationError(
                f"reward.{setting} is {getattr(reward, setting)!r}, but {name!r} is no process reward model: leave "
                f"--reward.{setting} out, or set {FLAG} to one of `rollgrad train prm`."
            )
    check_head(name, flag=FLAG)
    return None


def _sight(config: RLConfig, name: str, policy_tokenizer: Any) -> tuple[ImageRenderer, TemplateCodec]:
    """Returns what renders images, and texts with images, for the reward model as for the actor.

    Raises:
        CheckpointError: the reward model has no processor.
        ConfigurationError: it sees no images, or other tokens or tensors of them than the actor.
    """
    if not sees_images(name):
        raise ConfigurationError(
            f"data.image_key is {config.data.image_key!r}, but the reward model {name!r} sees no images: set {FLAG} to "
            "one of `rollgrad train rm` with --data.image_key, or judge by --reward.function_path or --reward.verifier."
        )
    tokenizer = load_tokenizer(name, flag=FLAG)
    own = ImageRenderer(load_processor(name, tokenizer, flag=FLAG))
    actor = ImageRenderer(load_processor(config.actor.model_name_or_path, policy_tokenizer, flag=ACTOR_FLAG))
    if not same_vocabulary(policy_tokenizer, tokenizer) or own.settings != actor.settings:
        raise ConfigurationError(
            f"{FLAG} is {name!r}, which is to judge images as the actor {config.actor.model_name_or_path!r} sees them, "
            "but has another vocabulary or another processor: set it to a reward model that was trained from a model "
            "of the actor's family."
        )
    return own, TemplateCodec(tokenizer, images=own)


def _step_model(
    config: RLConfig, name: str, reward_tokens: tuple[str, str], shard: Shard | None, divide: Divide | None
) -> StepRewardModel:
    device = compute_device(config.actor)
    tokenizer = load_tokenizer(name, flag=FLAG)
    return StepRewardModel(
        load_causal_lm(name, dtype=resolve_dtype(config.actor.dtype, device), device=device, flag=FLAG, shard=shard),
        tokenizer,
        reward_token_ids(reward_tokens, tokenizer, setting=f"reward_tokens of {name}'s config.json"),
        separator=config.reward.step_separator,
        reward=config.reward.step_reward,
        divide=divide,
    )
