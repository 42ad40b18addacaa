"""How a packed batch is laid out for one forward pass: every prompt once, however many samples share it.

A prompt's hidden states do not depend on what follows, so the samples of a group need one copy of it. The layout is
a forest of depth two: a *node* is a run of tokens whose queries attend to the node's own tokens and to those of its
prefix. The forward pass then costs sum(prompts) + sum(responses) tokens instead of sum(prompt + response), with the
same gradient.
Does not own: attention itself (`attention.py`).
"""

from attrs import frozen
from torch import Tensor, arange, cat, empty, equal, int64, tensor

from rollgrad.domain.batch import PackedBatch


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

    `tokens_M`, `positions_M` int64; `index_N`: where each token of the batch lies in M; `nodes` tile M.
    """

    tokens_M: Tensor
    positions_M: Tensor
    index_N: Tensor
    nodes: tuple[Node, ...]


def build_layout(batch: PackedBatch) -> Layout:
    """Shares the prompt of neighbouring sequences of one group wherever it is token for token the same."""
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


def causal_layout(token_ids: list[tuple[int, ...]]) -> Layout:
    """Independent sequences, one node each: what a prefill needs."""
    nodes, size = [], 0
    for ids in token_ids:
        nodes.append(Node(size, len(ids)))
        size += len(ids)
    return Layout(
        tokens_M=tensor([token for ids in token_ids for token in ids]),
        positions_M=cat([arange(node.length) for node in nodes]),
        index_N=arange(size),
        nodes=tuple(nodes),
    )
