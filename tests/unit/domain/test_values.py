"""Trajectories, batches, prompts, schedules and the small state machines."""

import inspect
import itertools
import math
import pickle

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgrad.domain import errors
from rollgrad.domain.algorithms.evaluation import best_at_k, majority_passes, pass_at_k, summarise, summary_names
from rollgrad.domain.batches.by_sequence import counts, nonzero, spread
from rollgrad.domain.batches.packed import pack
from rollgrad.domain.batches.partition import Piece, micro_batches, minibatches
from rollgrad.domain.control.kl_weight import KLController
from rollgrad.domain.control.learning_rate import lr_factor
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.messages import call_entry, in_order_of_calls, same_message
from rollgrad.domain.episodes.prompts import PromptCursor
from rollgrad.domain.episodes.trajectory import NO_VERSION, Segment, SegmentKind, Trajectory, TrajectoryBuilder
from rollgrad.domain.errors import TrajectoryError
from rollgrad.testing.agent_executor import make_trajectory


def said(*tokens: int, logprob: float = -0.5, version: int = 3) -> Generation:
    count = len(tokens)
    return Generation(
        token_ids=tokens, logprobs=[logprob] * count, versions=[version] * count, stop_reason=StopReason.STOP
    )


def episode(prompt: int = 2, turns: int = 2, group_id: int = 0, sample_id: int = 0) -> Trajectory:
    builder = TrajectoryBuilder(list(range(prompt)), group_id=group_id, sample_id=sample_id)
    for turn in range(turns):
        builder.add_action(said(10 + turn, 11 + turn))
        builder.set_reward(turn + 1.0)
        if turn + 1 < turns:
            builder.add_observation([90, 91, 92])
    return builder.build(stop_reason=StopReason.ENVIRONMENT)


def test_each_turn_keeps_its_reward() -> None:
    trajectory = episode(turns=3)
    assert [s.reward for s in trajectory.segments if s.kind == "action"] == [1.0, 2.0, 3.0]
    assert trajectory.reward == trajectory.score == 6.0
    assert trajectory.action_length == 6
    batch = pack([trajectory])
    assert batch.rewards_N.nonzero()[:, 0].tolist() == [3, 8, 13]
    assert batch.rewards_N[[3, 8, 13]].tolist() == [1.0, 2.0, 3.0]
    assert torch.equal(batch.versions_N == NO_VERSION, ~batch.action_mask_N)


@pytest.mark.parametrize(
    ("generation", "reason"),
    [
        (said(), "no tokens"),
        (said(1, logprob=float("nan")), "finite"),
        (said(1, logprob=float("-inf")), "finite"),
        (said(1, logprob=0.5), "<= 0"),
        (
            Generation(token_ids=[1, 2], logprobs=[-1.0], versions=[0, 0], stop_reason=StopReason.STOP),
            "2 tokens, 1 log",
        ),
    ],
)
def test_impossible_actions_are_refused(generation: Generation, reason: str) -> None:
    builder = TrajectoryBuilder([1], group_id=0, sample_id=0)
    with pytest.raises(TrajectoryError, match=reason):
        builder.add_action(generation)


def test_impossible_episodes_are_refused() -> None:
    with pytest.raises(TrajectoryError, match="at least one"):
        TrajectoryBuilder([], group_id=0, sample_id=0)
    builder = TrajectoryBuilder([1, 2], group_id=0, sample_id=0)
    with pytest.raises(TrajectoryError, match="before any action"):
        builder.set_reward(1.0)
    with pytest.raises(TrajectoryError, match="nothing to learn"):
        builder.build(stop_reason=StopReason.STOP)
    builder.add_action(said(3))
    with pytest.raises(TrajectoryError, match="finite"):
        builder.set_reward(float("nan"))
    with pytest.raises(TrajectoryError, match="score"):
        builder.build(stop_reason=StopReason.STOP, score=float("inf"))


