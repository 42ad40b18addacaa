"""Checkpoints in a directory of the local disk.

Invariant: a name either stands for a whole checkpoint or for nothing: everything is written beside its place and
renamed into it. Does not own: what a model or a state consists of.
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


class LocalCheckpointStore(CheckpointStore):
    """Models as `output_dir/name/`, run state as `output_dir/name.state.json`. Makes the directory.

    Raises:
        CheckpointError: the directory cannot be made or written.
    """

    def __init__(self, output_dir: Path) -> None:
        self._root = output_dir
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=output_dir):
                pass
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
