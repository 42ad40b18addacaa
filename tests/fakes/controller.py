"""A controller that halts in a phase of its run, to be killed: `python -m tests.fakes.controller CONFIG PHASE`. It is
generating, syncing, training or saving."""

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import rollgrad
from rollgrad.adapters.checkpoints.names import state_paths
from rollgrad.adapters.checkpoints.states import HashedFile
from rollgrad.adapters.models.ray.sharded import ShardedPolicy
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.episodes.rewards import RewardRequest
from rollgrad.entrypoints.config_io import load_config
from rollgrad.testing.reward_source import FakeRewardSource
from tests.forked_ray import SOCKET, fork_workers

HALTED = "halted"
"""The file in `ckpt.output_dir` that says that the phase was reached, with the id of the process."""


def letters(request: RewardRequest) -> float:
    return sum(character.isalpha() for character in request.response) / (1 + len(request.response))


class Halt:
    """Lets a run pass until it has saved its first training state."""

    def __init__(self, config: RLConfig, phase: str) -> None:
        self.phase, self.output_dir = phase, Path(config.ckpt.output_dir)

    def due(self, phase: str) -> bool:
        return phase == self.phase and bool(state_paths(self.output_dir))

    def tell(self) -> None:
        (self.output_dir / HALTED).write_text(str(os.getpid()))

    def here(self) -> None:
        self.tell()
        threading.Event().wait()


def arm(halt: Halt) -> None:
    """Halts among the replies of a step, a bucket's weights, the processes of an update, or the bytes of a state."""
    weights, update, save = ShardedPolicy.weights, ShardedPolicy.update, torch.save

    def halting_weights(policy: ShardedPolicy) -> Iterator[tuple[str, torch.Tensor]]:
        for weight in weights(policy):
            yield weight
            if halt.due("syncing"):
                halt.here()

    def halting_update(*arguments: Any) -> dict[str, float]:
        if halt.due("training"):
            threading.Thread(target=update, args=arguments, daemon=True).start()
            halt.here()
        return update(*arguments)

    def halting_save(state: object, file: Any, **options: Any) -> None:
        if isinstance(file, HashedFile) and halt.due("saving"):  # tensors for other processes are saved, too
            file.write(b"half of a state")
            halt.here()
        save(state, file, **options)

    ShardedPolicy.weights = halting_weights  # type: ignore[method-assign]
    ShardedPolicy.update = halting_update  # type: ignore[method-assign]
    torch.save = halting_save  # type: ignore[assignment]


class HaltingReward(FakeRewardSource):
    """Asked as each reply comes, while others are still sampled."""

    def __init__(self, halt: Halt) -> None:
        super().__init__(letters)
        self.halt = halt

    async def score(self, requests: Any) -> Any:
        if self.halt.due("generating"):
            self.halt.tell()
            await asyncio.Event().wait()
        return await super().score(requests)


if __name__ == "__main__":
    if SOCKET in os.environ:
        fork_workers(os.environ[SOCKET])
    run = load_config(Path(sys.argv[1]))
    halting = Halt(run, sys.argv[2])
    arm(halting)
    rollgrad.train(run, reward=HaltingReward(halting))
