"""Functions that torch's compiler fuses compute what they compute without it."""

import re
from collections.abc import Iterator
from itertools import chain

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from rollgrad.adapters.models.torch.heads import chunked_logprobs as head
from rollgrad.adapters.models.torch.heads.chunked_logprobs import token_logprobs
from rollgrad.adapters.models.torch.heads.logits import LogitForm
from rollgrad.adapters.models.torch.kernels import fusing
from rollgrad.adapters.models.torch.kernels.fusing import is_fused
from tests.compiled_layers import fusing_on_a_cpu, graphs

VOCABULARY, HIDDEN = 37, 16


@pytest.fixture
def _fusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * VOCABULARY * 4)
    with fusing_on_a_cpu():
        yield


def computed(rows: int, dtype: torch.dtype, form: LogitForm, *, correct: bool, used: tuple[int, ...]) -> list[Tensor]:
    """Log-probs, entropy and more of random hidden states, and the gradients of those that are `used`."""
    g = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, HIDDEN, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=g).to(dtype).requires_grad_()
    bias = torch.randn(VOCABULARY, generator=g).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (rows,), generator=g)
    found = token_logprobs(hidden, weight, bias, targets, 0.7, form=form, correct=correct, collision=correct)
    loss = sum((found[place] * torch.randn(rows, generator=g)).sum() for place in used)
    assert isinstance(loss, Tensor)
    return [*found, *torch.autograd.grad(loss, [hidden, weight, bias])]


CASES = {
    "float32": (torch.float32, LogitForm(), False, (0, 1)),
    "bfloat16": (torch.bfloat16, LogitForm(), False, (0, 1)),
    "log-probs alone": (torch.bfloat16, LogitForm(float32=True), False, (0,)),
    "all results": (torch.bfloat16, LogitForm(scale=0.5), True, (0, 1, 3)),
    "a cap": (torch.float32, LogitForm(cap=3.0), False, (0, 1)),
}
WHOLE = "all results"
"""The one among them that shows what the others do, but for a cap, which the test after it has."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == WHOLE else pytest.mark.wide) for case in CASES]
)
def test_the_head_computes_the_same_fused(case: str, request: pytest.FixtureRequest) -> None:
    dtype, form, correct, used = CASES[case]
    rows = (9, 10, 11, 14)
    expected = [computed(count, dtype, form, correct=correct, used=used) for count in rows]
    request.getfixturevalue("_fusing")
    with capture_logs() as logs:
        found = [computed(count, dtype, form, correct=correct, used=used) for count in rows]
    assert not [log for log in logs if log["log_level"] != "info"], "but for the time that it takes"
    assert graphs() > 0
    for mine, theirs in zip(chain(*found), chain(*expected), strict=True):
        assert mine.dtype == theirs.dtype
        slack = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(mine, theirs, rtol=slack, atol=slack)


@pytest.mark.parametrize(
    "form",
    [pytest.param(LogitForm(), id="plain", marks=pytest.mark.wide), pytest.param(LogitForm(cap=3.0), id="capped")],
)
def test_further_tokens_are_the_same_fused(form: LogitForm, request: pytest.FixtureRequest) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(rows, HIDDEN, generator=generator).requires_grad_() for rows in (9, VOCABULARY))
    also = torch.randint(0, VOCABULARY, (9, 6), generator=generator)

    def found() -> tuple[Tensor, ...]:
        logprobs, entropy, others = token_logprobs(hidden, weight, None, also[:, 0], 0.7, form=form, also_AK=also)
        pulled = (logprobs + 2 * entropy).sum() + (others * others.detach()).sum()
        return logprobs, entropy, others, *torch.autograd.grad(pulled, [hidden, weight])

    expected = found()
    request.getfixturevalue("_fusing")
    with capture_logs() as logs:
        fused = found()
    assert not [log for log in logs if log["log_level"] != "info"], "but for the time that it takes"
    assert graphs() > 0
    for mine, theirs in zip(fused, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_fusing")
def test_other_numbers_of_rows_and_temperatures_need_no_other_graphs() -> None:
    """All chunks but the last are alike, and the last has any number of rows."""
    computed(6, torch.bfloat16, LogitForm(), correct=False, used=(0, 1))
    before = graphs()
    for rows in (7, 8, 11, 15):
        computed(rows, torch.bfloat16, LogitForm(), correct=False, used=(0, 1))
    assert graphs() == before


def test_what_cannot_be_compiled_is_computed_without_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Tensor) -> Tensor:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    monkeypatch.setattr(fusing, "is_fused", lambda device: True)
    monkeypatch.setattr(fusing, "compiled", lambda function: fails)
    doubled = fusing._Fused(lambda x: x.mul_(2))
    with capture_logs() as logs:
        for _ in range(2):
            assert doubled(torch.ones(2)).tolist() == [2, 2]
    assert [log["event"] for log in logs] == [
        "torch.compile fails on this machine (Failed to find C compiler): updates take longer."
    ]


def test_memory_that_runs_out_is_no_failure_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(fusing, "is_fused", lambda device: True)
    monkeypatch.setattr(fusing, "compiled", lambda function: full)
    with pytest.raises(torch.OutOfMemoryError):
        fusing._Fused(torch.neg)(torch.ones(2))


def test_the_time_that_compiling_takes_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("rollgrad.adapters.models.torch.kernels.fusing.time.monotonic", lambda: now[0])
    told = fusing._CompileTime()
    told.causes |= {"actor.compile": None, "output head": None}
    with capture_logs() as logs:
        for seconds in (3.0, 4.0, 1.0, 60.0):
            told.begin(None)
            now[0] += seconds
            told.end(None)
    assert [each["event"] for each in logs] == [
        "torch.compile has taken 7 s so far (actor.compile, output head)",
        "torch.compile has taken 68 s so far (actor.compile, output head)",
    ]


@pytest.mark.usefixtures("_fusing")
def test_the_time_that_fusing_takes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "AFTER_SECONDS", 0.0)
    fusing._time.cache_clear()  # torch has forgotten whom to tell, when it began anew
    with capture_logs() as logs:
        computed(6, torch.float32, LogitForm(), correct=False, used=(0,))
    assert logs
    assert all(re.fullmatch(r"torch.compile has taken \d+ s so far \(output head\)", log["event"]) for log in logs)


def test_functions_are_fused_on_gpus_that_need_not_be_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert not is_fused(torch.device("cpu"))
    assert is_fused(cuda)
    monkeypatch.setattr(fusing, "are_deterministic", lambda: True)
    assert not is_fused(cuda)
