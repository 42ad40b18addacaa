"""Chunked log-probs and entropy against a plain log_softmax, values and gradients."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from attrs import define, frozen
from torch import Tensor

from rollgrad.adapters.models.torch.heads import chunked_logprobs as head
from rollgrad.adapters.models.torch.heads.allowed_tokens import AllowedTokens
from rollgrad.adapters.models.torch.heads.chunked_logprobs import token_logprobs
from rollgrad.adapters.models.torch.heads.logits import LogitForm, VocabularyShare
from rollgrad.application.settings.memory_plan_passes import LOGITS_OF_A_SLICE

VOCABULARY, HIDDEN = 37, 16

TIMEOUT = 60.0


@pytest.fixture(params=[1, 3, 1000])
def chunk_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows of a chunk: one, some that divide nothing, all at once."""
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * VOCABULARY * request.param)
    return int(request.param)


def leaves(
    rows: int, *, bias: bool, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).mul(0.5).to(dtype).requires_grad_()
    offset = torch.randn(VOCABULARY, generator=generator).to(dtype).requires_grad_() if bias else None
    return hidden, weight, offset, torch.randint(0, VOCABULARY, (rows,), generator=generator)


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """In float64."""
    logits = torch.nn.functional.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    log_softmax = (logits / temperature).log_softmax(-1)
    return log_softmax.gather(1, targets[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 9])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_values_and_gradients_equal_log_softmax(chunk_rows: int, rows: int, bias: bool, temperature: float) -> None:
    hidden, weight, offset, targets = leaves(rows, bias=bias)
    inputs = [x for x in (hidden, weight, offset) if x is not None]
    pull = torch.randn(2, rows, generator=torch.Generator().manual_seed(1))

    expected = plain(hidden, weight, offset, targets, temperature)
    expected_gradients = torch.autograd.grad((pull.double() * torch.stack(expected)).sum(), inputs)
    found = token_logprobs(hidden, weight, offset, targets, temperature)
    gradients = torch.autograd.grad((pull * torch.stack(found)).sum(), inputs)

    for mine, theirs in zip((*found, *gradients), (*expected, *expected_gradients), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize(
    "form", [LogitForm(scale=0.25), LogitForm(cap=2.0), LogitForm(scale=3.0, cap=5.0)], ids=["scale", "cap", "both"]
)
@pytest.mark.parametrize("bias", [False, True])
def test_scaled_and_capped_logits(chunk_rows: int, form: LogitForm, bias: bool) -> None:
    hidden, weight, offset, targets = leaves(7, bias=bias)
    inputs = [x for x in (hidden, weight, offset) if x is not None]
    pull = torch.randn(2, 7, generator=torch.Generator().manual_seed(1))
    raw = torch.nn.functional.linear(hidden.double(), weight.double(), None if offset is None else offset.double())
    logits = form.scale * raw
    if form.cap is not None:
        logits = form.cap * torch.tanh(logits / form.cap)
    table = (logits / 0.7).log_softmax(-1)
    expected = table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)
    expected_gradients = torch.autograd.grad((pull.double() * torch.stack(expected)).sum(), inputs)
    found = token_logprobs(hidden, weight, offset, targets, 0.7, form=form)
    gradients = torch.autograd.grad((pull * torch.stack(found)).sum(), inputs)
    for mine, theirs in zip((*found, *gradients), (*expected, *expected_gradients), strict=True):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_a_float32_head_rounds_no_logit(bias: bool) -> None:
    hidden, weight, offset, targets = leaves(64, bias=bias, dtype=torch.bfloat16)
    with torch.no_grad():
        hidden.mul_(2.5)  # logits of a standard deviation of 5
    expected = plain(hidden, weight, offset, targets, 1.0)
    rounded = token_logprobs(hidden, weight, offset, targets, 1.0)
    found = token_logprobs(hidden, weight, offset, targets, 1.0, form=LogitForm(float32=True))
    for mine, coarse, theirs in zip(found, rounded, expected, strict=True):
        assert (mine - theirs).abs().max() < 5e-5
        assert (coarse - theirs).abs().max() > 1e-3
    assert torch.autograd.grad(found[0].sum(), [hidden, weight])[0].dtype == torch.bfloat16


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_entropies_of_large_logits_do_not_cancel(chunk_rows: int, scale: float) -> None:
    """They are never negative, and off by no more than a few roundings of the logits."""
    hidden, weight, _, targets = leaves(9, bias=False)
    with torch.no_grad():
        hidden.mul_(scale)
    largest = float((hidden.double() @ weight.double().t()).abs().max().detach())
    slack = 8 * largest * torch.finfo(torch.float32).eps
    expected = plain(hidden, weight, None, targets, 1.0)
    found = token_logprobs(hidden, weight, None, targets, 1.0)
    assert (found[1] >= 0).all()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-5, atol=slack)
    wanted = torch.autograd.grad(expected[1].sum(), [hidden, weight])
    for mine, theirs, factor in zip(
        torch.autograd.grad(found[1].sum(), [hidden, weight]), wanted, (weight, hidden), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=slack * float(factor.detach().abs().max()))


