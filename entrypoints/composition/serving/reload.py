"""Brings a newer checkpoint to the engine of a running assistant."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from rollgrad.adapters.checkpoints.names import MODEL_OF_STEP, numbered
from rollgrad.adapters.servers.operation import Loaded
from rollgrad.application.foreign import foreign_code
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
        follow: output directory of a run whose newest checkpoint (`step_N`) is loaded; None loads `model` again.
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
        self._model = model
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
            try:
                await self._replace(name)
            except RollgradError:
                self._failures += 1
                raise
            self._version, self._model = self._version + 1, name
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
        failed, wait = None, FOLLOW_SECONDS
        while True:
            await asyncio.sleep(wait)
            newest = self._newest()
            if newest not in (self._model, failed) or self._broken():
                try:
                    await self.reload()
                except RollgradError as error:
                    failed = newest
                    log.warning("model_not_reloaded", model=newest, error=str(error))
            wait = min(2 * wait, LONGEST_WAIT) if self._broken() else FOLLOW_SECONDS

    def _newest(self) -> str:
        models = [] if self._follow is None else numbered(self._follow, MODEL_OF_STEP)
        return str(models[0][1]) if models else self._model
