"""Layout of a packed batch for one forward pass: every prompt once, however many samples share it.

A prompt's hidden states do not depend on what follows, so the samples of a group need one copy of it. The layout is
a forest of depth two: a *node* is a run of tokens whose queries attend to the node's own tokens and to those of its
prefix. The forward pass then costs sum(prompts) + sum(responses) tokens instead of sum(prompt + response), with the
same gradient. For example, 8 samples of 100 tokens after one prompt of 300 cost 300 + 8 x 100 = 1,100 tokens, not
3,200.

Does not own: attention itself (`attention.py`).
"""

from collections.abc import Sequence

from attrs import frozen
from torch import Tensor, arange, cat, empty, equal, int64, tensor

from rollgrad.domain.batches.packed import PackedBatch


@frozen
class Node:
    """`length` queries from `start`; their keys are `prefix_length` tokens from `prefix_start`, then their own."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0

    @property
    def keys(self) -> int:
        """Length of the whole path."""
        return self.prefix_length + self.length


@frozen(kw_only=True, eq=False)
class Layout:
    """`M` distinct tokens standing for the `N` of a batch.

    `tokens_M`, `positions_M` int64; `index_N`: index in M of each token of the batch; `nodes` tile M.
    """

    tokens_M: Tensor
    positions_M: Tensor
    index_N: Tensor
    nodes: tuple[Node, ...]


def build_layout(batch: PackedBatch) -> Layout:
    """Lays out a batch; neighbouring sequences of one group share their prompt if it is the same token for token."""
    tokens, index = [], []
    nodes: list[Node] = []
    size = 0
    shared = empty(0, dtype=int64)
    shared_group, shared_start = None, 0
    starts, lengths = batch.starts_S.tolist(), batch.lengths_S.tolist()
    prompt_lengths, groups = batch.prompt_lengths_S.tolist(), batch.group_ids_S.tolist()
    for start, length, prompt_length, group in zip(starts, lengths, prompt_lengths, groups, strict=True):
        prompt = batch.tokens_N[start : start + prompt_length]
        if group != shared_group or not equal(prompt, shared):
            shared, shared_group, shared_start = prompt, group, size
            tokens.append(prompt)
            nodes.append(Node(size, prompt_length))
            size += prompt_length
        response_length = length - prompt_length
        index.append(arange(shared_start, shared_start + prompt_length))
        if response_length:
            tokens.append(batch.tokens_N[start + prompt_length : start + length])
            nodes.append(Node(size, response_length, shared_start, prompt_length))
            index.append(arange(size, size + response_length))
            size += response_length
    positions = [arange(node.prefix_length, node.keys) for node in nodes]
    return Layout(tokens_M=cat(tokens), positions_M=cat(positions), index_N=cat(index), nodes=tuple(nodes))


def prefill_layout(prompts: Sequence[tuple[int, ...]]) -> tuple[Layout, list[Node]]:
    """Lays out independent prompts; their common beginning (a system prompt, a template's opening) is laid out once.

    Returns:
        The layout and, for each prompt, the node of its last tokens: its path is the whole prompt. At least one token
        of each prompt is its own.
    """
    shared = _common_prefix(prompts) if len(prompts) > 1 else 0
    nodes = [Node(0, shared)] if shared else []
    tokens, size, leaves = list(prompts[0][:shared]), shared, []
    for prompt in prompts:
        leaves.append(Node(size, len(prompt) - shared, 0, shared))
        tokens.extend(prompt[shared:])
        size += len(prompt) - shared
    nodes.extend(leaves)
    positions = [arange(node.prefix_length, node.keys) for node in nodes]
    layout = Layout(tokens_M=tensor(tokens), positions_M=cat(positions), index_N=arange(size), nodes=tuple(nodes))
    return layout, leaves


def _common_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    """Returns the length of the prompts' common beginning, leaving each at least one token of its own."""
    first, last = min(prompts), max(prompts)  # all share what the first and last in sorted order share
    limit = min(len(prompt) for prompt in prompts) - 1
    for position in range(limit):
        if first[position] != last[position]:
            return position
    return limit