@pytest.mark.parametrize("form", [LogitForm(), LogitForm(scale=3.0, cap=5.0)], ids=["plain", "scaled and capped"])
def test_only_allowed_tokens_have_a_chance(chunk_rows: int, form: LogitForm) -> None:
    hidden, weight, offset, targets = leaves(9, bias=True)
    inputs = [hidden, weight, offset]
    generator = torch.Generator().manual_seed(3)
    some, width = torch.tensor([1, 3, 4, 8]), 32  # bits of fewer tokens than the head has rows
    targets[some] %= width
    allowed = torch.ones(9, VOCABULARY, dtype=torch.bool)
    allowed[some] = torch.rand(len(some), VOCABULARY, generator=generator) < 0.3
    allowed[some, width:] = False
    allowed[some, targets[some]] = True
    allowed[8] = torch.arange(VOCABULARY) == targets[8]  # a token that had to come
    packed = numpy.packbits(allowed[some, :width].numpy(), axis=1, bitorder="little")
    pull = torch.randn(2, 9, generator=generator)

    raw = torch.nn.functional.linear(hidden.double(), weight.double(), offset.double())
    logits = form.scale * raw if form.cap is None else form.cap * torch.tanh(form.scale * raw / form.cap)
    table = (logits / 0.7).masked_fill(~allowed, float("-inf")).log_softmax(-1)
    expected = table.gather(1, targets[:, None])[:, 0], -(table.exp() * table.masked_fill(~allowed, 0)).sum(-1)
    expected_gradients = torch.autograd.grad((pull.double() * torch.stack(expected)).sum(), inputs)

    masks = AllowedTokens(rows_R=some, bits_RB=torch.from_numpy(packed))
    found = token_logprobs(hidden, weight, offset, targets, 0.7, form=form, allowed=masks)
    gradients = torch.autograd.grad((pull * torch.stack(found)).sum(), inputs)
    for mine, theirs in zip((*found, *gradients), (*expected, *expected_gradients), strict=True):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-5, atol=5e-5)
    assert found[0][8] == found[1][8] == 0


@pytest.mark.parametrize("masked", [1, 20, VOCABULARY - 1])
def test_a_masked_vocabulary_has_an_entropy_and_a_gradient(chunk_rows: int, masked: int) -> None:
    """Logits of -inf, as a bias makes them, are those of a smaller vocabulary."""
    hidden, weight, offset, _ = leaves(5, bias=True)
    assert offset is not None
    rest = VOCABULARY - masked
    targets = torch.arange(5) % rest
    with torch.no_grad():
        offset[rest:] = -torch.inf
    wanted = plain(hidden, weight[:rest], offset[:rest], targets, 0.7)
    found = token_logprobs(hidden, weight, offset, targets, 0.7)
    wanted_gradients = torch.autograd.grad(torch.stack(wanted).sum(), [hidden, weight, offset])
    gradients = torch.autograd.grad(torch.stack(found).sum(), [hidden, weight, offset])
    for mine, theirs in zip((*found, *gradients), (*wanted, *wanted_gradients), strict=True):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("used", [0, 1])
def test_either_result_alone_may_be_differentiated(used: int) -> None:
    hidden, weight, _, targets = leaves(5, bias=False)
    expected = torch.autograd.grad(plain(hidden, weight, None, targets, 0.7)[used].sum(), [hidden, weight])
    found = torch.autograd.grad(token_logprobs(hidden, weight, None, targets, 0.7)[used].sum(), [hidden, weight])
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_frozen_output_layer_gets_no_gradient() -> None:
    hidden, weight, _, targets = leaves(4, bias=False)
    weight = weight.detach()
    token_logprobs(hidden, weight, None, targets, 1.0)[0].sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


