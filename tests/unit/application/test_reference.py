"""The reference's log-probs of preference pairs: computed once, in pieces that are kept, and what the policy begins
with."""

import math
from pathlib import Path

import pytest
import torch
from attrs import evolve

from rollgrad.adapters.checkpoints.score_files import ScoreFiles
from rollgrad.application.learning import scores as module
from rollgrad.application.learning.examples import ExampleLearner, together
from rollgrad.application.learning.reference import check_start, with_reference
from rollgrad.domain.algorithms.losses.preference import PreferenceObjective
from rollgrad.domain.batches.examples import pack_preferences
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.models import ReferenceModel, TokenScores
from rollgrad.testing.models import VOCABULARY, FakePolicy, FakeReference
from tests.unit.application.test_epochs import EXAMPLES, PAIRS

LOGITS_V = torch.linspace(-1, 1, VOCABULARY)


class Counting(ReferenceModel):
    """A reference that counts the pairs that it scores, and fails after so many."""

    def __init__(self, fails_after: float = math.inf) -> None:
        self._inner = FakeReference(LOGITS_V)
        self._fails_after = fails_after
        self.pairs = 0

    def score(self, batch: PackedBatch) -> TokenScores:
        if self.pairs >= self._fails_after:
            raise KeyboardInterrupt
        self.pairs += len(batch) // 2
        return self._inner.score(batch)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 2)


def expected() -> list[float]:
    table_V = LOGITS_V.log_softmax(0)
    tokens = [[row + 10, 2, row + 50, 2] for row in range(PAIRS)]
    return [float(table_V[token]) for pair in tokens for token in pair]


def test_scores_are_the_references_whatever_the_budget(tmp_path: Path) -> None:
    for budget in (6, 1000):
        store = ScoreFiles(tmp_path / str(budget))
        found = with_reference(EXAMPLES, Counting, store, key="k", max_tokens=budget)
        scores = [pair.ref_logprobs_A for pair in (found[index] for index in range(len(found)))]
        assert torch.cat([score for score in scores if score is not None]).tolist() == pytest.approx(expected())
        batch = pack_preferences([found[3], found[0]])
        assert batch.ref_logprobs_N is not None
        torch.testing.assert_close(batch.ref_logprobs_N, FakeReference(LOGITS_V).score(batch).logprobs_N)


def test_kept_scores_load_no_reference(tmp_path: Path) -> None:
    store = ScoreFiles(tmp_path)
    first = with_reference(EXAMPLES, Counting, store, key="k", max_tokens=100)

    def refuse() -> ReferenceModel:
        raise AssertionError("the reference was loaded")

    second = with_reference(EXAMPLES, refuse, ScoreFiles(tmp_path), key="k", max_tokens=100)
    for index in range(PAIRS):
        left, right = first[index].ref_logprobs_A, second[index].ref_logprobs_A
        assert left is not None
        assert right is not None
        assert torch.equal(left, right)
    with pytest.raises(AssertionError):
        with_reference(EXAMPLES, refuse, ScoreFiles(tmp_path), key="another", max_tokens=100)


def test_an_interrupted_pass_goes_on_where_it_stopped(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        with_reference(EXAMPLES, lambda: Counting(fails_after=3), ScoreFiles(tmp_path), key="k", max_tokens=100)
    reference = Counting()
    found = with_reference(EXAMPLES, lambda: reference, ScoreFiles(tmp_path), key="k", max_tokens=100)
    assert reference.pairs == PAIRS - 4
    scores = [found[index].ref_logprobs_A for index in range(PAIRS)]
    assert torch.cat([score for score in scores if score is not None]).tolist() == pytest.approx(expected())


@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_broken_files_are_computed_again(tmp_path: Path, harm: str) -> None:
    with_reference(EXAMPLES, Counting, ScoreFiles(tmp_path), key="k", max_tokens=100)
    second = sorted((tmp_path / "k").glob("*.pt"))[1]
    if harm == "cut":
        second.write_bytes(second.read_bytes()[:50])
    else:
        second.unlink()
    reference = Counting()
    found = with_reference(EXAMPLES, lambda: reference, ScoreFiles(tmp_path), key="k", max_tokens=100)
    assert reference.pairs == PAIRS - 2
    scores = [found[index].ref_logprobs_A for index in range(PAIRS)]
    assert torch.cat([score for score in scores if score is not None]).tolist() == pytest.approx(expected())


def test_a_directory_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for store in (ScoreFiles(None), ScoreFiles(tmp_path / "file")):
        assert len(with_reference(EXAMPLES, Counting, store, key="k", max_tokens=100)) == PAIRS


def test_a_policy_that_is_its_reference_begins_at_log_2() -> None:
    pairs = with_reference(EXAMPLES, Counting, ScoreFiles(None), key="k", max_tokens=100)
    policy = FakePolicy(LOGITS_V)
    check_start(policy, pairs, max_tokens=100, tolerance=1e-3)
    learner = ExampleLearner(policy, pack=pack_preferences, objective=PreferenceObjective(), max_tokens=6)
    parts = learner.parts([pairs[index] for index in range(PAIRS)])
    measured = together([m for part in parts for m in learner.measure_alike([part])])
    assert measured["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert measured["reward_margin"] == pytest.approx(0, abs=1e-6)


def test_a_policy_that_is_not_its_reference_is_refused() -> None:
    pairs = with_reference(EXAMPLES, Counting, ScoreFiles(None), key="k", max_tokens=100)
    for logits_V in (torch.zeros(VOCABULARY), torch.full((VOCABULARY,), float("nan"))):
        with pytest.raises(ConfigurationError, match=r"log 2.*template.*dtype.*dropout"):
            check_start(FakePolicy(logits_V), pairs, max_tokens=100, tolerance=1e-3)


def test_weights_of_rows_do_not_matter_to_a_reference() -> None:
    weightless = [evolve(pair, weight=0.0) for pair in EXAMPLES]
    assert len(with_reference(weightless, Counting, ScoreFiles(None), key="k", max_tokens=100)) == PAIRS
