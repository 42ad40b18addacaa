"""How vLLM has to be started for adapters, where it cannot be, and which images it is not given."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollgrad.adapters.engines.vllm.images import engine_input
from rollgrad.adapters.engines.vllm.lora import lora_settings
from rollgrad.adapters.engines.vllm.sampling_params import plain_parameters
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams
from rollgrad.domain.episodes.images import Image, PlacedImage
from rollgrad.domain.errors import ConfigurationError
from tests.tiny_vision import picture

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (9, 16), (32, 32), (300, 320), (512, 512)])
def test_vllm_gets_the_least_rank_that_it_has_room_for(rank: int, room: int) -> None:
    settings = lora_settings(LoraConfig(rank=rank), torch.float32, CPU)
    assert settings == {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}


def test_a_least_length_above_the_room_of_a_turn_is_the_room() -> None:
    """vLLM refuses such a request, in which an episode has less room left than an agent asks for."""
    params = SamplingParams(max_new_tokens=4, min_new_tokens=9)
    fields = plain_parameters(GenerationRequest(prompt_token_ids=(1,), params=params), frozenset({2}))
    assert (fields["min_tokens"], fields["max_tokens"]) == (4, 4)


def test_float32_on_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--actor\.dtype and --actor\.lora\.sync"):
        lora_settings(LoraConfig(rank=8), torch.float32, GPU)
    assert lora_settings(LoraConfig(rank=8), torch.bfloat16, GPU)["enable_lora"]


async def test_an_image_that_vllm_has_other_tokens_for_is_refused() -> None:
    class Renderer:
        async def render_cmpl_async(self, prompts: Any, *, skip_mm_cache: bool) -> list[dict[str, Any]]:
            return [{"prompt_token_ids": [9, 9, 9]}]

    llm = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(image_token_id=9)), renderer=Renderer()
    )
    image = Image(digest="red", data=picture((200, 0, 0)), tensors={})
    with pytest.raises(ConfigurationError, match=r"3 tokens .* has 2 for.*--rollout.engine embedded"):
        await engine_input(llm, [5, 9, 9, 6], (PlacedImage(image=image, start=1, stop=3),), "salt")