def test_bfloat16_gradients_are_within_its_rounding(chunk_rows: int) -> None:
    hidden, weight, offset, targets = leaves(9, bias=True, dtype=torch.bfloat16)
    assert offset is not None
    inputs = [hidden, weight, offset]
    expected = torch.autograd.grad(plain(hidden, weight, offset, targets, 1.0)[0].sum(), inputs)
    logprobs, _ = token_logprobs(hidden, weight, offset, targets, 1.0)
    assert logprobs.dtype == torch.float32
    for mine, theirs in zip(torch.autograd.grad(logprobs.sum(), inputs), expected, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.float() - theirs.float()).norm() <= 0.01 * theirs.float().norm()  # 2.5 steps of 2^-8


def test_large_logits_stay_finite() -> None:
    hidden = torch.full((2, HIDDEN), 1e3, requires_grad=True)
    weight = torch.eye(VOCABULARY, HIDDEN).mul(10).requires_grad_()
    logprobs, entropy = token_logprobs(hidden, weight, None, torch.tensor([0, VOCABULARY - 1]), 1.0)
    (logprobs + entropy).sum().backward()
    for tensor in (logprobs, entropy, hidden.grad, weight.grad):
        assert tensor is not None
        assert tensor.isfinite().all()
    assert float(logprobs[1].detach()) == pytest.approx(-1e4, rel=1e-3)


@define(kw_only=True)
class Table:
    """Exchange of threads that stand for the processes of a group."""

    barrier: threading.Barrier
    tensors: dict[int, Tensor]


@frozen(kw_only=True, eq=False)
class ThreadShare(VocabularyShare):
    """The process group of thread number `rank`."""

    rank: int
    table: Table

    def gathered(self, columns_KA: Tensor) -> Tensor:
        self.table.tensors[self.rank] = columns_KA
        self.table.barrier.wait(TIMEOUT)
        together = torch.stack([tensor for _, tensor in sorted(self.table.tensors.items())])
        self.table.barrier.wait(TIMEOUT)
        return together

    def sum(self, tensor: Tensor) -> None:
        tensor.copy_(self.gathered(tensor.clone()).sum(0))


