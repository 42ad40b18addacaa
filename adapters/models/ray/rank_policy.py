"""One process's part of a policy, as the process that drives the run calls it."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.weights.transfer import Send


class RankPolicy:
    """One process's part of a policy, which can also be asked to send its weights, update by update."""

    def __init__(self, policy: TorchPolicy) -> None:
        self.policy = policy
        self._weights: Iterator[tuple[str, Tensor]] = iter(())
        self._updates: Iterator[Any] = iter(())
        self._average = ExitStack()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def begin_average(self) -> None:
        """Puts the moving average in the place of the weights, until `end_average`."""
        self._average.enter_context(self.policy.averaged())

    def end_average(self) -> None:
        """Puts the weights back into their place."""
        self._average.close()

    def open_weights(self, send: Send, *arguments: Any) -> None:
        """Starts to send the weights by `send`."""
        self._open(self.policy.weights(), send, *arguments)

    def open_adapter(self, send: Send, *arguments: Any) -> None:
        """Starts to send only the adapters' weights by `send`."""
        self._open(self.policy.adapter(), send, *arguments)

    def has_parts(self) -> bool:
        """Returns whether this process can send its part of all weights as it is."""
        return self.policy.own_parts() is not None

    def open_parts(self, send: Send, *arguments: Any) -> None:
        """Starts to send this process's part of the weights by `send`."""
        self._weights = iter(())
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._updates = send(self.policy.own_parts(), rank, size, *arguments)

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
