"""How vLLM has to be started for adapters, and where it cannot be."""

import pytest
import torch

from rollgrad.adapters.engines.vllm.lora import lora_settings
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.domain.errors import ConfigurationError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (9, 16), (32, 32), (300, 320), (512, 512)])
def test_vllm_gets_the_least_rank_that_it_has_room_for(rank: int, room: int) -> None:
    settings = lora_settings(LoraConfig(rank=rank), torch.float32, CPU)
    assert settings == {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}


def test_float32_on_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--actor\.dtype and --actor\.lora\.sync"):
        lora_settings(LoraConfig(rank=8), torch.float32, GPU)
    assert lora_settings(LoraConfig(rank=8), torch.bfloat16, GPU)["enable_lora"]
