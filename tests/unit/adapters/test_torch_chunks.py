"""Llama 4 is packed: its chunks, and its scales of queries, are those of each sequence's own positions."""

from typing import Any

import pytest
import torch

from rollgrad.adapters.engines.embedded.decoding import check_decoding
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.engines.embedded.kv_cache import BLOCK
from rollgrad.adapters.models.torch.forward import PackedLM
from rollgrad.adapters.models.torch.layers import attention
from rollgrad.adapters.models.torch.layers.attention_buckets import chunks
from rollgrad.adapters.models.torch.layers.layout import Node
from rollgrad.adapters.models.torch.layers.padded import is_padded
from rollgrad.adapters.models.torch.loading.compatibility import install_and_compare
from tests.model_sweep import LOGPROB_TOLERANCE, engine_gap, packed_gaps
from tests.recomputed import recompute
from tests.tiny_architectures import tiny_model
from tests.unit.adapters.test_torch_recurrence import alone, forest

SETTINGS = {"attention_chunk_size": 7, "floor_scale": 5, "attn_scale": 0.5, "max_position_embeddings": 512}
"""The prompt of `forest` ends within a chunk; its replies part before, at and after the border of one."""


def made(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A model as it is, and packed: layers of chunks with rotary embeddings, and of scaled queries without."""
    plain, model = (tiny_model("llama4_text", **SETTINGS).to(dtype) for _ in range(2))
    plain.set_attn_implementation("eager")
    install_and_compare(model)
    assert not is_padded(model)
    return plain, model


@pytest.mark.parametrize(
    ("node", "parts"),
    [
        (Node(0, 5), [Node(0, 5)]),
        (Node(0, 12), [Node(0, 5), Node(5, 5), Node(10, 2)]),
        (Node(9, 4, ((0, 3),)), [Node(9, 2, ((0, 3),)), Node(11, 2)]),
        (Node(9, 2, ((0, 5),)), [Node(9, 2)]),
        (Node(20, 6, ((0, 4), (10, 4))), [Node(20, 2, ((11, 3),)), Node(22, 4)]),
    ],
    ids=str,
)
def test_parts_end_where_chunks_do(node: Node, parts: list[Node]) -> None:
    assert [*chunks(node, 5)] == parts


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_forest_has_the_values_and_gradients_of_its_sequences(recomputes: bool) -> None:
    plain, model = made()
    if recomputes:
        recompute(model)
    assert max(packed_gaps(plain, model, forest())) < 3e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_no_more_than_transformers_does(dtype: torch.dtype) -> None:
    plain, model = made(dtype)
    exact, batch = tiny_model("llama4_text", **SETTINGS).to(dtype).float(), forest(2)
    with torch.no_grad():
        found_A = PackedLM(model)(batch)[0]
        rounded_A, exact_A = (alone(each, batch) for each in (plain, exact))
    # Of the median token: a rounding makes a router choose another expert for a few.
    assert (found_A - exact_A).abs().median() < 1.5 * (rounded_A - exact_A).abs().median()


async def test_the_embedded_engine_is_exact() -> None:
    """Replies over several blocks of its memory, and on kept keys, have transformers' log-probs."""
    plain, model = (each.requires_grad_(False) for each in made())
    check_decoding(model, "--model")
    engine = EmbeddedEngine(model, eos_token_ids=(), max_batch_size=3)
    assert await engine_gap(plain, engine, 2 * BLOCK) < LOGPROB_TOLERANCE


def test_queries_scaled_by_their_place_in_a_pass_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the correction the check of a loaded model has it computed padded."""
    model = tiny_model("llama4_text", attn_scale=0.5)
    monkeypatch.setattr(attention, "install_query_scales", lambda model: None)
    install_and_compare(model)
    assert is_padded(model)
