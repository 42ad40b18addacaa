"""A vLLM that takes an adapter (LoRA) and no weights: it computes the adapter beside the weights that it has loaded.

vLLM loads adapters from peft's files, so the tensors of a transfer are written to a directory in shared memory, for as
long as the loading takes. The adapter keeps its id and its slot: requests in flight go on with the new
one. Until the first comes requests have none, which like fresh adapters changes nothing: vLLM loads no empty one.
"""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollgrad.adapters.engines.vllm.async_llm import LocalCore
from rollgrad.adapters.weights.shared_buckets import DIRECTORY, Assembler, SharedMemory
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.domain.errors import ConfigurationError, EngineError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank`; a rank in between is padded with zeros."""

ADAPTER_ID = 1
"""Id of the only adapter, in vLLM's first slot."""

ADAPTER_NAME = "rollgrad"

PREFIX = "rollgrad-adapter-"
"""Prefix of the directories' names."""


def lora_settings(lora: LoraConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Returns the arguments of `launch.start` for adapters of that rank in an engine that computes in `dtype`.

    Raises:
        ConfigurationError: vLLM computes no adapters there in that format.
    """
    if dtype is torch.float32 and device.type == "cuda":
        raise ConfigurationError(
            "actor.lora.sync is adapter and actor.dtype is float32, but on a GPU vLLM computes adapters in 16 bits "
            "alone: leave one of --actor.dtype and --actor.lora.sync out."
        )
    highest = next((rank for rank in RANKS if rank >= lora.rank), lora.rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": highest}


class AdapterCore(LocalCore):
    """A `Core` that takes adapters; updates are those of `shared_memory_adapter`.

    Args:
        llm: an `AsyncLLM` that was started with `lora_settings`.
        lora: the rank and alpha of the adapters.
    """

    def __init__(self, llm: Any, lora: LoraConfig) -> None:
        super().__init__(llm)
        self._lora = lora
        self._tensors: dict[str, Tensor] = {}
        self._complete = False

    async def begin_update(self, info: Mapping[str, Any] | None) -> None:
        """Implements `Core.begin_update`."""
        self._memory = SharedMemory(**(info or {}))
        self._assembler = Assembler(torch.device("cpu"))
        self._tensors, self._complete = {}, False

    async def take_update(self, update: Mapping[str, Any]) -> None:
        """Implements `Core.take_update`.

        Raises:
            EngineError: it was the last, and no whole adapter came.
        """
        self._tensors |= dict(self._assembler.take(self._memory.bucket(update["bucket"]), update["pieces"]))
        if update.get("last"):
            if not self._tensors or not self._assembler.whole():
                raise EngineError(
                    "No adapter came from the trainer: the engine takes adapters alone, so it must train one."
                )
            self._complete = True

    async def finish_update(self) -> None:
        """Implements `Core.finish_update`; without the last update vLLM keeps the adapter it has.

        Raises:
            ConfigurationError: /dev/shm has no room for the adapter.
            EngineError: vLLM refuses it.
        """
        from vllm.lora.request import LoRARequest

        tensors, self._tensors = self._tensors, {}
        if not self._complete:
            return
        self._complete = False
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=DIRECTORY))
        try:
            await asyncio.to_thread(self._write, tensors, path)
            await self._call(self._llm.add_lora(LoRARequest(ADAPTER_NAME, ADAPTER_ID, str(path), load_inplace=True)))
        except EngineError as error:
            raise EngineError(
                f"vLLM did not take the adapter. {error} Name other layers with --actor.lora.target_modules, or set "
                "--actor.lora.sync merged."
            ) from error
        finally:
            shutil.rmtree(path)
        # Loaded by who has lost the adapter, and is no more, so that it fails.
        self._lora_request = LoRARequest(ADAPTER_NAME, ADAPTER_ID, str(path))

    def _write(self, tensors: dict[str, Tensor], path: Path) -> None:
        """Writes an adapter in peft's format."""
        from safetensors.torch import save_file

        size = sum(tensor.nbytes for tensor in tensors.values())
        if size > shutil.disk_usage(path).free:
            raise ConfigurationError(
                f"{DIRECTORY} has no room for {size / 2**20:.0f} MiB, the adapter on its way to vLLM: give it more (in "
                "a container: --shm-size=1g)."
            )
        modules = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors})
        settings = {"peft_type": "LORA", "r": self._lora.rank, "lora_alpha": self._lora.alpha, "bias": "none"}
        settings["use_rslora"] = self._lora.rslora
        (path / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": modules}))
        save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
