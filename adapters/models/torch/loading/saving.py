"""Writes models in Hugging Face format."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from rollgrad.adapters.system.permissions import share_weights
from rollgrad.adapters.system.unwritable import remedy
from rollgrad.application.foreign import first_line
from rollgrad.domain.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
"""File of a model's weights, if there is one."""

PROCESSOR_FILES = "processor_files"
"""Attribute of a model that sees images: the files of its processor beside the tokenizer, by name."""


def save_pretrained(
    model: Any,
    tokenizer: Any,
    path: Path,
    weights: Mapping[str, Tensor] | None = None,
    *,
    flag: str = "--ckpt.output_dir",
) -> None:
    """Writes model, tokenizer and the files of its processor of images to the directory `path`, which `flag` sets;
    `weights` replace the model's own, which may be divided.

    Raises:
        CheckpointError: `path` cannot be written.
    """
    with writing(path, flag=flag):
        path.mkdir(parents=True, exist_ok=True)
        with _without_unwrapping():
            model.save_pretrained(path, state_dict=weights)
        if weights:  # divided parameters may have another number format than they are saved in
            model.config.dtype = next(iter(weights.values())).dtype
            model.config.save_pretrained(path)
        tokenizer.save_pretrained(path)
        for name, content in getattr(model, PROCESSOR_FILES, {}).items():
            (path / name).write_bytes(content)


def save_in_files(
    model: Any, tokenizer: Any, path: Path, parts: Iterable[Mapping[str, Tensor]], *, writes: bool
) -> None:
    """Writes model and tokenizer as `save_pretrained` does, the weights in a file for each of `parts`, of which one at
    a time is in memory. All processes of a group go through the parts; the one that `writes` has the weights.

    Raises:
        CheckpointError: `path` cannot be written; all parts have been gone through.
    """
    files: list[Path] = []
    failure: CheckpointError | None = None
    for weights in parts:
        if writes and failure is None:
            files.append(path / f"part-{len(files) + 1}.safetensors")
            try:
                save_pretrained(model, tokenizer, path, weights)
                with writing(path):
                    (path / SINGLE_FILE).rename(files[-1])
            except CheckpointError as error:
                failure = error
    if failure is not None:
        raise failure
    if writes:
        with writing(path):
            _name_parts(files)


def _name_parts(files: list[Path]) -> None:
    """Gives the files of a model's weights the names that transformers looks for."""
    from safetensors import safe_open

    if len(files) == 1:
        files[0].rename(files[0].with_name(SINGLE_FILE))
        return
    index: dict[str, str] = {}
    size = 0
    for number, file in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with safe_open(file, framework="pt") as tensors:
            index |= dict.fromkeys(tensors.keys(), name)
        size += file.stat().st_size
        file.rename(file.with_name(name))
    described = {"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))}
    (files[0].parent / f"{SINGLE_FILE}.index.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


@contextmanager
def writing(path: Path, *, flag: str = "--ckpt.output_dir") -> Iterator[None]:
    """Turns errors of writing the directory `path`, which `flag` sets, inside the block into one sentence, and shares
    the weights that are then in it.

    Raises:
        CheckpointError: it cannot.
    """
    from safetensors import SafetensorError

    try:
        yield
        share_weights(path)
    except CheckpointError:
        raise
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk by an error of its own
        raise CheckpointError(
            f"The model cannot be written to {path} ({first_line(error)}): {remedy(error)}, or choose another {flag}."
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
