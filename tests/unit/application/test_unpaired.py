"""KTO's distance from the reference: of the whole step, in its order, from log-probs that are computed once."""

import math
from pathlib import Path

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.adapters.checkpoints.score_files import ScoreFiles
from rollgrad.application.learning import unpaired as module
from rollgrad.application.learning.examples import together
from rollgrad.application.learning.reference import LiveReference, with_reference
from rollgrad.application.learning.unpaired import PlacedLabels, UnpairedLearner, mismatched_references
from rollgrad.application.pipelines.epochs import coming_steps, next_examples
from rollgrad.domain.algorithms.losses.unpaired import UnpairedObjective
from rollgrad.domain.batches.examples import mismatched, mismatches
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.episodes.examples import Label, WeightedTokens
from rollgrad.domain.episodes.images import Image, PlacedImage
from rollgrad.domain.episodes.prompts import PromptCursor
from rollgrad.domain.errors import DataError
from rollgrad.domain.ports.models import PolicyModel, ReferenceModel, TokenScores
from rollgrad.entrypoints.composition.offline.kto import make_labels
from rollgrad.testing.models import FakeReference

VOCABULARY = 100


class Bigrams(FakeReference):
    """A model whose log-prob of a token depends on the one before it, so that a completion behind another prompt has
    another one."""

    def __init__(self, seed: int, fails_after: float = math.inf) -> None:
        self.table_VV = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)).double()
        self._fails_after = fails_after
        self.replies = 0

    def of(self, tokens_T: Tensor) -> Tensor:
        """The log-prob of each token but the first."""
        rows = self.table_VV.log_softmax(1)
        return rows[tokens_T[:-1], tokens_T[1:]]

    def score(self, batch: PackedBatch) -> TokenScores:
        if self.replies >= self._fails_after:
            raise KeyboardInterrupt
        self.replies += len(batch)
        parts = [torch.cat([torch.zeros(1), self.of(part)]) for part in batch.tokens_N.split(batch.lengths_S.tolist())]
        logprobs_N = torch.where(batch.action_mask_N, torch.cat(parts), 0.0).float()
        return TokenScores(logprobs_N=logprobs_N, entropy_N=torch.zeros(batch.token_count))


class Frozen(Bigrams, PolicyModel):
    """The model as a policy, which is only measured here."""


def label(place: int, prompt: int, completion: int) -> Label:
    """A prompt and a completion of so many tokens, which are its own."""
    tokens_T = (torch.arange(prompt + completion) * 7 + place * 11) % VOCABULARY
    weights_T = (torch.arange(prompt + completion) >= prompt).float()
    reply = WeightedTokens(token_ids_T=tokens_T, weights_T=weights_T, prompt_length=prompt)
    return Label(reply=reply, desirable=place % 3 != 0, row=place, place=place)


LABELS = PlacedLabels([label(place, 1 + place % 3, 1 + place % 4) for place in range(9)])
ORDER = [3, 0, 7, 5, 1]


def distance(policy: Bigrams, reference: Bigrams, order: list[int]) -> float:
    """KTO's z, from the paper: prompt i with completion i - 1, by hand."""
    total = 0.0
    for position, index in enumerate(order):
        asked, answered = LABELS[index].reply, LABELS[order[position - 1]].reply
        prompt = asked.token_ids_T[: asked.prompt_length]
        completion = answered.token_ids_T[answered.prompt_length :]
        whole_T = torch.cat([prompt, completion])
        ratio_T = policy.of(whole_T) - reference.of(whole_T)
        total += float(ratio_T[len(prompt) - 1 :].sum())
    return max(0.0, total / len(order))


def learner(policy: Frozen, reference: Bigrams, max_tokens: int, shares: int = 1) -> UnpairedLearner:
    references = mismatched_references(
        LABELS, [ORDER], lambda: reference, ScoreFiles(None), key="k", max_tokens=max_tokens, shares=shares
    )
    return UnpairedLearner(
        policy,
        objective=UnpairedObjective(beta=0.3),
        references=references,
        max_tokens=max_tokens,
        shares=shares,
    )


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), max_tokens=st.integers(6, 60), shares=st.integers(1, 3))
def test_the_distance_is_that_of_the_step_however_it_is_divided(seed: int, max_tokens: int, shares: int) -> None:
    policy, reference = Frozen(seed), Bigrams(seed + 1)
    examples = [LABELS[index] for index in ORDER]
    found = learner(policy, reference, max_tokens, shares).objective_for(examples).kl
    assert found == pytest.approx(distance(policy, reference, ORDER), abs=1e-4)


