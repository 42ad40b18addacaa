"""`rollgrad serve reward`: a reward model behind HTTP, for `--reward.remote_url` and OpenRLHF's `remote_rm_url`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define

from rollgrad.application.settings.sections.actor import DType
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.settings import own_first
from rollgrad.entrypoints.cli.listening import ListeningArguments, serve

if TYPE_CHECKING:
    from rollgrad.adapters.servers.server import App


@define(kw_only=True, field_transformer=own_first)
class ServeRewardArguments(ListeningArguments):
    """Serves a reward model: POST /get_reward {query, prompts, labels} answers {rewards, scores, extra_logs}.

    The server's address is the one line on stdout. Clients send the token as a bearer token; a training run takes
    it from ROLLGRAD_REWARD_TOKEN.
    """

    model: str = ""
    """Directory or hub name of a sequence classifier with one label; required."""
    port: int = 5000
    """Port to listen on; 0 picks a free one."""
    max_length: int | None = None
    """Tokens of a text at most; longer ones lose their beginning (default: as many as the model has positions)."""
    batch_tokens: int = 16384
    """Tokens of a forward pass, padding included."""
    normalize_reward: bool = False
    """Centre and scale scores by the mean and std in the model's config.json, as OpenRLHF saves them."""
    dtype: DType = DType.AUTO
    """Format of the weights; auto is bfloat16 where the hardware multiplies it natively."""


def serve_reward_model(arguments: ServeRewardArguments) -> None:
    """Serves until SIGTERM.

    Raises:
        KeyboardInterrupt: SIGINT.
        ConfigurationError, CheckpointError: a setting, or the model, cannot be served.
    """
    if not arguments.model:
        raise ConfigurationError("--model is not set: name the directory or hub name of a reward model.")
    serve(lambda: _loaded_app(arguments), arguments, "reward server")


@contextlib.contextmanager
def _loaded_app(arguments: ServeRewardArguments) -> "Iterator[tuple[App, int]]":
    from rollgrad.adapters.models.torch.loading.loading import default_device, resolve_dtype
    from rollgrad.adapters.models.torch.rewards.reward_model import RewardModel
    from rollgrad.adapters.servers.guard import MAX_BODY_BYTES
    from rollgrad.adapters.servers.reward_server import ScoreQueue, create_reward_app

    device = default_device()
    model = RewardModel.load(
        arguments.model,
        dtype=resolve_dtype(arguments.dtype, device),
        device=device,
        flag="--model",
        max_length=arguments.max_length,
        batch_tokens=arguments.batch_tokens,
        normalize=arguments.normalize_reward,
        normalize_flag="--normalize_reward",
    )
    queue = ScoreQueue(model)
    try:
        yield create_reward_app(queue, model=Path(arguments.model).resolve().name), MAX_BODY_BYTES
    finally:
        queue.close()