@pytest.mark.parametrize("bias", [False, True])
def test_the_most_likely_tokens_are_found_on_the_way(chunk_rows: int, bias: bool) -> None:
    hidden, weight, offset, targets = leaves(9, bias=bias)
    best = torch.nn.functional.linear(hidden, weight, offset).argmax(-1)
    targets = torch.where(torch.arange(9) % 2 == 0, best, targets)
    plainly = token_logprobs(hidden, weight, offset, targets, 0.7)
    *found, correct, _ = token_logprobs(hidden, weight, offset, targets, 0.7, correct=True)
    assert correct.tolist() == (targets == best).float().tolist()
    assert not correct.requires_grad
    for one, other in zip(
        torch.autograd.grad(torch.stack(plainly).sum(), [hidden, weight]),
        torch.autograd.grad(torch.stack(found).sum(), [hidden, weight]),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bias", [False, True])
def test_the_mean_over_the_vocabulary(chunk_rows: int, bias: bool) -> None:
    """Alone, and beside the other results in one loss."""
    hidden, weight, offset, targets = leaves(9, bias=bias)
    pulls = torch.randn(3, 9, generator=torch.Generator().manual_seed(1))
    inputs = [x for x in (hidden, weight, offset) if x is not None]
    log_softmax = (torch.nn.functional.linear(hidden, weight, offset) / 0.7).log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    wanted = [log_softmax.gather(1, targets[:, None])[:, 0], entropy, log_softmax.mean(-1)]
    logprobs, entropy, _, mean = token_logprobs(hidden, weight, offset, targets, 0.7, correct=True)
    torch.testing.assert_close(mean, wanted[2])
    for pull in (pulls, pulls * torch.tensor([[0.0], [0.0], [1.0]])):
        for one, other in zip(
            torch.autograd.grad((pull * torch.stack([logprobs, entropy, mean])).sum(), inputs, retain_graph=True),
            torch.autograd.grad((pull * torch.stack(wanted)).sum(), inputs, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    (alone,) = torch.autograd.grad(mean.sum(), [hidden])
    (expected,) = torch.autograd.grad(wanted[2].sum(), [hidden])
    torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_the_collision_entropy(chunk_rows: int, bias: bool) -> None:
    """Beside the other results, which it does not change, and without a gradient."""
    hidden, weight, offset, targets = leaves(9, bias=bias)
    softmax = (torch.nn.functional.linear(hidden, weight, offset).double() / 0.7).softmax(-1)
    *found, collision = token_logprobs(hidden, weight, offset, targets, 0.7, correct=True, collision=True)
    torch.testing.assert_close(collision.double(), -softmax.square().sum(-1).log(), rtol=1e-5, atol=1e-6)
    assert not collision.requires_grad
    plainly = token_logprobs(hidden, weight, offset, targets, 0.7, correct=True)
    assert all(map(torch.equal, found, plainly))
    for one, other in zip(
        torch.autograd.grad(found[0].sum(), [hidden, weight]),
        torch.autograd.grad(plainly[0].sum(), [hidden, weight]),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_what_nobody_asks_for_is_left_out(chunk_rows: int) -> None:
    """The other results are the same without the mean over the vocabulary, of which some tokens are masked out."""
    hidden, weight, offset, targets = leaves(9, bias=True)
    assert offset is not None
    offset.data[:3] = -torch.inf
    arguments = (hidden, weight, offset, targets.clamp(min=3), 0.7)
    logprobs, entropy, correct, _, collision = token_logprobs(*arguments, correct=True, collision=True)
    for more in (True, False):
        found = token_logprobs(*arguments, correct=True, mean=False, collision=more)
        assert len(found) == 3 + more
        assert all(map(torch.equal, found, (logprobs, entropy, correct, collision)))
        assert torch.equal(
            *(torch.autograd.grad(each.sum(), weight, retain_graph=True)[0] for each in (found[0], logprobs))
        )
    log_softmax = (torch.nn.functional.linear(hidden, weight, offset) / 0.7).log_softmax(-1)
    torch.testing.assert_close(logprobs, log_softmax.gather(1, targets.clamp(min=3)[:, None])[:, 0])


def further(rows: int, count: int = 5) -> Tensor:
    """Ids of other tokens, the target among them, some twice, as fillers are."""
    return torch.randint(0, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("form", [LogitForm(), LogitForm(scale=3.0, cap=5.0)], ids=["plain", "capped"])
@pytest.mark.parametrize("used", [(0, 1, 2), (2,), (1, 2)], ids=str)
def test_further_tokens_have_log_probs_and_gradients(chunk_rows: int, form: LogitForm, used: tuple[int, ...]) -> None:
    hidden, weight, offset, targets = leaves(7, bias=True)
    also, inputs = further(7), [x for x in (hidden, weight, offset) if x is not None]
    raw = torch.nn.functional.linear(*(x.double() for x in inputs))
    logits = form.scale * raw
    if form.cap is not None:
        logits = form.cap * torch.tanh(logits / form.cap)
    table = (logits / 0.7).log_softmax(-1)
    entropy = -(table.exp() * table).sum(-1)
    expected = table.gather(1, targets[:, None])[:, 0], entropy, table.gather(1, also)
    alone = token_logprobs(hidden, weight, offset, targets, 0.7, form=form, also_AK=also)
    beside = token_logprobs(hidden, weight, offset, targets, 0.7, form=form, also_AK=also, correct=True, collision=True)
    generator = torch.Generator().manual_seed(1)
    pulls = [torch.randn(each.shape, generator=generator) for each in expected]

    def gradients(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(torch.stack([(pulls[i] * results[i]).sum() for i in used]).sum(), inputs)

    wanted = *expected, *gradients(expected)
    for found in (alone, (*beside[:2], beside[-1])):
        for mine, theirs in zip((*found, *gradients(found)), wanted, strict=True):
            assert mine.dtype == torch.float32
            torch.testing.assert_close(mine, theirs.float(), rtol=1e-5, atol=5e-5)


def test_further_tokens_change_no_other_result(chunk_rows: int) -> None:
    hidden, weight, offset, targets = leaves(9, bias=True)
    arguments = (hidden, weight, offset, targets, 0.7)
    plainly = token_logprobs(*arguments, correct=True, collision=True)
    *found, also = token_logprobs(*arguments, correct=True, collision=True, also_AK=further(9))
    assert also.shape == (9, 5)
    assert all(map(torch.equal, found, plainly))
    for one, other in zip(
        torch.autograd.grad(torch.stack([*found[:2], found[3]]).sum(), [hidden, weight]),
        torch.autograd.grad(torch.stack([*plainly[:2], plainly[3]]).sum(), [hidden, weight]),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def allowing(rows: list[int], *tokens_AJ: Tensor) -> AllowedTokens:
    """Masks of these rows with some tokens of the vocabulary, those given among them."""
    generator = torch.Generator().manual_seed(4)
    allowed = torch.rand(len(rows), VOCABULARY, generator=generator) < 0.3
    for tokens in tokens_AJ:
        allowed.scatter_(1, tokens[rows], True)
    packed = numpy.packbits(allowed.numpy(), axis=1, bitorder="little")
    return AllowedTokens(rows_R=torch.tensor(rows), bits_RB=torch.from_numpy(packed))


@pytest.mark.parametrize(("masked", "restricted"), [(0, False), (19, False), (0, True)])
@pytest.mark.parametrize("bounds", [(0, 19, 37), (0, 1, 30, 37)])
def test_shares_of_the_vocabulary_give_what_the_whole_gives(
    chunk_rows: int, bounds: tuple[int, ...], masked: int, restricted: bool
) -> None:
    """Also where all rows of a share are masked out of the vocabulary, or a grammar allows some tokens alone."""
    hidden, weight, offset, targets = leaves(9, bias=True)
    assert offset is not None
    offset.data[:masked] = -torch.inf
    targets = targets.clamp(min=masked)
    pull = torch.randn(3, 9, generator=torch.Generator().manual_seed(1))
    targets[::2] = torch.nn.functional.linear(hidden, weight, offset).argmax(-1)[::2]
    compared = (
        slice(2) if masked or restricted else slice(None)
    )  # no mean over a vocabulary of which a part is masked out
    pull = pull[compared]
    also = further(9).clamp(min=masked)
    wanted: dict[str, Any] = {"correct": True, "collision": True, "also_AK": also}
    wanted["allowed"] = allowing([0, 4, 7], targets[:, None], also) if restricted else None
    logprobs, entropy, correct, mean, collision, others = token_logprobs(hidden, weight, offset, targets, 0.7, **wanted)
    expected = [logprobs, entropy, mean][compared]
    assert correct[::2].tolist() == [1.0] * 5
    pulled = (pull * torch.stack(expected)).sum() + (others * others.detach()).sum()
    expected_gradients = torch.autograd.grad(pulled, [hidden, weight, offset])
    count = len(bounds) - 1
    table = Table(barrier=threading.Barrier(count), tensors={})

    def computed(rank: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        rows = slice(bounds[rank], bounds[rank + 1])
        inputs = [
            x.detach()[part].clone().requires_grad_()
            for x, part in zip((hidden, weight, offset), (slice(None), rows, rows), strict=True)
        ]
        share = ThreadShare(first=bounds[rank], rank=rank, table=table)
        logprobs, entropy, shared, mean, squares, mine = token_logprobs(*inputs, targets, 0.7, share, **wanted)
        assert torch.equal(shared, correct)
        torch.testing.assert_close(mine, others, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(squares, collision, rtol=1e-5, atol=1e-5)
        found = [logprobs, entropy, mean][compared]
        pulled = (pull * torch.stack(found)).sum() + (mine * mine.detach()).sum()
        return found, torch.autograd.grad(pulled, inputs)

    with ThreadPoolExecutor(count) as threads:
        results = list(threads.map(computed, range(count)))
    for found, gradients in results:
        for mine, whole in zip((*found, gradients[0]), (*expected, expected_gradients[0]), strict=True):
            torch.testing.assert_close(mine, whole, rtol=3e-5, atol=3e-5)
    for index in (1, 2):
        together = torch.cat([gradients[index] for _, gradients in results])
        torch.testing.assert_close(together, expected_gradients[index], rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("form", [LogitForm(), LogitForm(cap=3.0)], ids=["plain", "capped"])
def test_a_slice_of_logits_is_held_three_times_at_once(form: LogitForm) -> None:
    """The memory plan counts as many."""
    from benchmarks.memory_plan import peak

    rows, vocabulary = 64, 4096
    hidden = torch.randn(rows, HIDDEN, requires_grad=True)
    weight = torch.randn(vocabulary, HIDDEN)
    targets = torch.randint(0, vocabulary, (rows,))

    def work() -> None:
        logprobs, entropy = token_logprobs(hidden, weight, None, targets, 1.0, form=form)
        (logprobs + entropy).sum().backward()

    work()
    assert peak(work) < (LOGITS_OF_A_SLICE + 0.1) * 4 * rows * vocabulary


def test_processes_count_the_rows_of_all_once() -> None:
    table = Table(barrier=threading.Barrier(2), tensors={})

    def asked(rank: int) -> list[int]:
        share = ThreadShare(first=20 * rank, group="two", rank=rank, table=table)
        weight = torch.empty(20 - 3 * rank, HIDDEN)
        first = share.size(weight)
        table.tensors.clear()
        return [first, share.size(weight), len(table.tensors)]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(asked, range(2))) == [[37, 37, 0]] * 2
