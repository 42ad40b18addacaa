"""A batch that went to processes and back is what it was, in few bytes; each process makes the same calls."""

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.adapters.models.ray.rank_policy import RankPolicy
from rollgrad.adapters.models.ray.sharded import ShardedPolicy, ShardedReference, ShardedValue
from rollgrad.adapters.models.ray.wire import (
    EXPERTS,
    LOGPROBS,
    SCORE,
    SCORES,
    VALUES,
    SentBatch,
    called,
    divided,
    merged,
)
from rollgrad.application.learning.microbatch import split
from rollgrad.application.learning.update import Listening
from rollgrad.domain.batches.examples import DemonstrationBatch, pack_demonstrations, pack_preferences
from rollgrad.domain.batches.metrics import Total
from rollgrad.domain.batches.packed import PackedBatch, RolloutBatch, pack
from rollgrad.domain.batches.teaching import as_taught
from rollgrad.domain.episodes.examples import Demonstration, Preference, WeightedTokens
from rollgrad.domain.episodes.images import Image, PlacedImage
from rollgrad.domain.ports.models import LossOutput, TokenScores
from rollgrad.testing.agent_executor import make_trajectory
from rollgrad.testing.models import FakePolicy

if TYPE_CHECKING:
    from rollgrad.adapters.models.ray.worker_group import WorkerGroup
    from rollgrad.adapters.models.torch.models import TorchPolicy

GROUPS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4)
"""Lengths of the replies of each group."""


def rollouts(groups: Sequence[Sequence[int]], prompt: int = 5) -> RolloutBatch:
    """Rollouts of two turns, with every column filled in."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = torch.randint(150_000, (count,), generator=generator).tolist()
        return drawn

    trajectories = []
    for group, replies in enumerate(groups):
        asked = tokens(prompt)
        for length in replies:
            turns = [tokens(length), tokens(2), tokens(1)]
            sample = len(trajectories)
            trajectories.append(make_trajectory(asked, *turns, group_id=group, sample_id=sample, rewards=[0.5, 1.0]))
    batch = pack(trajectories)
    draw_N = torch.where(batch.action_mask_N, -torch.rand(batch.token_count, generator=generator), 0.0)
    constant_N = torch.where(batch.action_mask_N, 0.25 * batch.group_ids_S[batch.sequence_ids_N], 0.0)
    return evolve(
        batch,
        rollout_logprobs_N=draw_N,
        old_logprobs_N=draw_N.clone(),
        values_N=draw_N * 2,
        advantages_N=constant_N,
        returns_N=constant_N,
        loss_weights_N=batch.action_mask_N.float() / 7,
        selected_N=draw_N > -0.5,
        kept_N=draw_N > -0.7,
        learned_N=draw_N < -0.8,
        places_S=batch.starts_S,
        taught_S=batch.sample_ids_S % 2 == 0,
        part_names=("right",),
        reward_parts_SK=torch.ones(len(batch), 1),
        experts_NLK=torch.randint(255, (batch.token_count, 2, 3), generator=generator).to(torch.uint8),
        teacher_prompts_S=tuple((place, 150_000) for place in range(len(trajectories))),
        datasources_S=tuple(f"from {place}" for place in range(len(trajectories))),
        sampler_ids_NK=torch.where(batch.action_mask_N[:, None], torch.arange(4), 0).int(),
        sampler_logprobs_NK=torch.where(batch.action_mask_N[:, None], draw_N[:, None] * torch.arange(4), 0.0),
        prescribed_S=tuple(trajectory.segments[1:2] * (place % 2) for place, trajectory in enumerate(trajectories)),
    )


class Model:
    """Scores tokens by their ids, and keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[PackedBatch] = []

    def score(self, batch: PackedBatch) -> TokenScores:
        self.given.append(batch)
        logprobs_N = torch.where(batch.action_mask_N, -batch.tokens_N / 1e6, 0.0)
        routed = None if batch.experts_NLK is None else batch.experts_NLK.short() * 100
        return TokenScores(
            logprobs_N=logprobs_N, entropy_N=2 * logprobs_N, collision_N=4 * logprobs_N, experts_NLK=routed
        )

    def values(self, batch: PackedBatch) -> Tensor:
        return 3 * self.score(batch).logprobs_N

    def update(self, batches: list[PackedBatch], objective: str) -> str:
        self.given += batches
        return objective


class PaddedPolicy(FakePolicy):
    """A policy whose rows are as long as the longest of a pass."""

    def padded(self) -> bool:
        return True


