"""Policy, critic and reference whose parts are in the processes of a group, behind the ports of models.

A batch is divided by tokens (`domain.batches.sharding`) over the processes, or over groups of neighbouring ranks: all
of a group get one part, and divide its tokens among them (`adapters.models.torch.sequence_parallel`). Weights are sent
by the processes themselves and cross no pipe.
Does not own: how a process computes its part (`adapters.models.torch`, `adapters.models.deepspeed`).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.ray.session import ray_module
from rollgrad.adapters.rewards.model import Judge
from rollgrad.adapters.weights.shared_buckets import Assembler, SharedMemory, fill_at
from rollgrad.adapters.weights.transfer import Send
from rollgrad.domain.batches.metrics import joined
from rollgrad.domain.batches.packed import Batch, PackedBatch
from rollgrad.domain.batches.sharding import Shards, shards
from rollgrad.domain.episodes.rewards import RewardInput
from rollgrad.domain.ports.models import (
    PolicyModel,
    PolicyObjective,
    ReferenceModel,
    TokenScores,
    TrainedReward,
    ValueModel,
    ValueObjective,
)


class RankPolicy:
    """One process's part of a policy, which can also be asked to send its weights, update by update."""

    def __init__(self, policy: TorchPolicy) -> None:
        self.policy = policy
        self._weights: Iterator[tuple[str, Tensor]] = iter(())
        self._updates: Iterator[Any] = iter(())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def open_weights(self, send: Send, *arguments: Any) -> None:
        """Starts to send the weights by `send`."""
        self._open(self.policy.weights(), send, *arguments)

    def open_adapter(self, send: Send, *arguments: Any) -> None:
        """Starts to send only the adapters' weights by `send`."""
        self._open(self.policy.adapter(), send, *arguments)

    def next_update(self) -> Any:
        """Returns the description of the next update; None after the last."""
        return next(self._updates, None)

    def skip_weights(self) -> None:
        """Goes through the remaining weights without sending them."""
        self._updates = iter(())
        for _ in self._weights:
            pass

    def gather_weights(self) -> None:
        """Takes part in gathering the weights that another process sends."""
        for _ in self.policy.weights():
            pass

    def gather_adapter(self) -> None:
        """Takes part in gathering the adapters that another process sends."""
        for _ in self.policy.adapter():
            pass

    def _open(self, weights: Iterator[tuple[str, Tensor]], send: Send, *arguments: Any) -> None:
        self._weights = weights
        self._updates = send(weights, *arguments)


class _Trained:
    """Common part of a policy and a critic; each `width` neighbouring processes have one part of a batch."""

    def __init__(self, group: WorkerGroup, *, width: int = 1) -> None:
        self._group = group
        self._parts = _Parts(group, width)

    def save(self, path: Path) -> None:
        """Saves the model as its port says; the first process writes."""
        self._group.all("save", path)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as the port says; the first process has it whole."""
        state: dict[str, Any] = self._group.all("state_dict")[0]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state as the port says."""
        self._group.all("load_state_dict", state)