@given(chosen=st.lists(st.integers(0, 4), unique=True))
def test_select_never_changes_a_sample(chosen: list[int]) -> None:
    """Every column is compared, of any order of any of the samples."""
    whole = evolve(
        pack([episode(prompt=i + 1, turns=1 + i % 3, group_id=i // 2, sample_id=i) for i in range(5)]),
        teacher_prompts_S=tuple((7, i) for i in range(5)),
        datasources_S=tuple("abcde"),
        prescribed_S=tuple((Segment(kind=SegmentKind.ACTION, start=i, stop=i + 1),) for i in range(5)),
    )
    whole = evolve(whole, experts_NLK=torch.arange(whole.token_count).view(-1, 1, 1).expand(-1, 2, 3))
    picked, lengths = whole.select(chosen), whole.lengths_S.tolist()
    assert picked.lengths_S.tolist() == [lengths[i] for i in chosen]
    assert {name for name, _, _ in whole.columns()} >= {"tokens_N", "rewards_N", "scores_S", "experts_NLK"}
    for name, axis, column in whole.columns():
        rows = [row for i in chosen for row in (column.split(lengths)[i] if axis == "N" else column[i : i + 1])]
        assert torch.equal(getattr(picked, name), torch.stack(rows) if rows else column[:0]), name
    for name in ("teacher_prompts_S", "datasources_S", "prescribed_S"):
        assert getattr(picked, name) == tuple(getattr(whole, name)[i] for i in chosen), name
    assert torch.equal(whole.tokens_N[whole.token_index(chosen)], picked.tokens_N)


def numbered(trajectory: Trajectory, *turns: int) -> Trajectory:
    """With the numbers that its actions have in the whole rollout."""
    following = iter(turns)
    segments = [evolve(s, turn=next(following)) if s.kind == "action" else s for s in trajectory.segments]
    return evolve(trajectory, segments=tuple(segments))


def test_turns_are_numbered_over_the_branches_of_a_rollout() -> None:
    """An agent that calls a sub-agent between its turns, and goes on in a branch that follows all of them."""
    agent = numbered(make_trajectory([1], [5], [9], [6, 6]), 0, 3)
    called = numbered(make_trajectory([1], [7], [9], [7]), 1, 2)
    other = make_trajectory([1], [5], [9, 9], [6], sample_id=1)
    batch = pack([agent, called, other, make_trajectory([1], [8])])
    wanted = [[-1, 0, -1, 3, 3], [-1, 1, -1, 2], [-1, 0, -1, -1, 1], [-1, 4]]
    assert [row.tolist() for row in batch.turn_ids_N.split(batch.lengths_S.tolist())] == wanted
    assert batch.units_S.tolist() == batch.rollout_ids_S.tolist() == [0, 0, 1, 0]
    assert batch.rollouts == 2


def test_named_rewards_are_columns_in_the_order_of_their_names() -> None:
    """A branch has none where those of its rollout are another branch's."""
    replies = [
        make_trajectory([1], [5], reward_parts=parts) for parts in ({"b": 2.0, "a": 1.0}, {}, {"a": 3.0, "b": 4.0})
    ]
    batch = pack(replies)
    assert batch.part_names == ("a", "b")
    assert batch.filled("reward_parts_SK").tolist() == [[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]
    assert pack(replies[1:2]).reward_parts_SK is None
    with pytest.raises(TrajectoryError, match="parts a, others a, b: every reply"):
        pack([*replies, make_trajectory([1], [5], reward_parts={"a": 1.0})])


def test_a_sequence_without_tokens_takes_none_of_its_neighbours() -> None:
    lengths_S = torch.tensor([0, 2, 0, 1, 0])
    mask_N = torch.tensor([True, False, True])
    assert counts(mask_N, lengths_S).tolist() == [0, 1, 0, 1, 0]
    assert spread(torch.tensor([1.0, math.inf, 3.0, 4.0, 5.0]), lengths_S, mask_N).tolist() == [math.inf, 0.0, 4.0]
    index, sequences = nonzero(torch.tensor([math.nan, 6.0, 7.0]), lengths_S, mask_N)
    assert (index.tolist(), sequences.tolist()) == ([0, 2], [1, 3])
    assert counts(mask_N[:0], lengths_S[:1]).tolist() == [0]


def test_long_sequences_are_counted_as_short_ones() -> None:
    mask_N = torch.arange(9000) % 7 > 2
    wanted = [0, int(mask_N[:6000].sum()), int(mask_N[6000:].sum())]
    assert counts(mask_N, torch.tensor([0, 6000, 3000])).tolist() == wanted
    assert counts(mask_N, torch.tensor([0, 6000, 3000] + [0] * 9)).tolist() == wanted + [0] * 9


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        pack([])


@settings(deadline=None)
@given(size=st.integers(1, 30), steps=st.lists(st.integers(1, 40), min_size=1, max_size=6), cut=st.integers(0, 5))
def test_a_resumed_stream_continues(size: int, steps: list[int], cut: int) -> None:
    whole, cursor = [], PromptCursor(seed=4)
    for index, count in enumerate(steps):
        if index == cut:
            cursor = PromptCursor.from_state_dict(cursor.state_dict())
        taken, cursor = cursor.take(count, size)
        whole += taken
    at_once, _ = PromptCursor(seed=4).take(len(whole), size)
    assert whole == at_once
    for epoch in range(len(whole) // size):
        assert sorted(whole[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_epochs_differ_and_seeds_differ() -> None:
    first, second = PromptCursor(1).order(50), PromptCursor(1, epoch=1).order(50)
    assert first.tolist() != second.tolist() != PromptCursor(2).order(50).tolist()
    assert PromptCursor(1).order(5, shuffle=False).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="at least one"):
        PromptCursor(1).take(1, 0)


@given(count=st.integers(1, 50), data=st.data())
def test_minibatches_cover_every_rollout_once(count: int, data: st.DataObject) -> None:
    wanted = data.draw(st.integers(1, count))
    parts = minibatches(count, wanted, torch.Generator().manual_seed(0))
    assert sorted(itertools.chain(*parts)) == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len(parts) == wanted


def alone(lengths: list[int]) -> list[Piece]:
    """Sequences without a group."""
    return [Piece([index], index, length, length) for index, length in enumerate(lengths)]


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=9), budget=st.integers(1, 40))
def test_micro_batches_are_few_consecutive_and_within_budget(lengths: list[int], budget: int) -> None:
    runs = [[i for piece in run for i in piece.sequences] for run in micro_batches(alone(lengths), budget)]
    assert list(itertools.chain(*runs)) == list(range(len(lengths)))
    for run in runs:
        assert len(run) == 1 or sum(lengths[i] for i in run) <= budget
    cuts = range(len(lengths))
    fewest = next(
        count + 1
        for count in cuts
        for chosen in itertools.combinations(range(1, len(lengths)), count)
        if all(b - a == 1 or sum(lengths[a:b]) <= budget for a, b in itertools.pairwise([0, *chosen, len(lengths)]))
    )
    assert len(runs) == fewest


def test_passes_of_a_group_that_is_cut_are_full_to_the_last_token() -> None:
    group = [Piece([number], group=0, tokens=10, repeated=10) for number in range(4)]
    assert micro_batches(group, 20) == [group[:2], group[2:]]


def test_micro_batches_are_balanced() -> None:
    assert micro_batches(alone([10] * 6), 40) == [alone([10] * 6)[:3], alone([10] * 6)[3:]]
    as_many_as_others = micro_batches(alone([10] * 6), 60, passes=3)
    assert [len(run) for run in as_many_as_others] == [2, 2, 2]


@given(n=st.integers(1, 8), data=st.data())
def test_pass_at_k_counts_subsets(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([i < c for i in range(n)], k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@given(scores=st.lists(st.floats(-5, 5), min_size=1, max_size=7), data=st.data())
def test_best_at_k_is_the_mean_over_subsets(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    subsets = list(itertools.combinations(scores, k))
    assert best_at_k(scores, k) == pytest.approx(sum(map(max, subsets)) / len(subsets))
    passed = [float(score >= 0) for score in scores]
    assert best_at_k(passed, k) == pytest.approx(pass_at_k(len(passed), sum(map(int, passed)), k))
    with pytest.raises(ValueError, match="k must be"):
        best_at_k(scores, len(scores) + 1)


@given(answers=st.lists(st.sampled_from(["1", "2", "3", None]), min_size=1, max_size=9), right=st.integers(1, 4))
def test_the_answer_of_most_samples_passes(answers: list[str | None], right: int) -> None:
    """One of several answers with as many votes is drawn: the mean over draws. The order of samples does not matter."""
    counts = {answer: answers.count(answer) for answer in answers if answer is not None}
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    expected = sum(answer == str(right) for answer in winners) / len(winners) if winners else 0.0
    passed = [answer == str(right) for answer in answers]
    assert majority_passes(answers, passed) == pytest.approx(expected)
    assert majority_passes(answers[::-1], passed[::-1]) == pytest.approx(expected)


@pytest.mark.parametrize(("n", "c", "k"), [(2, 1, 3), (2, 1, 0), (2, 3, 1), (2, -1, 1)])
def test_pass_at_k_refuses_what_cannot_be(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="k must be"):
        pass_at_k(n, c, k)


@given(st.integers(1, 40))
def test_a_summary_has_the_names_that_are_told_before(n: int) -> None:
    """Powers of two below n, and n."""
    found = summarise([[1.0] * n, [0.0] * (n - 1)], 1.0, [["7"] * n, ["5"] * (n - 1)])
    assert {*found} == {*summary_names(n)}
    sizes = [k for k in range(1, n + 1) if k == n or k.bit_count() == 1]
    assert [name for name in summary_names(n) if name.startswith("pass@")] == [f"pass@{k}" for k in sizes]


def test_summary_over_prompts() -> None:
    found = summarise([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], []], threshold=1.0)
    passes = {"pass@1": 0.625, "pass@2": 0.75, "pass@4": 1.0, "mean@4": 0.625}
    assert found == passes | {"best@2": 0.75, "best@4": 1.0}
    votes = summarise([[1.0, 0.0, 0.0], [1.0, 1.0]], 1.0, [["7", "5", None], ["2", "2"]])
    assert votes["maj@3"] == (0.5 + 1) / 2
    assert (votes["mean@3"], votes["pass@2"], votes["pass@3"]) == (pytest.approx(2 / 3), pytest.approx(5 / 6), 1.0)
    assert votes["best@3"] == 1.0, "of the one prompt that has three samples"
    assert "maj@1" not in summarise([[1.0]], 1.0, [["7"]])
    assert "maj@2" not in summarise([[1.0, 0.0]], 1.0, [[None, None]])
    with pytest.raises(ValueError, match="no scores"):
        summarise([[]], threshold=1.0)


def test_adaptive_kl_by_hand() -> None:
    controller = KLController(coef=0.1, target=0.1, horizon=10000)
    assert controller.update(0.12, 1024).coef == pytest.approx(0.102048)
    assert controller.update(5.0, 1024).coef == pytest.approx(0.102048)
    assert controller.update(0.0, 1024).coef == pytest.approx(0.1 * (1 - 0.2 * 0.1024))
    assert controller.update(float("nan"), 1024) == controller
    assert KLController(coef=0.1).update(9.0, 1024).coef == 0.1
    assert controller.load_state_dict(controller.update(0.12, 10).state_dict()) == controller.update(0.12, 10)


@pytest.mark.parametrize("horizon", [1e-3, 1.0, 100.0, 1e4])
@pytest.mark.parametrize("samples", [1, 8, 1024, 10**6])
def test_no_horizon_turns_the_kl_weight_into_a_bonus(horizon: float, samples: int) -> None:
    for kl in (-1.0, 0.0, 0.05, 100.0):
        coef = KLController(coef=0.1, target=0.1, horizon=horizon).update(kl, samples).coef
        assert 0.08 - 1e-12 <= coef <= 0.12 + 1e-12


def test_schedules() -> None:
    def at(kind: str, step: int) -> float:
        return lr_factor(kind, step, total_steps=100, warmup_ratio=0.1, min_ratio=0.1)

    assert [at("constant", s) for s in (0, 9, 10, 99)] == pytest.approx([1 / 11, 10 / 11, 1, 1])
    assert at("linear", 55) == pytest.approx(0.55)
    assert at("cosine_with_min_lr", 55) == pytest.approx(0.55)
    assert at("cosine_with_min_lr", 100) == pytest.approx(0.1)
    assert at("linear", 1000) == pytest.approx(0.1)
    late = [at("warmup_stable_decay", s) for s in (0, 9, 10, 89, 90, 95, 99, 100, 1000)]
    assert late == pytest.approx([1 / 11, 10 / 11, 1, 1, 1, 0.55, 0.19, 0.1, 0.1])
    with pytest.raises(ValueError, match="Unknown schedule"):
        at("exponential", 50)


@given(
    kind=st.sampled_from(["constant", "linear", "cosine_with_min_lr", "warmup_stable_decay"]),
    total=st.integers(1, 40),
    warmup=st.sampled_from([0.0, 0.1, 0.37, 1.0]),
    floor=st.sampled_from([0.0, 0.1, 1.0]),
    decay=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_a_rate_rises_for_its_warm_up_and_never_again(
    kind: str, total: int, warmup: float, floor: float, decay: float
) -> None:
    """A part of a step counts as one."""
    ratios = {"warmup_ratio": warmup, "min_ratio": floor, "decay_ratio": decay}
    factors = [lr_factor(kind, step, total_steps=total, **ratios) for step in range(total + 3)]
    rising = math.ceil(total * warmup)
    assert factors[:rising] == pytest.approx([(step + 1) / (rising + 1) for step in range(rising)])
    assert factors[rising:] == sorted(factors[rising:], reverse=True)
    assert all(floor <= factor <= 1 for factor in factors[rising:])
    if kind == "warmup_stable_decay":
        falling = min(math.ceil(total * decay), total - rising)
        slope = (1 - floor) / max(1, falling)
        late = [1 - slope * max(0, step - (total - falling)) for step in range(rising, total + 1)]
        assert factors[rising : total + 1] == pytest.approx(late)


def test_a_late_decay_is_that_of_transformers() -> None:
    """But for warm-up, whose first step moves here, and whose rate begins at the floor there."""
    from transformers import get_wsd_schedule

    network = torch.nn.Linear(1, 1)
    theirs = get_wsd_schedule(
        torch.optim.SGD(network.parameters(), lr=1.0),
        num_warmup_steps=3,
        num_decay_steps=6,
        num_training_steps=30,
        decay_type="linear",
        min_lr_ratio=0.2,
    ).lr_lambdas[0]
    ours = [
        lr_factor("warmup_stable_decay", step, total_steps=30, warmup_ratio=0.1, min_ratio=0.2, decay_ratio=0.2)
        for step in range(3, 40)
    ]
    assert ours == pytest.approx([theirs(step) for step in range(3, 40)])


def test_answers_to_calls_are_in_the_order_of_their_calls() -> None:
    def calls(*ids: str) -> dict[str, object]:
        return {"role": "assistant", "content": "", "tool_calls": [call_entry(each, "f", {}) for each in ids]}

    def answer(name: str, content: str = "") -> dict[str, object]:
        return {"role": "tool", "tool_call_id": name, "content": content}

    user, first, second = {"role": "user", "content": "go"}, calls("a", "b"), calls("b", "a", "c")
    said = [user, first, answer("b"), answer("a"), second, answer("c"), answer("other"), answer("a"), user]
    wanted = [user, first, answer("a"), answer("b"), second, answer("a"), answer("c"), answer("other"), user]
    assert in_order_of_calls(said) == wanted
    assert in_order_of_calls(wanted) == wanted
    nameless = [calls("", ""), answer("", "1"), answer("", "2")]
    assert in_order_of_calls(nameless) == nameless
    assert in_order_of_calls([answer("b"), answer("a"), user]) == [answer("b"), answer("a"), user]


def test_a_late_decay_does_not_begin_before_warm_up_has_ended() -> None:
    factors = [
        lr_factor("warmup_stable_decay", step, total_steps=10, warmup_ratio=0.6, min_ratio=0.0, decay_ratio=0.8)
        for step in range(10)
    ]
    assert factors == pytest.approx([*(step / 7 for step in range(1, 7)), 1.0, 0.75, 0.5, 0.25])


@pytest.mark.parametrize(
    "kind", [e for _, e in inspect.getmembers(errors, inspect.isclass) if issubclass(e, errors.RollgradError)]
)
def test_errors_cross_processes(kind: type[errors.RollgradError]) -> None:
    error = pickle.loads(pickle.dumps(kind("what was set, and how to fix it")))
    assert type(error) is kind
    assert str(error) == "what was set, and how to fix it"
    assert kind is errors.RollgradError or len(kind.__mro__) > len(errors.RollgradError.__mro__) + 1


def test_images_in_messages_are_compared() -> None:
    def text(picture: bytes | str) -> str:
        return same_message({"role": "user", "content": [{"type": "image", "image": picture}]})

    large = bytes(1_000_000)
    assert text(large) == text(bytes(1_000_000)) != text(large + b"1")
    uri = f"data:image/png;base64,{'A' * 1_000_000}"
    assert text(uri) == text("".join(uri)) != text(f"{uri}A")
    assert text(f"{uri}\ud800") != text(uri), "a lone surrogate, which UTF-8 cannot have"