def test_every_loss_and_metric_is_that_of_the_whole_step() -> None:
    policy, reference = Frozen(1), Bigrams(2)
    made = with_reference(LABELS, lambda: reference, ScoreFiles(None), key="k", max_tokens=100)
    examples = [made[index] for index in ORDER]
    found = []
    for budget in (6, 100):
        its = learner(policy, reference, budget)
        objective = its.objective_for(examples)
        found.append(together([m for part in its.parts(examples) for m in its.measure_alike([part], objective)]))
    assert len(its.parts(examples)) == 1
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    z = found[0]["kl"]
    assert z > 0
    assert z == pytest.approx(distance(policy, reference, ORDER), abs=1e-4)
    wanted = 0.0
    for example in examples:
        reply = example.reply
        ratio = float((policy.of(reply.token_ids_T) - reference.of(reply.token_ids_T))[reply.prompt_length - 1 :].sum())
        wanted += 1 / (1 + math.exp((0.3 if example.desirable else -0.3) * (ratio - z)))
    assert found[0]["loss"] == pytest.approx(wanted / len(examples), abs=1e-5)


def test_a_callers_own_labels_need_no_places() -> None:
    own = make_labels([evolve(LABELS[place], place=0) for place in range(len(LABELS))])
    policy, reference = Frozen(1), Bigrams(2)
    references = mismatched_references(own, [ORDER], lambda: reference, ScoreFiles(None), key="k", max_tokens=100)
    its = UnpairedLearner(policy, objective=UnpairedObjective(), references=references, max_tokens=100)
    found = its.objective_for([own[index] for index in ORDER]).kl
    assert found == pytest.approx(distance(policy, reference, ORDER), abs=1e-4)


def test_a_live_reference_says_what_was_kept_of_it() -> None:
    policy, reference = Frozen(1), Bigrams(2)
    live = LiveReference(model=lambda: reference, max_tokens=20)
    kept = with_reference(LABELS, lambda: reference, ScoreFiles(None), key="k", max_tokens=100)
    for known in (0, 2):  # held-out labels come with their log-probs
        asked = [kept[index] if place < known else LABELS[index] for place, index in enumerate(ORDER)]
        for example, index in zip(live.of(asked), ORDER, strict=True):
            assert example.ref_logprobs_A is not None
            torch.testing.assert_close(example.ref_logprobs_A, kept[index].ref_logprobs_A)
    its = UnpairedLearner(policy, objective=UnpairedObjective(), references=live, max_tokens=100)
    assert its.objective_for([LABELS[index] for index in ORDER]).kl == pytest.approx(
        distance(policy, reference, ORDER), abs=1e-4
    )
    with pytest.raises(DataError, match="one alone can be used"):
        its.objective_for([LABELS[0]])


def test_completions_follow_the_prompt_after_theirs() -> None:
    """The order is rotated, not reversed, which would leave the middle one of an odd step behind its own prompt."""
    places = [(3, 1), (0, 3), (7, 0), (5, 7), (1, 5)]
    replies = mismatched([LABELS[index] for index in ORDER])
    for (prompt, completion), reply in zip(places, replies, strict=True):
        own, other = LABELS[prompt].reply, LABELS[completion].reply
        assert reply.token_ids_T.tolist() == [
            *own.token_ids_T[: own.prompt_length].tolist(),
            *other.token_ids_T[other.prompt_length :].tolist(),
        ]
        assert int(reply.weights_T.sum()) == other.trained_length
    cut = mismatched([LABELS[place] for place in range(len(LABELS))], longest=4)
    assert {len(reply) for reply in cut} <= {2, 3, 4}
    assert all(reply.trained_length for reply in cut)


@given(prompts=st.lists(st.integers(0, 5), min_size=2, max_size=12))
def test_as_few_completions_as_can_be_follow_their_own_prompt(prompts: list[int]) -> None:
    taken = mismatches(prompts)
    assert sorted(taken) == list(range(len(prompts))), "each completion is used once"
    assert all(place != other for place, other in enumerate(taken)), "none follows the prompt that it was sampled for"
    largest = max(map(prompts.count, prompts))
    own = sum(prompts[place] == prompts[other] for place, other in enumerate(taken))
    assert own == max(0, 2 * largest - len(prompts))
    if all(prompt != before for prompt, before in zip(prompts, [*prompts[-1:], *prompts[:-1]], strict=True)):
        assert taken == [len(prompts) - 1, *range(len(prompts) - 1)], "TRL's order"


