"""The embedded engine keeps the states of layers that hand them on: a token costs a token, and replies are exact."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from rollgrad.adapters.engines.embedded.decoding import Decoder, check_decoding, decoder_of
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.engines.embedded.kv_cache import Place
from rollgrad.adapters.engines.embedded.states import SequenceStates
from rollgrad.adapters.models.torch.experts.router_replay import install_router_replay
from rollgrad.adapters.models.torch.layers.attention import backbone
from rollgrad.adapters.models.torch.loading.compatibility import install_and_compare
from rollgrad.adapters.models.torch.planning.shape import model_shape
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams
from tests.model_sweep import LOGPROB_TOLERANCE, engine_gap
from tests.tiny_architectures import tiny_model


def packed(model_type: str) -> Any:
    model = tiny_model(model_type).requires_grad_(False)
    install_and_compare(model)
    return model


@pytest.mark.parametrize(
    "model_type",
    [
        *("qwen3_5_text", "lfm2", "falcon_h1", "jamba"),
        *(pytest.param(name, marks=pytest.mark.wide) for name in ("kimi_linear", "nemotron_h", "mamba2", "mamba")),
        pytest.param("zamba", marks=pytest.mark.wide),
    ],
)
async def test_rows_that_come_and_go_and_go_on_are_exact(model_type: str) -> None:
    """Two at a time, of seven of unlike lengths that wait, and on what is kept of them."""
    plain, model = tiny_model(model_type).requires_grad_(False), packed(model_type)
    check_decoding(model, "--model")
    engine = EmbeddedEngine(model, eos_token_ids=(), max_batch_size=2)
    assert await engine_gap(plain, engine, 60) < LOGPROB_TOLERANCE


async def test_a_token_costs_a_token() -> None:
    model = packed("qwen3_5_text")
    computed: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda _, given: computed.append(given[0].shape[:2].numel()))
    engine = EmbeddedEngine(model, eos_token_ids=())

    async def reply(prompt: tuple[int, ...]) -> Generation:
        return await engine.generate(
            GenerationRequest(prompt_token_ids=prompt, params=SamplingParams(max_new_tokens=6), keep=True)
        )

    prompt = tuple(range(3, 23))
    one, _ = await asyncio.gather(reply(prompt), reply(prompt))
    assert computed[1:] == [20, *[2] * 5], "after the token that shows how large a state is"
    computed.clear()
    await reply((*prompt, *one.token_ids, 30, 31))
    assert computed == [3, *[1] * 5], "the last token of the reply, and what follows it"


def test_states_of_a_pass_stay_where_they_are() -> None:
    states = SequenceStates()
    one, two, three, four = (Place() for _ in range(4))
    states.begin([one, two]).append(torch.tensor([[1.0], [2.0]]))
    states.begin([three]).append(torch.tensor([[3.0]]))
    first = states.of([one, two])
    assert states.of([one, two]) is first
    first[0] = torch.tensor([[10.0], [20.0]])  # as a step leaves them
    joined = states.of([three, two, one])
    assert joined[0].tolist() == [[3.0], [20.0], [10.0]]
    assert states.of([three, two, one]) is joined
    states.free([three])
    assert states.of([two, one])[0].tolist() == [[20.0], [10.0]]
    states.copy_in(four, states.copy_out(one))
    assert states.of([four, two])[0].tolist() == [[10.0], [20.0]]
    states.free([one, two, four])
    assert states.nbytes == 0


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "lfm2", "falcon_h1", "jamba"])
def test_the_size_of_states_is_what_sequences_have(model_type: str, tmp_path: Path) -> None:
    """As a plan of a run's memory says."""
    model = packed(model_type)
    decoder = decoder_of(model)
    assert isinstance(decoder, Decoder)
    decoder.cache.capacity = 3
    places = [Place() for _ in range(3)]
    for place, prompt in zip(places, (4, 9, 2), strict=True):
        decoder.cache.reserve(place, prompt)
    with torch.inference_mode():
        decoder.prefill([tuple(range(3, 3 + n)) for n in (4, 9, 2)], [[place] for place in places])
    assert decoder.cache.states.nbytes == 3 * decoder.sequence_bytes > 0
    model.save_pretrained(tmp_path)
    shape = model_shape("actor.model_name_or_path", str(tmp_path))
    assert shape.state_bytes == decoder.sequence_bytes
    assert shape.attending == (2 if model_type == "falcon_h1" else 1)
    # Values, gates, queries and keys of two heads of 16; inputs of 64, time steps, and two rows of 4 that all share.
    columns = {"qwen3_5_text": 2 * (16 + 2 + 2 * 16), "lfm2": 0, "falcon_h1": 64 + 4 + 2 * 4, "jamba": 2 * 64 + 2 * 4}
    assert shape.columns == columns[model_type]


async def test_no_more_rows_than_half_of_the_memory_has_states_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed("qwen3_5_text")
    engine = EmbeddedEngine(model, eos_token_ids=(), memory_share=1.0)
    each = engine._batch.decoder.sequence_bytes
    monkeypatch.setattr(engine._batch.decoder, "free_memory", lambda: 7 * each + 40 * engine._batch.block_bytes)
    widths: list[int] = []
    backbone(model).layers[0].register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[0]))
    requests = [
        GenerationRequest(prompt_token_ids=(3 + i, 4), params=SamplingParams(max_new_tokens=3)) for i in range(9)
    ]
    replies = await asyncio.gather(*(engine.generate(request) for request in requests))
    assert all(len(reply.token_ids) == 3 for reply in replies)
    room = 7 * each + 40 * engine._batch.block_bytes
    assert max(widths) == min(9, room // (2 * each))


def test_experts_are_recorded_beside_states() -> None:
    model = packed("qwen3_next")
    replay = install_router_replay(model, "actor.router_replay is engine")
    decoder = decoder_of(model, replay)
    decoder.cache.capacity = 1
    place = Place()
    decoder.cache.reserve(place, 8)
    with torch.inference_mode():
        decoder.prefill([(3, 4, 5)], [[place]])
        assert decoder.routed[0].shape[0] == 3
        decoder.step([6], [place], [3])
        assert decoder.routed[0].shape[0] == 1
