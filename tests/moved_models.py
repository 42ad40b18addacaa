"""Copies of models with other weights, to be references and teachers."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def moved_copy(model: Path, path: Path, seed: int = 0) -> Path:
    """Writes a copy of a model whose weights have normal noise of 0.1 on them; returns its directory, `path`."""
    shutil.copytree(model, path)
    generator = torch.Generator().manual_seed(seed)
    moved = {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    save_file(moved, path / "model.safetensors", metadata={"format": "pt"})
    return path