class ShardedPolicy(_Trained, PolicyModel):
    """A `PolicyModel`; each process of `group` holds a `RankPolicy`, and each `width` neighbours one part of a
    batch."""

    def __init__(self, group: WorkerGroup, *, width: int = 1) -> None:
        super().__init__(group, width=width)
        self.steps = 0
        """Optimizer steps begun."""

    def score(self, batch: PackedBatch) -> TokenScores:
        """Implements `PolicyModel.score`."""
        return self._parts.score(batch)

    def update(self, micro_batches: Sequence[Batch], objective: PolicyObjective[Batch]) -> dict[str, float]:
        """Implements `PolicyModel.update`."""
        self.steps += 1
        return self._parts.update(micro_batches, objective)

    def sent(
        self, send: Send, *arguments: Any, ranks: Sequence[int] = (0,), adapter: bool = False
    ) -> Iterator[list[Any]]:
        """Implements `DividedPolicy.sent`."""
        what = "adapter" if adapter else "weights"
        yield from self._group.read(
            f"open_{what}",
            send,
            *arguments,
            ranks=ranks,
            following="next_update",
            rest="skip_weights",
            others=f"gather_{what}",
        )

    def address(self) -> tuple[str, int]:
        """Implements `DividedPolicy.address`."""
        return self._group.address()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Implements `PolicyModel.weights`; copies on the CPU."""
        memory = SharedMemory()
        try:
            assembler = Assembler(torch.device("cpu"))
            for [(index, pieces)] in self.sent(fill_at, memory.path, memory.bucket_bytes):
                memory.unlink()  # the sender has it open too, so no file is left whatever happens now
                yield from assembler.take(memory.bucket(index), pieces)
        finally:
            memory.unlink()


class ShardedValue(_Trained, ValueModel):
    """A `ValueModel`; each process of `group` holds a `TorchValue`, and each `width` neighbours one part of a batch."""

    def values(self, batch: PackedBatch) -> Tensor:
        """Implements `ValueModel.values`."""
        return self._parts.values(batch)

    def update(self, micro_batches: Sequence[Batch], objective: ValueObjective[Batch]) -> dict[str, float]:
        """Implements `ValueModel.update`."""
        return self._parts.update(micro_batches, objective)


class ShardedReward(ShardedValue, TrainedReward):
    """A `TrainedReward`; each process of `group` holds a `TorchReward`, and each `width` neighbours one part of a
    batch."""

    def set_moments(self, moments: tuple[float, float] | None) -> None:
        """Implements `TrainedReward.set_moments`."""
        self._group.all("set_moments", moments)


class ShardedReference(ReferenceModel):
    """A `ReferenceModel`; each process of `group` holds a whole `TorchReference`, and each `width` neighbours one part
    of a batch."""

    def __init__(self, group: WorkerGroup, *, width: int = 1) -> None:
        self._parts = _Parts(group, width)

    def score(self, batch: PackedBatch) -> TokenScores:
        """Implements `ReferenceModel.score`."""
        return self._parts.score(batch)


def reward_copies(group: WorkerGroup) -> list[Judge]:
    """Returns functions that call the whole `RewardModel` of each process of `group`."""

    def judge(rank: int, replies: Sequence[RewardInput]) -> list[tuple[float, bool]]:
        judged: list[tuple[float, bool]] = group.begin("judge", [rank], replies)()[0]
        return judged

    return [partial(judge, rank) for rank in range(group.size)]


class _Parts:
    """Calls in which each `width` neighbouring processes get one part of a batch, and return equal results."""

    def __init__(self, group: WorkerGroup, width: int) -> None:
        self._group = group
        self._width = width

    def score(self, batch: PackedBatch) -> TokenScores:
        """Returns the log-probs and entropy of the whole batch."""
        divided = self._divided(batch)
        scores = self._each("score", [[part] for part in divided.parts])
        correct = [s.correct_N for s in scores if s.correct_N is not None]
        means = [s.mean_logprobs_N for s in scores if s.mean_logprobs_N is not None]
        odds = [s.odds_N for s in scores if s.odds_N is not None]
        divergences = [s.divergence_N for s in scores if s.divergence_N is not None]
        return TokenScores(
            logprobs_N=divided.merged([s.logprobs_N for s in scores]),
            entropy_N=divided.merged([s.entropy_N for s in scores]),
            correct_N=divided.merged(correct) if len(correct) == len(scores) else None,
            mean_logprobs_N=divided.merged(means) if len(means) == len(scores) else None,
            divergence_N=divided.merged(divergences) if len(divergences) == len(scores) else None,
            odds_N=divided.merged(odds) if len(odds) == len(scores) else None,
        )

    def values(self, batch: PackedBatch) -> Tensor:
        """Returns the values of the whole batch."""
        divided = self._divided(batch)
        return divided.merged(self._each("values", [[part] for part in divided.parts]))

    def update(
        self, micro_batches: Sequence[Batch], objective: PolicyObjective[Batch] | ValueObjective[Batch]
    ) -> dict[str, float]:
        """Takes one optimizer step, in which every process has a part of each micro-batch."""
        divided = [self._divided(batch).parts for batch in micro_batches]
        loss = ray_module().put(objective)
        count = self._group.size // self._width
        results = self._each("update", [[[parts[index] for parts in divided], loss] for index in range(count)])
        return joined(results)

    def _divided(self, batch: Batch) -> Shards[Batch]:
        return shards(batch, self._group.size // self._width)

    def _each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Returns the results by part, from one process of each."""
        own = [arguments[rank // self._width] for rank in range(self._group.size)]
        return self._group.each(method, own)[:: self._width]
