"""Keys and values of finished sequences, for the requests that go on after them."""

from collections import OrderedDict

from rollgrad.adapters.engines.embedded.kv_cache import StoredKeys

KEPT_BYTES = 2 * 2**30
"""Memory for keys and values of turns that a later turn may continue; 90 episodes of 500 tokens on SmolLM2-135M in
float32."""


class KeptSequences:
    """Keys and values of finished sequences that another request is expected to continue.

    Args:
        max_bytes: memory for them; the longest unused go first.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[int, ...], StoredKeys] = OrderedDict()

    def keep(self, tokens: tuple[int, ...], stored: StoredKeys) -> None:
        """Keeps the result of `KVCache.copy_out` for `tokens`."""
        self._remove(tokens)
        self._kept[tokens] = stored
        self._bytes += stored.nbytes
        while self._bytes > self._max_bytes:
            self._remove(next(iter(self._kept)))

    def take(self, prompt: tuple[int, ...]) -> StoredKeys | None:
        """Removes and returns the longest kept sequence that `prompt` begins with and goes on after; None if there is
        none."""
        for length in sorted({len(tokens) for tokens in self._kept if len(tokens) < len(prompt)}, reverse=True):
            stored = self._remove(prompt[:length])
            if stored is not None:
                return stored
        return None

    def clear(self) -> None:
        """Forgets everything: the weights have changed, or memory is needed."""
        self._kept.clear()
        self._bytes = 0

    def _remove(self, tokens: tuple[int, ...]) -> StoredKeys | None:
        stored = self._kept.pop(tokens, None)
        if stored is not None:
            self._bytes -= stored.nbytes
        return stored
