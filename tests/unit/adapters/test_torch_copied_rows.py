"""The gradient of rows that are copied to several places is the sum over these, exact and the same each time."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rollgrad.adapters.models.torch.kernels.attention import dense
from rollgrad.adapters.models.torch.kernels.copied_rows import CopiedRows
from rollgrad.adapters.models.torch.kernels.score_form import ScoreForm
from rollgrad.adapters.models.torch.layers.attention import ForestAttention
from rollgrad.adapters.models.torch.layers.layout import Node, Span, between
from tests.operations import Operations
from tests.pretended_gpu import CUDA, WAITED, pretended_gpu

CPU = torch.device("cpu")
PROMPT, REPLY, REPLIES = 30, 20, 8
REPLIES_TO_A_PROMPT = [Node(0, PROMPT), *(Node(PROMPT + n * REPLY, REPLY, ((0, PROMPT),)) for n in range(REPLIES))]
TOKENS = PROMPT + REPLIES * REPLY


@st.composite
def forests(draw: st.DrawFn) -> list[Node]:
    """Tries of any depth: a node branches off anywhere on the path of an earlier one, or begins a tree."""
    nodes: list[Node] = []
    size = 0
    for branches in draw(st.lists(st.booleans(), min_size=1, max_size=8)):
        prefix: tuple[Span, ...] = ()
        if branches and nodes:
            parent = draw(st.sampled_from(nodes))
            prefix = between((*parent.prefix, (parent.start, parent.length)), 0, draw(st.integers(0, parent.keys)))
        nodes.append(Node(size, draw(st.integers(1, 6)), prefix))
        size += nodes[-1].length
    return nodes


def path(nodes: list[Node]) -> Tensor:
    return torch.cat([node.path() for node in nodes])


def gradient(copied: CopiedRows, places_K: Tensor, rows: int) -> Tensor:
    x = places_K.new_zeros(rows, *places_K.shape[1:]).requires_grad_()
    (found,) = torch.autograd.grad(copied.of(x), x, places_K)
    return found


def added(row_K: Tensor, places_K: Tensor, rows: int) -> Tensor:
    return places_K.new_zeros(rows, *places_K.shape[1:]).index_add_(0, row_K, places_K)


def on_both(compute: Callable[[torch.device], Tensor]) -> Iterator[Tensor]:
    """Yields what is computed in the forms of a CPU and of a GPU."""
    yield compute(CPU)
    with pretended_gpu():
        yield compute(CUDA).to("cpu")


@given(nodes=forests(), unseen=st.integers(0, 20), seed=st.integers(0, 2**31))
def test_the_gradient_of_a_forest_is_the_sum_over_places(nodes: list[Node], unseen: int, seed: int) -> None:
    """Rows that nobody sees have a gradient of zero; the sum of whole numbers is exact in any order."""
    row_K, rows = path(nodes), sum(node.length for node in nodes) + unseen
    places_K = torch.randint(-9, 9, (len(row_K), 2, 3), generator=torch.Generator().manual_seed(seed)).double()
    for found in on_both(lambda device: gradient(CopiedRows(row_K, device), places_K.to(device), rows)):
        assert torch.equal(found, added(row_K, places_K, rows))


def test_autograd_agrees_with_differences() -> None:
    copied = CopiedRows(torch.tensor([2, 0, 2, 3, 2, 0]), CPU)
    x = torch.randn(5, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.equal(copied.of(x), x.index_select(0, copied.row_K))
    assert torch.autograd.gradcheck(copied.of, x)


def test_filling_is_not_read() -> None:
    row_K, real_K = torch.tensor([1, 0, 1, 0, 0]), torch.tensor([True, True, True, False, False])
    places_K = torch.tensor([1.0, 2.0, 4.0, torch.nan, torch.nan])[:, None]
    for found in on_both(lambda device: gradient(CopiedRows(row_K, device, real_K), places_K.to(device), 2)):
        assert found.tolist() == [[2.0], [5.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    row_K = path(REPLIES_TO_A_PROMPT)
    places_K = torch.randn(len(row_K), 4, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = added(row_K, places_K.double(), TOKENS)
    nearest = (exact.float().to(dtype).double() - exact).abs().sum()
    one_by_one = torch.zeros(TOKENS, 4, 16, dtype=dtype)
    for row, place in zip(row_K.tolist(), places_K, strict=True):
        one_by_one[row] += place  # as a GPU's atomic operations do
    for found in on_both(lambda device: gradient(CopiedRows(row_K, device), places_K.to(device), TOKENS)):
        error = (found.double() - exact).abs().sum()
        assert error <= 1.001 * nearest, "sums are float32's"
        assert error < 0.7 * (one_by_one.double() - exact).abs().sum()
        assert torch.equal(found, gradient(CopiedRows(row_K, CPU), places_K, TOKENS))


SUM, COPY = "_embedding_bag_forward_only", "index_select"


@pytest.mark.parametrize(
    ("nodes", "of_a_cpu", "of_a_gpu"),
    [
        (REPLIES_TO_A_PROMPT, [SUM], [COPY, SUM, "index_copy_"]),
        ([Node(5, 5), Node(0, 5)], [SUM], [COPY]),
        ([Node(0, 9), Node(9, 1, ((0, 9),))], [SUM], [SUM]),
    ],
    ids=["a prompt of many replies", "no row twice", "most rows twice"],
)
def test_few_operations_make_the_gradient_of_every_layer(
    nodes: list[Node], of_a_cpu: list[str], of_a_gpu: list[str]
) -> None:
    row_K, rows = path(nodes), sum(node.length for node in nodes)
    for device, expected in ((CPU, of_a_cpu), (CUDA, of_a_gpu)):
        with pretended_gpu() if device == CUDA else nullcontext():
            copied, places_K = CopiedRows(row_K, device), torch.ones(len(row_K), 2, 3).to(device)
            first = gradient(copied, places_K, rows).to("cpu")  # after which indices are made
            WAITED.clear()
            with Operations() as operations:
                again = copied.gradient(places_K, rows)
            assert not WAITED
            assert operations.names == expected
            assert torch.equal(first, again.to("cpu"))


def test_indices_are_made_in_a_backward_pass_and_once_for_all_layers() -> None:
    copied = CopiedRows(path(REPLIES_TO_A_PROMPT), CPU)
    layers = [torch.ones(TOKENS, 2, requires_grad=True) for _ in range(3)]
    with Operations() as forward:
        results = [copied.of(x) for x in layers]
    with Operations() as backward:
        torch.autograd.grad(torch.cat(results).sum(), layers)
    assert forward.names == 3 * [COPY]
    assert backward.names.count("sort") == 1
    assert backward.names.count(SUM) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_adds_no_place_after_the_other_to_keys(dtype: torch.dtype) -> None:
    """Also where activations are computed again."""
    chance = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, heads, TOKENS, 16, generator=chance).to(dtype).requires_grad_() for heads in (4, 2, 2)]

    class Varlen(ForestAttention):
        """Attends as on a GPU: nodes end to end."""

        def has_varlen(self, query: Tensor) -> bool:
            return True

        @staticmethod
        def varlen(  # type: ignore[override]
            q_QHD: Tensor,
            k_KGD: Tensor,
            v_KGE: Tensor,
            cu_q: Tensor,
            cu_k: Tensor,
            *_: int,
            scaling: float,
            **__: object,
        ) -> Tensor:
            parts = []
            for q, k, v in zip(
                *(x.tensor_split(cu.tolist()[1:-1]) for x, cu in ((q_QHD, cu_q), (k_KGD, cu_k), (v_KGE, cu_k))),
                strict=True,
            ):
                hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
                mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, -torch.inf)[None, None]
                rows = dense(*(x.transpose(0, 1)[None] for x in (q, k, v)), scaling=scaling, mask=mask)
                parts.append(rows[0].transpose(0, 1))
            return torch.cat(parts)

    plan = Varlen(REPLIES_TO_A_PROMPT, device=CPU, dtype=dtype)
    found = []
    for again in (False, True):
        attend = partial(plan.attend, 0, form=ScoreForm(0.3))
        out = checkpoint(attend, *leaves, use_reentrant=False) if again else attend(*leaves)
        with Operations() as operations:
            found.append(torch.autograd.grad(out.float().square().sum(), leaves))
        assert "index_add" not in operations.names
        assert "index_add_" not in operations.names
        assert operations.names.count(SUM) == 2
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("unseen", [0, 1000], ids=["most rows once", "most rows in no place"])
def test_kernels_of_a_gpu_sum_so(dtype: torch.dtype, unseen: int) -> None:
    row_K, device = path(REPLIES_TO_A_PROMPT), torch.device("cuda")
    places_K = torch.randn(len(row_K), 8, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = added(row_K, places_K.double(), TOKENS + unseen)
    found = [gradient(CopiedRows(row_K, device), places_K.to(device), TOKENS + unseen).to("cpu") for _ in range(3)]
    assert all(torch.equal(each, found[0]) for each in found)
    rounded = 1e-6 if dtype == torch.float32 else 2.0**-8
    assert (found[0].double() - exact).norm() <= rounded * exact.norm()
    assert not found[0][TOKENS:].any()
