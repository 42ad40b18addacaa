"""The trainer sends the tokens of a mixture to the experts that vLLM says it sent them to."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from rollgrad.adapters.engines.vllm.async_llm import LocalCore
from rollgrad.adapters.engines.vllm.engine import VLLMEngine
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams
from rollgrad.domain.episodes.routed import unrecorded
from tests.recorded_experts import RECORDING_WORKER, record_experts
from tests.tiny_models import SHARE
from tests.unit.adapters.test_torch_router_replay import gap, load, played, policy

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_host")]


@pytest.fixture(scope="module")
def mixture_with_ties(tiny_mixture_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mixture, whose routers find all experts about equally good, as the engine has it."""
    path = tmp_path_factory.mktemp("ties")
    load(tiny_mixture_dir, ties=True, shaken=1e-6).save_pretrained(path)
    for file in tiny_mixture_dir.iterdir():
        if not (path / file.name).exists():
            (path / file.name).write_bytes(file.read_bytes())
    return path


@pytest.mark.skipif(torch.cuda.is_available(), reason="there vLLM itself says it, which a test below asks")
async def test_the_trainer_sends_tokens_to_the_experts_that_vllm_sent_them_to(
    tiny_mixture_dir: Path, mixture_with_ties: Path
) -> None:
    engine = VLLMEngine(
        str(mixture_with_ties),
        eos_token_ids=(),
        dtype="float32",
        max_tokens=128,
        max_batch_size=8,
        memory_fraction=SHARE,
        extra={"worker_extension_cls": RECORDING_WORKER, "enable_prefix_caching": False},
    )
    try:
        await record_experts(engine.llm)
        batch = await played(engine)
    finally:
        engine.close()
    assert batch.experts_NLK is not None
    lacking_N = batch.experts_NLK[:, 0, 0] == unrecorded(batch.experts_NLK)
    last_N = torch.zeros_like(batch.action_mask_N).index_fill(0, batch.lengths_S.cumsum(0) - 1, True)
    assert torch.equal(lacking_N, last_N), "of the last token nobody reads the hidden state"
    trainer = policy(load(tiny_mixture_dir, ties=True, shaken=1e-6, seed=4), tiny_mixture_dir)
    assert gap(trainer.score(batch).logprobs_N, batch) < 1e-4
    assert gap(trainer.score(evolve(batch, experts_NLK=None)).logprobs_N, batch) > 0.1, "other experts were chosen"


@pytest.mark.parametrize(("experts", "kind"), [(128, torch.uint8), (256, torch.int16), (384, torch.int16)], ids=str)
async def test_numbers_of_experts_get_the_type_that_has_one_for_none(experts: int, kind: torch.dtype) -> None:
    """vLLM's uint8 has the number of the 256th expert where ours says that there is none."""
    from vllm.outputs import CompletionOutput

    said_RLK = np.array([[[0, experts - 1]], [[1, experts // 2]]], dtype=np.uint8 if experts <= 256 else np.uint16)

    class Told:
        model_config = SimpleNamespace(
            max_model_len=8,
            dtype=torch.float32,
            quantization=None,
            get_vocab_size=lambda: 9,
            get_num_experts=lambda: experts,
        )

        cache = SimpleNamespace(enable_prefix_caching=True, cache_dtype="auto")
        vllm_config = SimpleNamespace(cache_config=cache, speculative_config=None)

        async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
            logprobs = SimpleNamespace(start_indices=[0], logprobs=[-1.0])
            output = CompletionOutput(0, "", [5], -1.0, logprobs, finish_reason="length", routed_experts=said_RLK)
            yield SimpleNamespace(outputs=[output], num_cached_tokens=0)

    request = GenerationRequest(prompt_token_ids=(2, 3, 4), params=SamplingParams(max_new_tokens=1), known_experts=1)
    [routed] = (await LocalCore(Told()).sample("name", request, frozenset(), None)).routed
    assert routed.start == 1
    assert routed.experts_RLK.dtype == kind
    assert routed.experts_RLK.tolist() == said_RLK.tolist()
    assert not bool((routed.experts_RLK == unrecorded(routed.experts_RLK)).any())


@pytest.mark.gpu
async def test_vllm_itself_says_to_which_experts_it_sent_tokens(
    tiny_mixture_dir: Path, mixture_with_ties: Path
) -> None:
    engine = VLLMEngine(
        str(mixture_with_ties),
        eos_token_ids=(),
        dtype="bfloat16",
        max_tokens=128,
        max_batch_size=8,
        memory_fraction=SHARE,
        records_experts=True,
    )
    try:
        batch = await played(engine)
    finally:
        engine.close()
    assert batch.experts_NLK is not None
    other = load(tiny_mixture_dir, ties=True, shaken=1e-6, seed=4).to("cuda", torch.bfloat16)
    trainer = policy(other, tiny_mixture_dir)
    replayed, chosen = (trainer.score(each).logprobs_N for each in (batch, evolve(batch, experts_NLK=None)))
    assert mean_gap(replayed, batch) < 0.1 * mean_gap(chosen, batch), "other experts were chosen"


def mean_gap(scored: torch.Tensor, batch: Any) -> float:
    return float((scored - batch.rollout_logprobs_N)[batch.action_mask_N].abs().mean())
