"""A teacher's predictions: computed once, in pieces that are kept, 386 bytes a token for 64 tokens."""

import math
from pathlib import Path

import pytest
import torch

from rollgrad.adapters.checkpoints.score_files import ScoreFiles
from rollgrad.application.learning import scores as module
from rollgrad.application.learning.teacher import packed_predictions, unpacked_predictions, with_teacher
from rollgrad.domain.batches.examples import pack_demonstrations
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.episodes.examples import Demonstration, WeightedTokens
from rollgrad.domain.ports.models import Predictions, TeacherModel

K = 3
MAPS = Path("/proc/self/maps")


def demonstration(row: int) -> Demonstration:
    """Two branches, of one and two trained tokens or more."""
    branches = []
    for number in range(2):
        length = 3 + number + row % 3
        tokens_T = torch.arange(length) + 10 * row + 5 * number
        branches.append(
            WeightedTokens(token_ids_T=tokens_T, weights_T=(torch.arange(length) >= 2).float(), prompt_length=2)
        )
    return Demonstration(branches=tuple(branches), row=row, weight=0.0 if row == 1 else 2.0)


EXAMPLES = [demonstration(row) for row in range(5)]


class Telling(TeacherModel):
    """A teacher whose predictions name the token that they are of."""

    def __init__(self, fails_after: float = math.inf) -> None:
        self.sequences = 0
        self._fails_after = fails_after

    def predict(self, batch: PackedBatch) -> Predictions:
        if self.sequences >= self._fails_after:
            raise KeyboardInterrupt
        self.sequences += len(batch)
        tokens_A = batch.tokens_N[batch.action_mask_N]
        return Predictions(
            ids_AK=(tokens_A[:, None] * 70000 + torch.arange(K)).int(),
            logprobs_AB=(-(tokens_A[:, None] + torch.arange(K + 1)) / 64).half(),
        )


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 2)


def test_predictions_are_packed_without_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    predictions = Predictions(
        ids_AK=torch.randint(0, 2**31 - 1, (7, 64), generator=generator).int(),
        logprobs_AB=(-20 * torch.rand(7, 65, generator=generator)).half(),
    )
    packed = packed_predictions(predictions)
    assert packed[0].numel() * packed.element_size() == 386
    found = unpacked_predictions(packed)
    assert torch.equal(found.ids_AK, predictions.ids_AK)
    assert torch.equal(found.logprobs_AB, predictions.logprobs_AB)


@pytest.mark.parametrize("budget", [5, 1000])
def test_every_trained_token_has_the_predictions_of_its_place(tmp_path: Path, budget: int) -> None:
    taught = with_teacher(EXAMPLES, Telling, ScoreFiles(tmp_path), key="k", max_tokens=budget)
    again = with_teacher(EXAMPLES, _refuse, ScoreFiles(tmp_path), key="k", max_tokens=budget)
    for source in (taught, again):
        batch = pack_demonstrations([source[index] for index in (4, 2, 0)])
        part = batch.select([3, 0])
        for each in (batch, part):
            ids_NK, logprobs_NK = each.teacher_ids_NK, each.teacher_logprobs_NK
            assert ids_NK is not None
            assert logprobs_NK is not None
            mask_N = each.action_mask_N
            wanted = Telling().predict(each)
            assert torch.equal(ids_NK[mask_N], wanted.ids_AK)
            assert torch.equal(logprobs_NK[mask_N], wanted.logprobs_AB)
            assert not ids_NK[~mask_N].any()
    assert pack_demonstrations(EXAMPLES).teacher_ids_NK is None


def _refuse() -> TeacherModel:
    raise AssertionError("the teacher was loaded")


@pytest.mark.skipif(not MAPS.exists(), reason="no list of what is mapped into memory")
def test_predictions_that_are_kept_do_not_stay_in_memory(tmp_path: Path) -> None:
    """They are 386 bytes a token for 64 tokens, which no memory holds for large data."""
    taught = with_teacher(EXAMPLES, Telling, ScoreFiles(tmp_path), key="k", max_tokens=1000)
    mapped = MAPS.read_text()
    files = list(tmp_path.rglob("*.pt"))
    assert len(files) == 3
    assert all(str(file) in mapped for file in files)
    unkept = with_teacher(EXAMPLES, Telling, ScoreFiles(None), key="k", max_tokens=1000)
    for index in range(len(EXAMPLES)):
        assert torch.equal(unkept[index].teacher_ids_AK, taught[index].teacher_ids_AK)  # type: ignore[arg-type]


def test_an_interrupted_pass_goes_on_where_it_stopped(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        with_teacher(EXAMPLES, lambda: Telling(fails_after=5), ScoreFiles(tmp_path), key="k", max_tokens=1000)
    rest = Telling()
    with_teacher(EXAMPLES, lambda: rest, ScoreFiles(tmp_path), key="k", max_tokens=1000)
    assert rest.sequences == 2, "of the last example"
