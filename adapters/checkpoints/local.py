"""Checkpoints in a directory of the local disk.

Invariant: a name either stands for a whole checkpoint or for nothing: everything is written beside its place and
renamed into it. Whenever this process is killed, the older checkpoint of a name is there for the next one.
Does not own: what a model or a state consists of.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from rollgrad.domain.errors import CheckpointError
from rollgrad.domain.ports.checkpoint_store import CheckpointStore
from rollgrad.domain.ports.models import PolicyModel

TRAINING_STATE = "training_state.pt"


class LocalCheckpointStore(CheckpointStore):
    """Models as `output_dir/name/`, run state as `output_dir/name.state.json`, training state as
    `output_dir/training_state.pt`. Makes the directory, and puts models back that a killed process was replacing.

    Raises:
        CheckpointError: the directory cannot be made or written.
    """

    def __init__(self, output_dir: Path) -> None:
        self._root = output_dir
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=output_dir):
                pass
            for old in output_dir.glob(".*.old"):  # its process was killed between the two renames of `save_model`
                target = output_dir / old.name.removeprefix(".").removesuffix(".old")
                if not target.exists():
                    old.rename(target)
        except OSError as error:
            raise CheckpointError(
                f"--ckpt.output-dir is {str(output_dir)!r}, where nothing can be written ({error.strerror}): "
                "choose a directory you may write."
            ) from error

    def save_model(self, policy: PolicyModel, name: str) -> Path:
        """Writes a Hugging Face model to `output_dir/name`, in place of an older one; returns that directory.

        Raises:
            CheckpointError: it cannot be written; an older one is then still there.
        """
        target = self._root / name
        fresh, old = self._root / f".{name}.new", self._root / f".{name}.old"
        try:
            for leftover in (fresh, old):
                shutil.rmtree(leftover, ignore_errors=True)
            policy.save(fresh)
            if target.exists():
                target.rename(old)
            fresh.rename(target)
        except CheckpointError:
            raise
        except OSError as error:
            if old.exists() and not target.exists():
                old.rename(target)
            raise CheckpointError(
                f"The model {name!r} cannot be written to {self._root} ({error.strerror or error}): "
                "make room there, or choose another --ckpt.output-dir."
            ) from error
        shutil.rmtree(old, ignore_errors=True)
        return target

    def save_state(self, state: Mapping[str, Any], name: str) -> Path:
        """Writes `state` to `output_dir/name.state.json`, in place of an older one; returns that file.

        Raises:
            CheckpointError: it cannot be written, or is not JSON-serialisable; an older one is then still there.
        """
        target = self._root / f"{name}.state.json"
        fresh = self._root / f".{name}.state.json.new"
        try:
            fresh.write_text(json.dumps(dict(state), indent=2), encoding="utf-8")
            os.replace(fresh, target)
        except (OSError, TypeError, ValueError) as error:
            raise CheckpointError(f"The run state {name!r} cannot be written to {self._root}: {error}.") from error
        return target

    def save_training(self, state: Mapping[str, Any]) -> Path:
        """Writes `state` to `output_dir/training_state.pt`, in place of an older one; returns that file.

        Raises:
            CheckpointError: it cannot be written; an older one is then still there.
        """
        import torch

        target, fresh = self._root / TRAINING_STATE, self._root / f".{TRAINING_STATE}.new"
        try:
            torch.save(dict(state), fresh)
            os.replace(fresh, target)
        except (OSError, RuntimeError) as error:
            fresh.unlink(missing_ok=True)
            raise CheckpointError(
                f"The training state cannot be written to {self._root} ({error}): make room there, or choose another "
                "--ckpt.output-dir."
            ) from error
        return target

    def load_training(self) -> Mapping[str, Any] | None:
        """What `output_dir/training_state.pt` holds, None if there is no such file; nothing but data is unpickled.

        Raises:
            CheckpointError: it cannot be read.
        """
        import pickle

        import torch

        path = self._root / TRAINING_STATE
        if not path.exists():
            return None
        try:
            state: Mapping[str, Any] = torch.load(path, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            first_line = str(error).strip().split("\n")[0]
            raise CheckpointError(f"The training state {path} cannot be read: {first_line}") from error
        return state
