"""Tokens that sequences of one group begin with alike, which a forward pass computes once.

The distinct tokens of a group form a tree (a trie): a hidden state depends on the tokens before it alone, so sequences
have equal ones for as long as they are equal. In the order of their tokens each sequence shares the most with its
neighbours, and the tree has sum(length) - sum(shared with the one before) tokens.
"""

from collections.abc import Sequence
from itertools import pairwise

from attrs import frozen
from torch import Tensor

from rollgrad.domain.batches.packed import PackedBatch

TOKEN_BYTES = 8
"""Bytes of a token in `tokens_N`."""


@frozen
class SharedPrefixes:
    """`order`: all sequences of a batch, those of a group together (groups in order of first appearance) and in the
    order of their tokens. `shared`: for each of them, in that order, the number of first tokens that it shares with the
    sequence before it; 0 for the first of a group."""

    order: list[int]
    shared: list[int]

    def distinct(self, lengths: Sequence[int]) -> int:
        """Returns the number of distinct tokens of sequences that have these `lengths`, by their number."""
        return sum(lengths) - sum(self.shared)


def shared_prefixes(batch: PackedBatch) -> SharedPrefixes:
    """Returns what the sequences of each group begin with alike."""
    members: dict[int, list[int]] = {}
    for sequence, group in enumerate(batch.group_ids_S.tolist()):
        members.setdefault(group, []).append(sequence)
    starts, lengths = batch.starts_S.tolist(), batch.lengths_S.tolist()
    prompts = batch.prompt_lengths_S.tolist()
    tokens_N = _told_apart(batch).cpu().numpy()
    order: list[int] = []
    shared: list[int] = []
    for sequences in members.values():
        if len(sequences) == 1:
            order += sequences
            shared.append(0)
            continue
        tokens = {s: tokens_N[starts[s] : starts[s] + lengths[s]].tobytes() for s in sequences}
        ranked = sorted(sequences, key=tokens.__getitem__)
        order += ranked
        shared.append(0)
        shared += [common_tokens(tokens[one], tokens[other], prompts[other]) for one, other in pairwise(ranked)]
    return SharedPrefixes(order, shared)


def _told_apart(batch: PackedBatch) -> Tensor:
    """Returns tokens_N with the number of each image, below 0, in the place of its tokens, which are equal for all
    images. So none is shared in part."""
    tokens_N = batch.tokens_N
    if batch.images_S:
        tokens_N = tokens_N.clone()
        numbers: dict[str, int] = {}
        for images, start in zip(batch.images_S, batch.starts_S.tolist(), strict=True):
            for placed in images:
                number = numbers.setdefault(placed.image.digest, len(numbers))
                tokens_N[start + placed.start : start + placed.stop] = -1 - number
    return tokens_N


def common_tokens(one: bytes, other: bytes, guess: int) -> int:
    """Returns how many first tokens two sequences have in common, given as the bytes of their tokens. `guess` is tried
    first: samples of one prompt part after it."""
    limit = min(len(one), len(other)) // TOKEN_BYTES
    equal, step = 0, max(1, guess)
    while equal < limit:
        start, stop = TOKEN_BYTES * equal, TOKEN_BYTES * min(equal + step, limit)
        if one[start:stop] == other[start:stop]:
            step, equal = 1 if equal == 0 else 2 * step, stop // TOKEN_BYTES
        elif step == 1:
            break
        else:
            limit, step = min(limit, equal + step), (step + 1) // 2
    return equal