def test_replies_to_one_prompt_take_completions_to_others() -> None:
    """Both replies of a pair are neighbours in the step; the reference's log-probs are found by the same places."""
    policy, reference = Frozen(1), Bigrams(2)
    sibling = evolve(LABELS[4].reply, token_ids_T=torch.cat([LABELS[4].reply.token_ids_T[:2], torch.tensor([9])]))
    labels = PlacedLabels([*(LABELS[place] for place in range(5)), evolve(LABELS[4], reply=sibling)])
    order = [0, 4, 5, 2]
    store = ScoreFiles(None)
    references = mismatched_references(labels, [order], lambda: reference, store, key="k", max_tokens=100)
    assert set(references) == {(0, 5), (4, 2), (5, 0), (2, 4)}
    its = UnpairedLearner(policy, objective=UnpairedObjective(), references=references, max_tokens=100)
    total = 0.0
    for asked, answered in references:
        own, other = labels[asked].reply, labels[answered].reply
        whole_T = torch.cat([own.token_ids_T[: own.prompt_length], other.token_ids_T[other.prompt_length :]])
        total += float((policy.of(whole_T) - reference.of(whole_T))[own.prompt_length - 1 :].sum())
    assert its.objective_for([labels[place] for place in order]).kl == pytest.approx(max(0.0, total / 4), abs=1e-4)


def test_images_go_with_the_tokens_that_stand_for_them() -> None:
    """Those within the completion, too, and none of which some tokens are cut off."""
    pictures = [Image(digest=name, data=b"", tensors={}) for name in "abc"]

    def seeing(place: int, *places: tuple[int, int]) -> Label:
        placed = tuple(
            PlacedImage(image=image, start=start, stop=stop)
            for image, (start, stop) in zip(pictures[place:], places, strict=False)
        )
        tokens_T, weights_T = torch.arange(9) + 10 * place, torch.tensor([0.0] * 4 + [1, 0, 0, 0, 1])
        reply = WeightedTokens(token_ids_T=tokens_T, weights_T=weights_T, prompt_length=2, images=placed)
        return Label(reply=reply, desirable=True, row=place, place=place)

    asked, answered = seeing(0, (1, 3)), seeing(1, (0, 1), (5, 7))
    first, second = mismatched([asked, answered])  # each with the completion of the other
    assert [(placed.image.digest, placed.start, placed.stop) for placed in first.images] == [("a", 1, 3), ("c", 5, 7)]
    assert [(placed.image.digest, placed.start, placed.stop) for placed in second.images] == [("b", 0, 1)]
    for longest, length in ((9, 9), (7, 7), (6, 5)):
        cut, _ = mismatched([asked, answered], longest=longest)
        assert len(cut) == length
        assert len(cut.images) == (1 if length == 5 else 2)
    behind = seeing(1, (0, 1), (6, 8))  # the end comes before the image, not within it
    cut, _ = mismatched([asked, behind], longest=5)
    assert len(cut) == 5
    assert [placed.image.digest for placed in cut.images] == ["a"]


def test_log_probs_of_mismatched_replies_are_kept_whatever_steps_ask_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 2)
    steps = [[0, 1, 2], [3, 4, 5, 6]]
    store = ScoreFiles(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        mismatched_references(LABELS, steps, lambda: Bigrams(1, fails_after=4), store, key="k", max_tokens=100)
    rest = Bigrams(1)
    found = mismatched_references(LABELS, steps, lambda: rest, ScoreFiles(tmp_path), key="k", max_tokens=100)
    assert rest.replies == 3, "the pass goes on where it stopped"

    def refuse() -> ReferenceModel:
        raise AssertionError("the reference was loaded")

    again = mismatched_references(LABELS, steps, refuse, ScoreFiles(tmp_path), key="k", max_tokens=100)
    part = mismatched_references(LABELS, steps[1:], refuse, ScoreFiles(tmp_path), key="k", max_tokens=100)
    assert found == again == part | {places: found[places] for places in ((0, 2), (1, 0), (2, 1))}
    alone = mismatched_references(LABELS, steps, lambda: Bigrams(1), ScoreFiles(None), key="k", max_tokens=100)
    assert found == pytest.approx(alone)
    more = Bigrams(1)
    mismatched_references(LABELS, [[2, 0, 1]], lambda: more, ScoreFiles(tmp_path), key="k", max_tokens=100)
    assert more.replies == 0, "the same neighbours in another order"
    mismatched_references(LABELS, [[0, 2, 1]], lambda: more, ScoreFiles(tmp_path), key="k", max_tokens=100)
    assert more.replies == 3


@settings(max_examples=30, deadline=None)
@given(size=st.integers(2, 20), batch_size=st.integers(1, 7), epochs=st.integers(1, 3), done=st.integers(0, 3))
def test_coming_steps_are_those_that_are_taken(size: int, batch_size: int, epochs: int, done: int) -> None:
    total = size * epochs
    cursor, taken = PromptCursor(4), []
    while cursor.taken(size) < total:
        indices, cursor = next_examples(cursor, size, batch_size=batch_size, total=total)
        taken.append(indices)
    assert sorted(index for indices in taken for index in indices) == sorted(list(range(size)) * epochs)
    done = min(done, len(taken))
    start = PromptCursor(4)
    for _ in range(done):
        _, start = next_examples(start, size, batch_size=batch_size, total=total)
    left = coming_steps(start, size, steps=len(taken) - done, batch_size=batch_size, total=total)
    assert list(left) == taken[done:]
