"""From the settings of `reward` to what judges replies."""

from rollgrad.adapters.http.reward import HttpReward
from rollgrad.adapters.rewards.model import ModelReward
from rollgrad.adapters.torch.loading import default_device, resolve_dtype
from rollgrad.adapters.torch.reward_model import RewardModel
from rollgrad.application.choices import Normalise
from rollgrad.application.config import RLConfig
from rollgrad.entrypoints.factories import dataset_kind


def reward_kind(config: RLConfig, spec: str) -> str:
    """Where rewards come from."""
    if config.reward.function_path is not None:
        return "function"
    if config.reward.model_name_or_path is not None:
        return "model"
    if config.reward.remote_url is not None:
        return "remote"
    if config.reward.verifier is not None:
        return "verifier"
    kind = dataset_kind(spec)
    return kind if kind == "reasoning_gym" else "none"


def make_remote_reward(config: RLConfig) -> HttpReward:
    """The client of the reward servers."""
    reward = config.reward
    return HttpReward(
        [url.strip() for url in (reward.remote_url or "").split(",") if url.strip()],
        timeout=reward.timeout,
        batch_size=reward.remote_batch_size,
        weights=reward.weights,
        failure_value=reward.failure_value,
    )


def make_reward_model(config: RLConfig) -> RewardModel:
    """The model that scores replies, in the actor's format."""
    assert config.reward.model_name_or_path is not None
    device = default_device()
    return RewardModel.load(
        config.reward.model_name_or_path,
        dtype=resolve_dtype(config.actor.dtype, device),
        device=device,
        flag="--reward.model_name_or_path",
        normalize=config.reward.normalize is Normalise.MODEL,
    )


def make_model_reward(config: RLConfig) -> ModelReward:
    """A reward model in this process."""
    return ModelReward([make_reward_model(config).judge], timeout=config.reward.timeout)
