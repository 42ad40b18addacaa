"""vLLM computes models of several types with the weights that the trainer pushes.

`scripts/vllm_table.py` examines all that docs/models.md names.
"""

import pytest
import torch

from rollgrad.adapters.weights.channel import EngineWeights
from rollgrad.adapters.weights.receiver_port import WeightsDifferError
from tests.model_sweep import documented
from tests.stale_matrices import STALE_WORKER
from tests.vllm_sweep import IN_VLLM, TOLERANCES, TYPES, examine, gap, move, sampled, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.wide
@pytest.mark.usefixtures("vllm_host")
@pytest.mark.parametrize("name", ["falcon_h1", "gpt_oss", "minimax_m2", "glm4_moe", "lfm2_moe", "qwen3_next"])
def test_a_type_takes_weights_as_the_documents_say(name: str) -> None:
    """A loader that turns matrices, one that computes, one without a name, and numbers that are no parameters; layers
    with states of three kinds; what is repaired on a CPU."""
    finding = examine(name)
    assert finding.exact, finding
    assert finding.outcome == documented(IN_VLLM)[name], "run scripts/vllm_table.py"


@pytest.mark.wide
@pytest.mark.usefixtures("vllm_host")
async def test_matrices_of_latent_attention_are_made_anew_and_stale_ones_noticed() -> None:
    """vLLM computes replies, and no prompts, with matrices that it takes out of weights when it loads them."""
    async with started("deepseek_v3", worker_extension_cls=STALE_WORKER) as (engine, policy):
        before = gap(policy, await sampled(engine))
        move(policy)
        await EngineWeights(engine).push(policy, 1)
        assert max(before, gap(policy, await sampled(engine))) < TOLERANCES[torch.float32]
        await engine.llm.collective_rpc("keep_matrices")
        move(policy, seed=2)
        with pytest.raises(WeightsDifferError, match="it samples with other weights than it was given"):
            await EngineWeights(engine).push(policy, 2)


def test_the_documents_list_every_type_that_is_examined() -> None:
    assert sorted(documented(IN_VLLM)) == sorted(TYPES), "run scripts/vllm_table.py"
