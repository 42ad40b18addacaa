"""Brings a newer checkpoint to the engine of a running assistant."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import structlog
from attrs import frozen

from rollgrad.adapters.checkpoints.names import MODEL_OF_STEP, numbered
from rollgrad.adapters.servers.operation import Loaded
from rollgrad.application.foreign import foreign_code
from rollgrad.application.pipelines.run import FINAL_MODEL
from rollgrad.domain.errors import CheckpointError, RollgradError
from rollgrad.domain.ports.rollout_engine import PauseMode, RolloutEngine

FOLLOW_SECONDS = 2.0
"""Seconds between two looks for a newer checkpoint."""

LONGEST_WAIT = 60.0
"""Longest seconds between two attempts to mend a broken transfer, each of which loads the checkpoint again."""

Push = Callable[[Any, int], Awaitable[None]]
"""Function that gives the engine the weights of a loaded model, which count as this version."""

log = structlog.get_logger(__name__)


class ModelReload:
    """Replaces the weights of `engine` while requests come in: those that have begun finish with the old weights, those
    that come meanwhile wait, and none is lost.

    Args:
        engine: samples.
        push: gives it the weights of a loaded model.
        load: loads a checkpoint; runs in a thread.
        model: directory or hub name of the checkpoint that the engine has.
        follow: output directory of a run whose newest checkpoint is loaded, of its steps (`step_N`) or of its end
            (`model`); None loads `model` again.
        broken: returns whether a transfer broke off, so that the engine refuses requests until another succeeds.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        push: Push,
        load: Callable[[str], Any],
        *,
        model: str,
        follow: Path | None,
        broken: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine, self._push, self._load = engine, push, load
        self._broken = broken
        self._model, self._kept = model, _identity(model)
        self._follow = follow
        self._version = 0
        self._failures = 0
        self._changing = asyncio.Lock()

    def loaded(self) -> Loaded:
        """Returns which checkpoint the engine has, how often it was replaced, and how often that failed."""
        return Loaded(checkpoint=Path(self._model).name, reloads=self._version, failures=self._failures)

    async def reload(self) -> Mapping[str, Any]:
        """Loads the newest checkpoint; returns its `model` and the number of reloads so far, `version`.

        Raises:
            RollgradError: it cannot be loaded, or is no checkpoint of this architecture. The engine goes on with the
                weights that it has; if these were replaced in part, it refuses requests until a reload succeeds.
        """
        async with self._changing:
            name = self._newest()
            kept = _identity(name)
            try:
                await self._replace(name)
            except RollgradError as error:
                self._failures += 1
                log.warning("model_not_reloaded", model=name, error=str(error))
                raise
            self._version, self._model, self._kept = self._version + 1, name, kept
            log.info("model_reloaded", model=name, version=self._version)
            return {"model": name, "version": self._version}

    async def _replace(self, name: str) -> None:
        with foreign_code(lambda words: CheckpointError(f"The checkpoint {name} cannot be loaded: {words}.")):
            model = await asyncio.to_thread(self._load, name)  # memory may run out, and a run may delete it
            await self._engine.pause(PauseMode.WAIT)
            try:
                await self._push(model, self._version + 1)
            finally:
                await self._engine.resume()

    async def keep_following(self) -> None:
        """Reloads whenever the run has a newer checkpoint, until it is cancelled. One that cannot be loaded is logged,
        and left out. A transfer that broke off is made again, and again after twice the time, until it succeeds."""
        failed: _Kept | None = None
        wait = FOLLOW_SECONDS
        while True:
            await asyncio.sleep(wait)
            name = self._newest()
            newest = _identity(name)
            # Not by their names: another run in this directory (--ckpt.overwrite) has the same ones.
            if newest not in (self._kept, failed, None) or self._broken():
                try:
                    await self.reload()
                except RollgradError:
                    failed = newest
            wait = min(2 * wait, LONGEST_WAIT) if self._broken() else FOLLOW_SECONDS

    def _newest(self) -> str:
        if self._follow is None:
            return self._model
        try:
            steps = [path for _, path in numbered(self._follow, MODEL_OF_STEP)[:1]]
        except OSError:  # a network's disk may be away for a while
            return self._model
        # A run that is continued has the model of its first end, which is older than its next step's.
        there = [(kept.written, path) for path in (*steps, self._follow / FINAL_MODEL) if (kept := _identity(path))]
        return str(max(there)[1]) if there else self._model


@frozen
class _Kept:
    """A directory as the file system knows it, which changes where another one takes its name."""

    number: int
    written: int


def _identity(directory: str | Path) -> _Kept | None:
    """Returns what tells a directory from another of the same name; None if there is none."""
    try:
        found = Path(directory).stat()
    except OSError:  # also of a name on the hub
        return None
    return _Kept(found.st_ino, found.st_mtime_ns)
