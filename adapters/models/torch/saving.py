"""Writes models in Hugging Face format."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from rollgrad.domain.errors import CheckpointError


def save_pretrained(
    model: Any,
    tokenizer: Any,
    path: Path,
    weights: Mapping[str, Tensor] | None = None,
    *,
    flag: str = "--ckpt.output_dir",
) -> None:
    """Writes model and tokenizer to the directory `path`, which `flag` sets; `weights` replace the model's own, which
    may be divided.

    Raises:
        CheckpointError: `path` cannot be written.
    """
    with writing(path, flag=flag):
        path.mkdir(parents=True, exist_ok=True)
        with _without_unwrapping():
            model.save_pretrained(path, state_dict=weights)
        tokenizer.save_pretrained(path)


@contextmanager
def writing(path: Path, *, flag: str = "--ckpt.output_dir") -> Iterator[None]:
    """Turns errors of writing `path`, which `flag` sets, inside the block into one sentence.

    Raises:
        CheckpointError: it cannot.
    """
    from safetensors import SafetensorError

    try:
        yield
    except CheckpointError:
        raise
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk by an error of its own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"The model cannot be written to {path} ({reason}): make room there, or choose another {flag}."
        ) from error


@contextmanager
def _without_unwrapping() -> Iterator[None]:
    """Lets transformers save a model as it is.

    transformers lets accelerate look for wrappers around the model, which imports DeepSpeed if it is installed: that
    takes seconds, and logs a warning about accelerators, in runs that do not use it. Models are not wrapped here.
    """
    from transformers import modeling_utils

    unwrap_model = modeling_utils.unwrap_model
    modeling_utils.unwrap_model = lambda model, recursive=False: model
    try:
        yield
    finally:
        modeling_utils.unwrap_model = unwrap_model
