"""Spans of text that two tokenisers end at the same place, by which models with other tokens are compared.

Does not own: what a token writes (`adapters/chat/token_bytes`), nor the loss (`algorithms/losses/distillation`).
"""

from collections.abc import Sequence
from itertools import accumulate, takewhile

from torch import Tensor

from rollgrad.domain.episodes.examples import Demonstration

Text = bytes | None
"""Text that a token writes: bytes, or None of a special token, such as one that ends a turn."""


def trained_runs(example: Demonstration) -> list[tuple[Tensor, int]]:
    """Returns the runs of trained tokens of all branches of an example, and how many tokens more each has before its
    first trained one: the first token of a sequence, which nothing predicts, belongs to the text after it."""
    runs = []
    for branch in example.branches:
        trained_T = branch.weights_T > 0
        begins = (trained_T & ~trained_T.roll(1)).nonzero()[:, 0].tolist()  # the first token is never trained
        ends = (trained_T & ~trained_T.roll(-1)).nonzero()[:, 0].tolist()
        for begin, end in zip(begins, ends, strict=True):
            before = int(begin == 1)
            runs.append((branch.token_ids_T[begin - before : end + 1], before))
    return runs


def aligned_ends(one: Sequence[Text], other: Sequence[Text]) -> list[tuple[int, int]]:
    """Returns where two tokenisations of one text end a token at the same place: after how many tokens of each.

    What lies between two such places are the shortest spans that both write, as in approximate likelihood matching
    (Minixhofer et al. 2025, arXiv:2503.20083). Special tokens stand for each other by their order,
    whatever they are called. Where the texts differ, nothing is found from there on; but spaces that one alone begins
    with are passed over, as tokenisers write some of their own.
    """
    found: list[tuple[int, int]] = []
    first = second = 0
    while first < len(one) and second < len(other):
        if one[first] is None and other[second] is None:
            first, second = first + 1, second + 1
            found.append((first, second))
            continue
        texts = _texts(one[first:]), _texts(other[second:])
        ends, whole = _ends_of_text(*texts)
        found += [(first + a, second + b) for a, b in ends]
        if not whole:
            break
        first, second = first + len(texts[0]), second + len(texts[1])
    return found


def _texts(tokens: Sequence[Text]) -> list[bytes]:
    """Returns what tokens write before the first special one."""
    return [text for text in takewhile(lambda text: text is not None, tokens) if text is not None]


def _ends_of_text(one: Sequence[bytes], other: Sequence[bytes]) -> tuple[list[tuple[int, int]], bool]:
    """Returns `aligned_ends` of tokens of which none is special, and whether they write the same text."""
    texts = b"".join(one), b"".join(other)
    spaces = [len(text) - len(text.lstrip(b" ")) for text in texts]
    passed = [own - min(spaces) for own in spaces]
    rest = [text[skipped:] for text, skipped in zip(texts, passed, strict=True)]
    pairs = enumerate(zip(*rest, strict=False))
    common = next((place for place, (a, b) in pairs if a != b), min(map(len, rest)))
    first, second = (_ends(tokens, skipped) for tokens, skipped in zip((one, other), passed, strict=True))
    places = sorted(place for place in first.keys() & second.keys() if 0 < place <= common)
    return [(first[place], second[place]) for place in places], rest[0] == rest[1]


def _ends(tokens: Sequence[bytes], skipped: int) -> dict[int, int]:
    """Returns how many tokens write the text up to each of their ends, by the number of its bytes without those
    skipped."""
    return {end - skipped: count for count, end in enumerate(accumulate(map(len, tokens)), 1)}
