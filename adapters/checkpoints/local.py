"""Checkpoints in a directory of the local disk.

Invariant: a name either stands for a whole checkpoint or for nothing: everything is written beside its place, waited
for until it is on the disk, and renamed into it. Whenever this process or this machine stops, the older checkpoint of a
name is there for the next one.
Does not own: what a model or a state consists of, nor that no other run writes there (`lock`).
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, TypeVar

from rollgrad.adapters.checkpoints.files import (
    PROBE,
    check_renaming,
    is_full,
    lack_of,
    make_writable,
    remove_directory,
    replace_directory,
    replace_file,
    size_of,
    tidy,
)
from rollgrad.adapters.checkpoints.lock import keep_locked
from rollgrad.adapters.checkpoints.names import (
    CONFIG_FILE,
    METRICS_FILE,
    MODEL_OF_STEP,
    OLD_TRAINING_STATE,
    RUN_FILE,
    SAMPLES_FILE,
    TRAINING_STATE,
    numbered,
)
from rollgrad.adapters.checkpoints.states import load_state, save_state, state_bytes
from rollgrad.adapters.system.unwritable import remedy
from rollgrad.adapters.system.waiting import waiting_for
from rollgrad.application.pipelines.run import BEST_MODEL, FINAL_MODEL
from rollgrad.domain.errors import CheckpointError, RollgradError
from rollgrad.domain.ports.checkpoint_store import CRITIC_DIRECTORY, CheckpointStore, TrainingState
from rollgrad.domain.ports.models import PolicyModel, ValueModel

REPLACED = ("model", "best", f"{MODEL_OF_STEP}*", "*.state.json", METRICS_FILE, SAMPLES_FILE, CONFIG_FILE, RUN_FILE)
"""Patterns of the files and directories of `output_dir` that are replaced whole."""
BYTES_PER_GIB = 2**30
STATE_OF_MODEL = 8
"""Times that a training state has the bytes of its model at most: 16 of a parameter, with moving averages, against
2."""
REPLACED_STATES = (f"{TRAINING_STATE}*", OLD_TRAINING_STATE)

Written = TypeVar("Written")

SAVING_EVERY_SECONDS = 60.0
"""Seconds between two lines that something is being saved, beside which a run may go on."""


class LocalCheckpointStore(CheckpointStore):
    """Models as `output_dir/name/`, run state as `output_dir/name.state.json`, training states in `state_dir`
    (`output_dir` unless it is given; see `states`). Makes the directories, and tidies up after a killed process: no
    other one may write there.

    `keep_states` training states are kept, `keep_models` models called step_N (None: all), and of these as many as
    together have `keep_models_gib` (None: all), but the newest in any case. Where a checkpoint finds `output_dir`'s
    disk full, it is written again after `spare` has made room: of as many bytes as it is called with or, where they are
    not known (None), of all that it may remove but for a share of it. `spare` returns whether it has.

    Raises:
        CheckpointError: a directory cannot be made or written.
    """

    def __init__(
        self,
        output_dir: Path,
        state_dir: Path | None = None,
        *,
        keep_states: int = 2,
        keep_models: int | None = None,
        keep_models_gib: float | None = None,
        spare: Callable[[int | None, float], bool] = lambda lack, share: False,
    ) -> None:
        self._root = output_dir
        self._states = self._root if state_dir is None else state_dir
        self._keep_states = keep_states
        self._keep_models = keep_models
        self._keep_bytes = None if keep_models_gib is None else keep_models_gib * BYTES_PER_GIB
        self._spare = spare
        for directory, flag in {self._states: "--ckpt.state_dir", self._root: "--ckpt.output_dir"}.items():
            make_writable(directory, flag)
            check_renaming(directory, flag)
        tidy(self._root, (*REPLACED, f"*{PROBE}*"))
        tidy(self._states, (*REPLACED_STATES, f"*{PROBE}*"))

    def save_model(self, policy: PolicyModel | ValueModel, name: str, critic: ValueModel | None = None) -> Path:
        """Writes a Hugging Face model to `output_dir/name`, with the critic in `critic` below, in place of an older
        one; returns that directory.

        Raises:
            CheckpointError: it cannot be written; an older one is then still there. The model of a run's end is then
                written to the directory for temporary files, if it can, and the message says where.
        """
        target = self._root / name

        def fill(fresh: Path) -> None:
            policy.save(fresh)
            if critic is not None:
                critic.save(fresh / CRITIC_DIRECTORY)

        try:
            with waiting_for(f"the model {name!r} to be saved", every=SAVING_EVERY_SECONDS):
                self._with_room(lambda: replace_directory(target, fill), self._root, self._model_bytes)
        except OSError as error:
            message = (
                str(error)
                if isinstance(error, CheckpointError)
                else f"The model {name!r} cannot be written to {self._root} ({error.strerror or error}): "
                f"{remedy(error)}, or choose another --ckpt.output_dir."
            )
            if name == FINAL_MODEL and (place := _rescued(fill)) is not None:
                message += f" What was trained is in {place}: move it from there."
            raise CheckpointError(message) from error
        number = name.removeprefix(MODEL_OF_STEP)
        if number.isdecimal():
            self._prune(target, [path for step, path in numbered(self._root, MODEL_OF_STEP) if step < int(number)])
        return target

    def _prune(self, newest: Path, older: Sequence[Path]) -> None:
        """Removes the models of earlier steps, newest first in `older`, that are too many or take too much."""
        kept = older if self._keep_models is None else older[: self._keep_models - 1]
        if self._keep_bytes is not None:
            sizes = accumulate(map(size_of, kept), initial=size_of(newest))
            kept = [path for path, size in zip(kept, islice(sizes, 1, None), strict=True) if size <= self._keep_bytes]
        for path in older[len(kept) :]:
            remove_directory(path)
            self._state_file(path.name).unlink(missing_ok=True)

    def save_state(self, state: Mapping[str, Any], name: str) -> Path:
        """Writes `state` to `output_dir/name.state.json`, in place of an older one; returns that file.

        Raises:
            CheckpointError: it cannot be written, or is not JSON-serialisable; an older one is then still there.
        """
        target = self._state_file(name)
        try:
            content = json.dumps(dict(state), indent=2).encode()
            self._with_room(lambda: replace_file(target, content), self._root)
        except (OSError, TypeError, ValueError) as error:
            raise CheckpointError(f"The run state {name!r} cannot be written to {self._root}: {error}.") from error
        return target

    def save_training(self, saved: TrainingState) -> Path:
        """Writes `state_dir/training_state_N`; returns that directory.

        Raises:
            CheckpointError: it cannot be written; the older ones are then still there.
        """
        try:
            with waiting_for(f"the training state of step {saved.step} to be saved", every=SAVING_EVERY_SECONDS):
                return self._with_room(
                    lambda: save_state(self._states, saved, keep=self._keep_states),
                    self._states,
                    lambda: state_bytes(self._states, saved),
                )
        except RollgradError:
            raise
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"The training state cannot be written to {self._states} ({error}): {remedy(error)}, "
                "choose another --ckpt.state_dir, or save none (--ckpt.state_minutes None)."
            ) from error

    def load_training(self) -> TrainingState | None:
        """Returns the newest training state of `state_dir` that is whole, None if there is none; nothing but data is
        unpickled.

        Raises:
            CheckpointError: none can be read.
        """
        return load_state(self._states)

    def _with_room(
        self, write: Callable[[], Written], directory: Path, size: Callable[[], int | None] = lambda: None
    ) -> Written:
        """Returns what `write` returns, which writes to `directory` about `size()` bytes, None if nobody knows; each
        attempt may come hours after the lock."""

        def attempt() -> Written:
            keep_locked(directory)
            return write()

        for share in (0.5, 0.0):
            try:
                return attempt()
            except Exception as error:
                same_disk = directory.stat().st_dev == self._root.stat().st_dev
                if not (is_full(error) and same_disk and self._spare(lack_of(size(), directory), share)):
                    raise
        return attempt()

    def _model_bytes(self) -> int | None:
        """Returns the size of the largest model that was saved, before the first the least that one has by the newest
        training state; None without any."""
        names = (self._root / name for name in (FINAL_MODEL, BEST_MODEL))
        saved = [*(path for _, path in numbered(self._root, MODEL_OF_STEP)), *names]
        states = [path for _, path in numbered(self._states, TRAINING_STATE)][:1]
        return max(map(size_of, saved)) or sum(size_of(path) // STATE_OF_MODEL for path in states) or None

    def _state_file(self, name: str) -> Path:
        return self._root / f"{name}.state.json"


def _rescued(fill: Callable[[Path], None]) -> Path | None:
    """Writes a model to a fresh directory for temporary files; returns None if it cannot be, or lies on the machine of
    another process."""
    place = None
    try:
        place = Path(tempfile.mkdtemp(prefix="rollgrad-"))
        fill(place / FINAL_MODEL)
        if not (place / FINAL_MODEL).is_dir():
            raise CheckpointError("The process that writes it is on another machine.")
    except Exception:  # of any kind: the caller raises the error before this one
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)
        return None
    return place / FINAL_MODEL
