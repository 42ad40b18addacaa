"""vLLM as the engine uses it: a model that samples, stops and takes weights, with rollgrad's own values.

One implementation is in processes of this machine (`async_llm`), which may take adapters alone (`lora`), another behind
a URL (`adapters.engines.vllm_server.core`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rollgrad.adapters.weights.receiver_port import EngineModel
from rollgrad.domain.episodes.generation import Generation, GenerationRequest

LIVENESS_SECONDS = 0.5
"""Seconds between checks whether vLLM's processes are alive, during a call that waits."""


class Core(Protocol):
    """A vLLM. All methods raise `EngineError` if it fails or has died."""

    max_tokens: int | None
    """Tokens of a prompt and its reply at most; None if vLLM does not say."""
    model: EngineModel
    """Facts about its model."""
    keeps_weights: bool = True
    """Whether the weights outlast `sleep`; else a transfer has to follow `wake`."""

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
        """Returns the log-prob of `token` after `prompt`, under sampling at `temperature`."""
        ...

    async def abort(self, names: Sequence[str]) -> None:
        """Ends requests with the tokens so far; a request that arrives after the call may go on."""
        ...

    async def freeze(self) -> None:
        """Stops taking steps; requests in flight wait. Idempotent."""
        ...

    async def thaw(self) -> None:
        """Takes steps again; idempotent."""
        ...

    async def announce(self, version: int) -> None:
        """Sets the version of tokens sampled from now on."""
        ...

    async def forget(self) -> None:
        """Drops all keys and values."""
        ...

    def set_apart(self) -> None:
        """Separates new requests from earlier ones: they do not read their keys and values, which those keep."""
        ...

    async def sleep(self) -> None:
        """Releases memory that can be rebuilt."""
        ...

    async def wake(self, part: str) -> None:
        """Takes a part of it back, first `weights`, then `kv_cache`; with the last it takes steps again."""
        ...

    async def ping(self) -> None:
        """Returns normally if vLLM is healthy."""
        ...

    async def begin_update(self, info: Mapping[str, Any] | None) -> None:
        """Tells the backend what is new to it (vLLM's init info), and makes the layers ready to be loaded."""
        ...

    async def take_update(self, update: Mapping[str, Any]) -> None:
        """Loads the weights of an update (vLLM's update info)."""
        ...

    async def finish_update(self) -> None:
        """Ends an update: the layers are complete, or stay as they are after a failed transfer."""
        ...
