"""Processes that divide the queries of a batch have about as much to do, and each query sees all of its path."""

from collections.abc import Sequence

import pytest
import torch

from rollgrad.adapters.models.torch.layers.layout import Node
from rollgrad.adapters.models.torch.layers.queries import Piece, divided, queries_of, tokens_of

FORESTS = {
    "one_sequence": [Node(0, 100_000)],
    "samples_of_a_prompt": [Node(0, 30_000), *(Node(30_000 + 700 * i, 700, ((0, 30_000),)) for i in range(16))],
    "one_long_among_short": [*(Node(200 * i, 200) for i in range(100)), Node(20_000, 20_000)],
    "one_long_and_as_many_tokens_of_short": [Node(0, 9000), *(Node(9000 + 1000 * i, 1000) for i in range(11))],
    "branches": [
        Node(0, 1000),
        Node(1000, 300, ((0, 1000),)),
        Node(1300, 900, ((0, 1000), (1000, 200))),
        Node(2200, 4000, ((0, 500),)),
        Node(6200, 50, ((0, 1000), (1000, 200), (1300, 800))),
    ],
    "few_tokens": [Node(0, 7), Node(7, 3, ((0, 5),)), Node(10, 6)],
}
LONG = [name for name in FORESTS if name != "few_tokens"]
PARTS = [2, 3, 4, 8]


def seen(pieces: Sequence[Piece]) -> int:
    """Scores of a head, one for each key that a query of the pieces sees."""
    return sum(
        int(torch.arange(start, start + length).sub(node.start - node.prefix_length - 1).sum())
        for node, (start, length) in pieces
    )


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", FORESTS)
def test_every_token_is_asked_for_once(name: str, parts: int) -> None:
    tokens = torch.cat([tokens_of(pieces) for pieces in divided(FORESTS[name], parts)])
    assert tokens.sort().values.tolist() == list(range(sum(node.length for node in FORESTS[name])))


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", LONG)
def test_processes_have_about_as_much_to_do(name: str, parts: int) -> None:
    shares = divided(FORESTS[name], parts)
    for work in ([seen(pieces) for pieces in shares], [len(tokens_of(pieces)) for pieces in shares]):
        assert max(work) <= (1.001 if name == "one_sequence" else 1.1) * sum(work) / parts


@pytest.mark.parametrize("parts", PARTS)
def test_each_part_of_few_tokens_has_some(parts: int) -> None:
    lengths = [len(tokens_of(pieces)) for pieces in divided(FORESTS["few_tokens"], parts)]
    assert max(lengths) - min(lengths) <= 1


def test_samples_that_can_be_dealt_whole_are_not_cut() -> None:
    """Each piece would need the keys of the whole prompt again."""
    for pieces in divided(FORESTS["samples_of_a_prompt"], 4):
        assert [length for node, (_, length) in pieces if node.prefix] == [700] * 4


def test_the_longest_samples_are_dealt_first() -> None:
    """In the order in which they come, two processes would get 500 and 700 tokens of them."""
    nodes, start = [Node(0, 30_000)], 30_000
    for length in (100, 200, 400, 500):
        nodes.append(Node(start, length, ((0, 30_000),)))
        start += length
    shares = [[length for node, (_, length) in pieces if node.prefix] for pieces in divided(nodes, 2)]
    assert sorted(shares) == [[400, 200], [500, 100]]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", FORESTS)
def test_each_query_sees_its_path(name: str, parts: int) -> None:
    nodes = FORESTS[name]
    total = sum(node.length for node in nodes)
    for pieces in divided(nodes, parts):
        queries = queries_of(pieces, total)
        token_M = queries.place_M.argsort()
        assert torch.equal(queries.place_M[token_M], torch.arange(total))
        assert token_M[: queries.count].tolist() == tokens_of(pieces).tolist()
        assert [node.start for node in queries.nodes] == [
            0,
            *torch.tensor([n.length for n in queries.nodes]).cumsum(0),
        ][:-1]
        for node, (whole, (start, length)) in zip(queries.nodes, sorted(pieces, key=lambda each: each[1]), strict=True):
            path = whole.path()[: whole.prefix_length + start - whole.start + length]
            assert torch.equal(token_M[node.path()], path)
