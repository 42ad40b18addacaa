"""vLLM as an engine sees it: a model that samples, stops and takes weights, told in values of ours.

One is in processes of this machine (`adapters.vllm.local`), which may take adapters alone (`adapters.vllm.adapter`),
another behind a URL (`adapters.served.core`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rollgrad.adapters.weights.receiver_port import EngineModel
from rollgrad.domain.episodes.generation import Generation, GenerationRequest

LIVENESS_SECONDS = 0.5
"""How often a call that waits looks whether vLLM's processes are alive."""


class Core(Protocol):
    """All methods raise `EngineError` if vLLM fails or has died."""

    max_tokens: int | None
    """Tokens of a prompt and its reply at most; None if vLLM does not say."""
    model: EngineModel
    """What it runs."""

    async def sample(
        self,
        name: str,
        request: GenerationRequest,
        eos_token_ids: frozenset[int],
        on_token: Callable[[int], None] | None,
    ) -> Generation:
        """Completes a request, known by its `name` until then; versions are those announced."""
        ...

    async def next_logprob(self, name: str, prompt: Sequence[int], token: int, temperature: float) -> float:
        """Log-prob of `token` after `prompt`, as sampling at `temperature` sees it."""
        ...

    async def abort(self, names: Sequence[str]) -> None:
        """These requests end with the tokens so far; one that only comes after the call may go on."""
        ...

    async def freeze(self) -> None:
        """Takes no more steps; requests in flight wait. May be called again."""
        ...

    async def thaw(self) -> None:
        """Takes steps again. May be called again."""
        ...

    async def announce(self, version: int) -> None:
        """Tokens drawn from now on carry `version`."""
        ...

    async def forget(self) -> None:
        """Drops all keys and values."""
        ...

    def set_apart(self) -> None:
        """Requests from now on read no keys and values of those before, which keep theirs."""
        ...

    async def sleep(self) -> None:
        """Releases what can be rebuilt."""
        ...

    async def wake(self, part: str) -> None:
        """Takes a part of it back, first `weights`, then `kv_cache`; with the last it takes steps again."""
        ...

    async def ping(self) -> None:
        """Returns if vLLM is well."""
        ...

    async def begin_update(self, info: Mapping[str, Any] | None) -> None:
        """Tells the backend what is new to it (vLLM's init info), and makes the layers ready to be loaded."""
        ...

    async def take_update(self, update: Mapping[str, Any]) -> None:
        """Loads what an update brings (vLLM's update info)."""
        ...

    async def finish_update(self) -> None:
        """The layers are loaded, or what came of them is put up with."""
        ...
