"""How a layer's attention makes weights of queries and keys."""

from attrs import frozen
from torch import Tensor


@frozen(eq=False)
class ScoreForm:
    """Form of a layer's attention: a softmax of the products of queries and keys times `scaling`, with what follows."""

    scaling: float
    window: int | None = None
    """Number of keys that a query sees, the last ones up to itself; None: all."""
    sinks_H: Tensor | None = None
    """For each query head the score of one more key, which all queries see and whose value is 0 (`sinks.py`)."""
    cap: float | None = None
    """Score s counts as cap * tanh(s / cap) (`capped.py`)."""
    chunk: int | None = None
    """Number of tokens in a chunk: scores of tokens in chunks before a query's own count as minus infinity."""