def arrived(part: SentBatch) -> Any:
    """The part in another process, as Ray hands it over: its arrays cannot be written to."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(part, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])


@settings(max_examples=40, deadline=None)
@given(GROUPS, st.integers(5, 60), st.integers(1, 5))
def test_every_process_gets_its_part_of_every_pass_as_it_was(
    groups: list[list[int]], budget: int, processes: int
) -> None:
    batch = rollouts(groups)
    passes = split(batch, budget * processes, processes)
    whole = {int(sample): batch.select([place]) for place, sample in enumerate(batch.sample_ids_S)}
    seen = []
    for part in divided(passes, processes):
        model = Model()
        assert called(model, "update", [[arrived(part)], "loss"]) == "loss"
        assert len(model.given) == len(passes), "all processes make the same calls"
        for found in model.given:
            assert isinstance(found, RolloutBatch)
            assert found.part_names == batch.part_names
            assert found.places_S is None
            assert found.loss_weights_N is not None
            if not found.loss_weights_N.any():
                continue
            for place, sample in enumerate(found.sample_ids_S.tolist()):
                seen.append(sample)
                own, expected = found.select([place]), evolve(whole[sample], places_S=None)
                columns = {name: column for name, _, column in own.columns()}
                wanted = {name: column for name, _, column in expected.columns()}
                assert columns.keys() == wanted.keys()
                assert own.prescribed_S == expected.prescribed_S
                assert own.teacher_prompts_S == expected.teacher_prompts_S
                assert own.datasources_S == expected.datasources_S
                for name, column in columns.items():
                    torch.testing.assert_close(column, wanted[name], rtol=0, atol=0, msg=name)
    assert sorted(seen) == sorted(whole)


@pytest.mark.parametrize("method", [SCORE, SCORES, LOGPROBS, VALUES])
@settings(max_examples=15, deadline=None)
@given(groups=GROUPS, budget=st.integers(5, 60), processes=st.integers(1, 5))
def test_results_come_back_to_their_tokens(method: str, groups: list[list[int]], budget: int, processes: int) -> None:
    batch = rollouts(groups)
    passes = split(batch, budget * processes, processes)
    results = [called(Model(), method, [[arrived(part)]]) for part in divided(passes, processes)]
    scores = Model().score(batch)
    expected = {
        "logprobs_N": scores.logprobs_N,
        "entropy_N": scores.entropy_N,
        "collision_N": scores.collision_N,
        EXPERTS: scores.experts_NLK,
        VALUES: Model().values(batch),
    }
    of_scores = {"logprobs_N", "entropy_N", "collision_N", EXPERTS}
    names = {SCORE: of_scores, SCORES: of_scores, LOGPROBS: {"logprobs_N"}, VALUES: {VALUES}}[method]
    assert results[0].keys() == names
    columns = merged(passes, results)
    assert columns.keys() == names
    for name in names:
        assert columns[name].dtype == (torch.int16 if name == EXPERTS else torch.float32)
        assert torch.equal(columns[name], expected[name])


@settings(max_examples=15, deadline=None)
@given(groups=GROUPS, budget=st.integers(5, 60), processes=st.integers(1, 5))
def test_what_a_teacher_reads_comes_back_to_its_tokens(groups: list[list[int]], budget: int, processes: int) -> None:
    taught = as_taught(rollouts(groups))
    passes = split(taught, budget * processes, processes)
    columns = merged(passes, [called(Model(), LOGPROBS, [[arrived(p)]]) for p in divided(passes, processes)])
    assert torch.equal(columns["logprobs_N"], Model().score(taught).logprobs_N)


class Processes:
    """Processes of a group, each of which scores its part, and asks the objective what it says of it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def put(self, value: Any) -> Any:
        return pickle.loads(pickle.dumps(value))

    def each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        return [called(Trained(), method, pickle.loads(pickle.dumps(list(own)))) for own in arguments]


class Trained(Model):
    def update(self, batches: list[PackedBatch], objective: Any) -> Any:
        for batch in batches:
            objective(self.score(batch), batch)
        return {"loss": Total(1.0)}


def even_tokens_are_clipped(scores: TokenScores, batch: PackedBatch) -> LossOutput:
    return LossOutput(loss=scores.logprobs_N.sum(), clipped_N=batch.action_mask_N & (batch.tokens_N % 2 == 0))


@settings(max_examples=15, deadline=None)
@given(
    groups=GROUPS,
    budget=st.integers(5, 60),
    processes=st.integers(1, 4),
    planned=st.integers(1, 4),
    width=st.integers(1, 2),
)
def test_an_objective_is_told_of_tokens_that_other_processes_computed(
    groups: list[list[int]], budget: int, processes: int, planned: int, width: int
) -> None:
    batch = rollouts(groups)
    listening = Listening(even_tokens_are_clipped)
    policy = ShardedPolicy(cast("WorkerGroup", Processes(processes * width)), width=width)
    metrics = policy.update(split(batch, budget * planned, planned), listening)
    assert metrics["loss"] == processes, "a metric of each part, one of which each width of processes has"
    logprobs_N, entropies_N, clipped_N = listening.columns(batch.token_count)
    scores = Model().score(batch)
    assert logprobs_N is not None
    assert torch.equal(logprobs_N, scores.logprobs_N)
    assert entropies_N is not None
    torch.testing.assert_close(entropies_N, scores.entropy_N, rtol=1e-3, atol=0)
    assert clipped_N is not None
    assert torch.equal(clipped_N, batch.action_mask_N & (batch.tokens_N % 2 == 0))


