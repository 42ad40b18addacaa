"""Makes the reward source from the settings of `reward`."""

from rollgrad.adapters.models.torch.loading import default_device, load_tokenizer, resolve_dtype
from rollgrad.adapters.models.torch.reward_model import RewardModel
from rollgrad.adapters.rewards.http import HttpReward
from rollgrad.adapters.rewards.judge import JudgePrompt, LLMJudge
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.algorithms.catalogue import estimator_traits
from rollgrad.domain.algorithms.settings import Normalise
from rollgrad.entrypoints.composition.data import dataset_kind


def reward_kind(config: RLConfig, spec: str) -> str:
    """Returns the kind of reward source; `none` if agents must give their own rewards."""
    if config.reward.function_path is not None:
        return "function"
    if config.reward.model_name_or_path is not None:
        return "model"
    if config.reward.remote_url is not None:
        return "remote"
    if config.reward.judge_url is not None:
        return "judge"
    if config.reward.verifier is not None:
        return "verifier"
    if dataset_kind(spec) == "reasoning_gym":
        return "reasoning_gym"
    return "teacher" if "teacher" in estimator_traits(config.algo.advantage.estimator).needs else "none"


def make_remote_reward(config: RLConfig) -> HttpReward:
    """Returns the client of the reward servers."""
    reward = config.reward
    return HttpReward(
        _addresses(reward.remote_url),
        timeout=reward.timeout,
        batch_size=reward.remote_batch_size,
        weights=reward.weights,
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
        prompt=JudgePrompt.read(reward.judge_prompt),
        timeout=reward.timeout,
        bounds=reward.judge_range,
    )


def _addresses(setting: str | None) -> list[str]:
    return [url.strip() for url in (setting or "").split(",") if url.strip()]


def make_reward_model(config: RLConfig) -> RewardModel:
    """Returns the model that scores replies, in the actor's format."""
    assert config.reward.model_name_or_path is not None
    device = default_device()
    return RewardModel.load(
        config.reward.model_name_or_path,
        dtype=resolve_dtype(config.actor.dtype, device),
        device=device,
        flag="--reward.model_name_or_path",
        policy_tokenizer=load_tokenizer(config.actor.model_name_or_path, flag="--actor.model_name_or_path"),
        normalize=config.reward.normalize is Normalise.MODEL,
    )
