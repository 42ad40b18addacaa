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

from rollgrad.adapters.checkpoints.names import TRAINING_STATE
from rollgrad.domain.errors import CheckpointError
from rollgrad.domain.ports.checkpoint_store import CRITIC_DIRECTORY, CheckpointStore
from rollgrad.domain.ports.models import PolicyModel, ValueModel


class LocalCheckpointStore(CheckpointStore):
    """Models as `output_dir/name/`, run state as `output_dir/name.state.json`, training state as
    `state_dir/training_state.pt` (`state_dir` is `output_dir` unless it is given). Makes the directories, and puts
    models back that a killed process was replacing.

    Raises:
        CheckpointError: a directory cannot be made or written.
    """

    def __init__(self, output_dir: Path, state_dir: Path | None = None) -> None:
        self._root = output_dir
        self._states = state_dir or output_dir
        _make_writable(self._states, "--ckpt.state_dir" if state_dir else "--ckpt.output_dir")
        _make_writable(output_dir, "--ckpt.output_dir")
        try:
            for old in output_dir.glob(".*.old"):  # its process was killed between the two renames of `save_model`
                target = output_dir / old.name.removeprefix(".").removesuffix(".old")
                if not target.exists():
                    old.rename(target)
        except OSError as error:
            raise CheckpointError(
                f"--ckpt.output_dir is {str(output_dir)!r}, where a model cannot be put back that a killed run was "
                f"replacing ({error.strerror}): rename {old.name} there by hand."
            ) from error

    def save_model(self, policy: PolicyModel, name: str, critic: ValueModel | None = None) -> Path:
        """Writes a Hugging Face model to `output_dir/name`, with the critic in `critic` below, in place of an older
        one; returns that directory.

        Raises:
            CheckpointError: it cannot be written; an older one is then still there.
        """
        target = self._root / name
        fresh, old = self._root / f".{name}.new", self._root / f".{name}.old"
        try:
            for leftover in (fresh, old):
                shutil.rmtree(leftover, ignore_errors=True)
            policy.save(fresh)
            if critic is not None:
                critic.save(fresh / CRITIC_DIRECTORY)
            if target.exists():
                target.rename(old)
            fresh.rename(target)
        except (CheckpointError, OSError) as error:
            if old.exists() and not target.exists():
                old.rename(target)
            shutil.rmtree(fresh, ignore_errors=True)  # on a full disk half a model takes the room of the next attempt
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"The model {name!r} cannot be written to {self._root} ({error.strerror or error}): "
                "make room there, or choose another --ckpt.output_dir."
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
        """Writes `state` to `state_dir/training_state.pt`, in place of an older one; returns that file.

        Raises:
            CheckpointError: it cannot be written; an older one is then still there.
        """
        import torch

        target, fresh = self._states / TRAINING_STATE, self._states / f".{TRAINING_STATE}.new"
        try:
            torch.save(dict(state), fresh)
            os.replace(fresh, target)
        except (OSError, RuntimeError) as error:
            fresh.unlink(missing_ok=True)
            raise CheckpointError(
                f"The training state cannot be written to {self._states} ({error}): make room there, choose another "
                "--ckpt.state_dir, or save none (--ckpt.state_minutes None)."
            ) from error
        return target

    def load_training(self) -> Mapping[str, Any] | None:
        """What `state_dir/training_state.pt` holds, None if there is no such file; nothing but data is unpickled.

        Raises:
            CheckpointError: it cannot be read.
        """
        import pickle

        import torch

        path = self._states / TRAINING_STATE
        if not path.exists():
            return None
        try:
            state: Mapping[str, Any] = torch.load(path, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            first_line = str(error).strip().split("\n")[0]
            raise CheckpointError(f"The training state {path} cannot be read: {first_line}") from error
        return state


def _make_writable(directory: Path, flag: str) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise CheckpointError(
            f"{flag} is {str(directory)!r}, where nothing can be written ({error.strerror}): choose a directory you "
            "may write."
        ) from error