@settings(max_examples=20, deadline=None)
@given(GROUPS, st.integers(5, 60), st.integers(1, 4), st.data())
def test_images_travel_with_their_rows_and_every_pass_has_one(
    groups: list[list[int]], budget: int, processes: int, data: st.DataObject
) -> None:
    batch = rollouts(groups)
    shown = [
        Image(digest=str(number), data=b"file" * 1000, tensors={"pixel_values": torch.full((2, 3), float(number))})
        for number in range(2)
    ]
    places = [data.draw(st.sampled_from([(), (0,), (1, 0)])) for _ in range(len(batch))]
    placed = tuple(
        tuple(PlacedImage(image=shown[number], start=place, stop=place + 1) for place, number in enumerate(own))
        for own in places
    )
    batch = evolve(batch, images_S=placed if any(placed) else ())
    wanted = {int(sample): batch.images_of(place) for place, sample in enumerate(batch.sample_ids_S)}
    passes = split(batch, budget * processes, processes)
    seen = []
    for part in divided(passes, processes):
        there = arrived(part)
        for found, count in zip(there.passes(), there.counts, strict=True):
            assert found.loss_weights_N is not None
            assert any(found.images_S) == any(placed), "a divided tower computes in all processes or in none"
            for place, sample in enumerate(found.sample_ids_S.tolist()):
                seen += [sample] * (place < count)
                assert found.images_of(place) == wanted[sample]
                for mine, theirs in zip(found.images_of(place), wanted[sample], strict=True):
                    assert mine.image.tensors["pixel_values"].equal(theirs.image.tensors["pixel_values"])
                    assert mine.image.data == b""
            filler_N = found.sequence_ids_N >= count
            assert not found.loss_weights_N[filler_N].any()
    assert sorted(seen) == sorted(wanted)


def test_spans_of_a_teacher_come_to_their_tokens_with_what_is_no_number() -> None:
    values = torch.tensor([torch.nan, -1.5, torch.inf])
    reply = WeightedTokens(token_ids_T=torch.arange(5), weights_T=torch.tensor([0.0, 0, 1, 1, 1]), prompt_length=2)
    made = [Demonstration(branches=(reply,), row=row, span_logprobs_A=values - row) for row in range(4)]
    for part in divided(split(pack_demonstrations(made), 12, 2), 2):
        for batch in arrived(part).passes():
            assert isinstance(batch, DemonstrationBatch)
            found_SA = batch.filled("span_logprobs_N")[batch.action_mask_N].view(-1, 3)
            rows_S = -1.5 - found_SA[:, 1]
            assert torch.equal(found_SA.nan_to_num(9.0), (values - rows_S[:, None]).nan_to_num(9.0))
            assert not batch.filled("span_logprobs_N")[~batch.action_mask_N].any()


def test_a_pair_stays_whole_in_a_process_without_a_share() -> None:
    reply = WeightedTokens(token_ids_T=torch.arange(6), weights_T=torch.tensor([0.0, 0, 0, 1, 1, 1]), prompt_length=3)
    other = evolve(reply, token_ids_T=torch.arange(6) // 5)
    batch = pack_preferences([Preference(chosen=reply, rejected=evolve(other, prompt_length=1), row=0)])
    for part in divided(split(batch, 100, 3), 3):
        model = Model()
        called(model, "update", [[arrived(part)], "loss"])
        assert [len(given) for given in model.given] == [2]


@pytest.mark.parametrize("processes", [2, 8])
def test_a_process_without_a_share_computes_one_branch(processes: int) -> None:
    """All branches of a rollout that was divided over passes would be more than one of them has room for."""
    trajectories = [make_trajectory([branch], [1] * 9, group_id=0, sample_id=0) for branch in range(7)]
    passes = split(pack(trajectories), 10 * processes, processes)
    for part in divided(passes, processes):
        assert [batch.token_count for batch in part.passes()] == [10] * len(passes)


def test_a_token_costs_few_bytes() -> None:
    """Ids and the sampler's log-probs are what a loss of whole replies needs: 8 bytes, and 4 for a critic's values;
    each likely token is 8 more."""
    told = evolve(rollouts([[400] * 4] * 4, prompt=100), experts_NLK=None)
    batch = evolve(told, sampler_ids_NK=None, sampler_logprobs_NK=None)
    plain = evolve(batch, selected_N=None, kept_N=None, learned_N=None, values_N=None)
    for whole, limit in ((plain, 10.0), (batch, 15.0), (told, 15.0 + 4 * 8)):
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(divided(split(whole, 10**6, 2), 2), protocol=5, buffer_callback=buffers.append)
        size = len(data) + sum(len(bytes(buffer)) for buffer in buffers)
        assert size / whole.token_count < limit


def test_processes_are_asked_once_whether_they_pad() -> None:
    asked = []

    class Group:
        size = 2

        def all(self, method: str) -> list[Any]:
            asked.append(method)
            return [called(RankPolicy(cast("TorchPolicy", PaddedPolicy())), method, ())] * self.size

    group = cast("WorkerGroup", Group())
    for model in (ShardedPolicy(group), ShardedValue(group), ShardedReference(group)):
        assert [model.padded(), model.padded()] == [True, True]
    assert len(asked) == 3
