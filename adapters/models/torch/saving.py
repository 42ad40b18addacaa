"""Writes models in Hugging Face format."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from rollgrad.domain.errors import CheckpointError


def save_pretrained(model: Any, tokenizer: Any, path: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Writes model and tokenizer to the directory `path`; `weights` replace the model's own where those are not whole.

    Raises:
        CheckpointError: `path` cannot be written.
    """
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        with _without_unwrapping():
            model.save_pretrained(path, state_dict=weights)
        tokenizer.save_pretrained(path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what fails inside, because `path` cannot be written, into an error of one sentence.

    Raises:
        CheckpointError: it cannot.
    """
    from safetensors import SafetensorError

    try:
        yield
    except CheckpointError:
        raise
    except (OSError, SafetensorError) as error:  # of safetensors, a full disk is no OSError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"The model cannot be written to {path} ({reason}): make room there, or choose another --ckpt.output_dir."
        ) from error


@contextmanager
def _without_unwrapping() -> Iterator[None]:
    """Lets transformers save a model as it is.

    It would look for wrappers around the model by accelerate, which imports DeepSpeed for that wherever it is
    installed: seconds, and a warning about accelerators, in runs that have nothing to do with it. Models are not
    wrapped here.
    """
    from transformers import modeling_utils

    unwrap_model = modeling_utils.unwrap_model
    modeling_utils.unwrap_model = lambda model, recursive=False: model
    try:
        yield
    finally:
        modeling_utils.unwrap_model = unwrap_model
