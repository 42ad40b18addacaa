"""`rollgrad serve tinker`: the Tinker API, so that programs written for it train and sample on this machine."""

import contextlib
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define

from rollgrad.application.settings.sections.actor import DType
from rollgrad.domain.errors import ConfigurationError, MissingExtraError
from rollgrad.domain.settings import own_first
from rollgrad.entrypoints.cli.listening import ListeningArguments, serve

if TYPE_CHECKING:
    from rollgrad.adapters.servers.server import App

MAX_BODY_BYTES = 64 * 2**20
"""Largest request: clients divide their data into requests of 5 MB, but a single sequence may be longer."""


@define(kw_only=True, field_transformer=own_first)
class ServeTinkerArguments(ListeningArguments):
    """Serves the Tinker API on one base model: LoRA training by forward_backward and optim_step, sampling, checkpoints.

    The server's address is the one line on stdout. Programs find it by TINKER_BASE_URL, and send TINKER_API_KEY, which
    begins with tml-, as their token.
    """

    model: str = ""
    """Directory or hub name of the base model, by which programs ask for it; required."""
    output_dir: Path = Path("runs/tinker")
    """Directory of the checkpoints that programs save."""
    batch_tokens: int = 16384
    """Tokens of a forward pass in training."""
    dtype: DType = DType.AUTO
    """Format of the weights; auto is bfloat16 where the hardware multiplies it natively."""


def serve_tinker(arguments: ServeTinkerArguments) -> None:
    """Serves until SIGTERM.

    Raises:
        KeyboardInterrupt: SIGINT.
        ConfigurationError, CheckpointError: a setting, or the model, cannot be served.
        MissingExtraError: the package `tinker`, which has the API's messages, is not installed.
    """
    if not arguments.model:
        raise ConfigurationError("--model is not set: name the directory or hub name of a model.")
    if arguments.batch_tokens < 1:
        raise ConfigurationError(f"--batch_tokens is {arguments.batch_tokens}, but it must be 1 or more.")
    if importlib.util.find_spec("tinker") is None:
        raise MissingExtraError("rollgrad serve tinker needs the package tinker: pip install rollgrad[tinker].")
    from rollgrad.entrypoints.named_paths import check_model

    check_model("model", arguments.model)
    serve(lambda: _loaded_app(arguments), arguments, "Tinker server")


@contextlib.contextmanager
def _loaded_app(arguments: ServeTinkerArguments) -> "Iterator[tuple[App, int]]":
    from rollgrad.adapters.servers.tinker.server import create_tinker_app
    from rollgrad.adapters.servers.tinker.service import TinkerService
    from rollgrad.adapters.servers.tinker.shelf import Shelf
    from rollgrad.entrypoints.composition.serving.tinker import TinkerModels

    models = TinkerModels(arguments.model, arguments.dtype, arguments.batch_tokens)
    with tempfile.TemporaryDirectory(prefix="rollgrad-tinker-") as snapshots:
        service = TinkerService(models, Shelf(arguments.output_dir, Path(snapshots)))
        try:
            yield create_tinker_app(service), MAX_BODY_BYTES
        finally:
            service.close()
