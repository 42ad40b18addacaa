"""The sizes of a model on which its memory depends: numbers alone, importable without torch."""

import math

from attrs import evolve, frozen

QUANTISED_BITS = 4 + 8 / 64 + 32 / (64 * 256)
"""Bytes of a number in NF4 with double quantisation: an 8-bit scale for 64 of them, a 32-bit one for 256 scales
(Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", section 3)."""


Points = tuple[tuple[int, int], ...]
"""Pairs of (tokens of a pass, bytes that it holds), fewest tokens first."""


@frozen(kw_only=True)
class PassMemory:
    """Bytes that passes of a model hold beside its weights, as they were measured for some numbers of tokens, and what
    they compute: for one number format, and without the output embedding."""

    scored: Points
    """At the peak of a pass without gradients."""
    prompted: Points = ()
    """Peaks of passes over sequences as long as prompts; none where they were not measured."""
    saved: Points = ()
    """At the end of a forward pass whose gradients follow, of a model that is trained."""
    trained: Points = ()
    """At the peak of both passes, gradients of weights on their way included."""

    padded: bool = False
    """Whether the model is computed with padding."""
    flops: float = 0.0
    """Floating-point operations of products in a token's forward pass, without those of fused attention."""
    recomputed: float = 0.0
    """Those of them that the backward pass makes again."""


def bytes_of_pass(points: Points, tokens: float) -> int:
    """Returns the bytes that a pass of `tokens` tokens holds: linear between two points, and after the last point as
    between the last two. A peak is the largest of several such lines, so that between points no pass holds more."""
    index = min(sum(tokens > measured for measured, _ in points[:-1]), len(points) - 1)
    (few, least), (many, most) = points[max(0, index - 1)], points[max(1, index)]
    return max(least, math.ceil(least + (most - least) * (tokens - few) / (many - few)))


@frozen(kw_only=True)
class ModelShape:
    """Shape of a decoder, on which its memory depends."""

    parameters: int
    """Numbers of the model; tied tensors count once, adapters do not."""
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    heads: int = 0
    """Heads of queries; 0 if they are not known."""
    adapters: int = 0
    """Numbers in adapters, which are then all that is trained; 0 without adapters."""
    quantised: int = 0
    """Numbers that are kept in 4 bits."""
    embedding: int = 0
    """Numbers of the input embedding."""
    experts: int = 0
    """Numbers of a mixture's experts that processes divide."""
    experts_per_token: int = 0
    """Experts of a layer that each token goes to."""
    tied: bool = False
    """Whether input and output embedding are one tensor."""
    stored: int = 0
    """Bytes of a number in the model's files; 0 if they are not known."""
    attending: int | None = None
    """Layers that keep keys; None for all."""
    state_bytes: int = 0
    """Bytes of the states that other layers keep of a sequence, whatever its length."""
    columns: int = 0
    """Columns of a token, at most, from which a layer computes such a state."""
    headless: bool = False
    """Whether it has no output embedding, as models of values and scores."""
    compares: bool = False
    """Whether it reads two rows of its output embedding alone, as process reward models."""
    passes: PassMemory | None = None
    """Result of measuring the model's own code; None takes the formula of an ordinary decoder."""

    @property
    def keeping(self) -> int:
        """Layers that keep keys."""
        return self.layers if self.attending is None else self.attending

    @property
    def query_heads(self) -> int:
        """Heads of queries: `heads`, where these are known."""
        return self.heads or max(self.kv_heads, self.hidden // max(1, self.head_dim))

    @property
    def trained(self) -> int:
        """Numbers that have gradients."""
        return self.adapters or self.parameters

    def without_head(self) -> "ModelShape":
        """Shape of the model without its output embedding."""
        head = 0 if self.tied or self.headless else self.embedding
        return evolve(self, parameters=self.parameters - head, headless=True)

    def weights(self, compute_bytes: int) -> int:
        """Bytes of all weights."""
        others = self.parameters - self.quantised + self.adapters
        return others * compute_bytes + math.ceil(self.quantised * QUANTISED_BITS / 8)

    def loading(self, compute_bytes: int, processes: int) -> int:
        """Returns the bytes of the machine's memory that each of `processes` needs to load the model for a GPU.

        Of a divided model that is the process's share, and the largest part that is put together. Of a whole one it is
        all of it if its numbers are converted; else nothing, because there are only pages of files, which the system
        drops when it needs room.
        """
        if self.quantised:  # it is loaded matrix by matrix
            return 0
        whole = self.weights(compute_bytes)
        if processes > 1:
            return math.ceil(whole / processes) + max(math.ceil(whole / self.layers), self.embedding * compute_bytes)
        return 0 if self.stored == compute_bytes else whole

    def dequantised(self, compute_bytes: int) -> int:
        """Bytes that a pass has of dequantised weights at once: those of one matrix, so less than of one layer."""
        return math.ceil(self.quantised / self.layers) * compute_bytes
