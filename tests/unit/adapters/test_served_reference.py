"""References on servers are asked about the sequences of their own datasources, and answers go to their tokens."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from rollgrad.adapters.engines.vllm_server import client
from rollgrad.adapters.engines.vllm_server.teacher import OF_REFERENCES, Place, ServedModel, ServedReference
from rollgrad.application.interruption import BrokenOffError, Stop
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.domain.errors import DataError
from rollgrad.testing.agent_executor import make_trajectory
from tests.fakes.reward_server import JsonServer


class Numbers(ServedModel):
    """A model whose log-prob of a token is the token's number, and that of a server more."""

    def __init__(self, number: int) -> None:
        super().__init__("http://nowhere:1", name="", size=10, asked=OF_REFERENCES)
        self.number = number

    async def places(self, batch: PackedBatch, top_k: int) -> list[Place]:
        await asyncio.sleep(0.01 if self.number == 100 else 0)  # its answers come later than those of others
        own = [self.number + token for token in batch.tokens_N[batch.action_mask_N].tolist()]
        return [Place([token % 10] * top_k, [float(-token)] * top_k, float(token)) for token in own]


MODELS = {"math": Numbers(100), "code": Numbers(200)}
OTHER = Numbers(300)


def batch_of(datasources: list[str]) -> PackedBatch:
    """A batch of replies of one to three tokens, all different."""
    replies = [[10 * place + number for number in range(place % 3 + 1)] for place in range(1, len(datasources) + 1)]
    batch = pack([make_trajectory([1] * (len(r) % 2 + 1), r, group_id=i, sample_id=i) for i, r in enumerate(replies)])
    return evolve(batch, datasources_S=tuple(datasources))


@given(st.lists(st.sampled_from(["math", "code", "poems"]), min_size=1, max_size=6))
def test_each_token_has_the_answer_of_its_own_server(datasources: list[str]) -> None:
    batch = batch_of(datasources)
    numbers_S = torch.tensor([MODELS.get(name, OTHER).number for name in datasources])
    expected_A = (batch.tokens_N + numbers_S[batch.sequence_ids_N])[batch.action_mask_N]
    reference = ServedReference(OTHER, MODELS, complete=asyncio.run)
    assert torch.equal(reference.score(batch).logprobs_N[batch.action_mask_N], expected_A.float())
    found = reference.predict(batch, 3)
    assert torch.equal(found.logprobs_AB[:, 0], -expected_A.float())
    assert torch.equal(found.ids_AK[:, 2], (expected_A % 10).int())


def test_a_datasource_without_a_reference_is_named() -> None:
    reference = ServedReference(None, MODELS, complete=asyncio.run)
    with pytest.raises(DataError, match=r"Rows of 'poems' have no teacher: --ref.urls has one for 'math', 'code'"):
        reference.score(batch_of(["math", "poems"]))


def test_a_server_that_is_busy_for_a_while_is_waited_for_until_the_run_is_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked about one sequence; six answers in a row are no answer."""
    monkeypatch.setattr(client, "BACKOFF", 0.001)
    busy, stop = [503] * 6, Stop()

    def answer(path: str, body: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "m"}]}
        if busy:
            return busy.pop(), "not now"
        stop.asked = True
        return 503, "not now"

    def complete(work: Coroutine[Any, Any, Any]) -> Any:
        async def stoppable() -> Any:
            return await stop.begin(work)

        return asyncio.run(stoppable())

    server = JsonServer(answer)
    try:
        model = ServedModel(server.url, name="m", size=10, asked=OF_REFERENCES)
        with pytest.raises(BrokenOffError):
            ServedReference(model, {}, complete=complete).score(batch_of(["math"]))
    finally:
        server.close()
    assert server.paths.count("/v1/completions") == 7
