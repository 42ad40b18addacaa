"""Which families of models that see images vLLM serves as the trainer computes them.

As `tests/vllm_sweep.py`, of prompts with an image, with two and with none.
"""

import asyncio
import re
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from attrs import evolve

from rollgrad.adapters.chat.pictures import ImageRenderer, load_processor
from rollgrad.adapters.engines.vllm.engine import VLLMEngine
from rollgrad.adapters.models.torch.loading.loading import load_tokenizer
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.adapters.weights.channel import EngineWeights
from rollgrad.application.settings.sections.actor import DType, ModelConfig
from rollgrad.domain.batches.examples import pack_sequences
from rollgrad.domain.episodes.examples import WeightedTokens
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams
from rollgrad.domain.ports.chat_codec import RenderedPrompt
from rollgrad.entrypoints.composition.models import make_actor_model
from tests.tiny_models import SHARE
from tests.tiny_vision import ask, codec_of, picture, save_tiny_vlm
from tests.vllm_sweep import BFLOAT16, FLAG, REPLY, Finding, move

FAMILIES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "idefics3", "internvl"),
    *("mistral3", "llava", "llava_next", "llava_onevision"),
)
WITHOUT_TORCHVISION = {"idefics3", "llava", "llava_next"}
"""Families whose processors do without."""
ONE_IMAGE = {"llava_onevision"}
"""Families that are given one image a prompt."""
NAMED_OTHERWISE = {"llava", "llava_next", "llava_onevision"}
"""Families whose towers, CLIP's and SigLIP's, have other names in published files than in those of new models."""
TURNED = {"qwen3_vl_moe"}
"""Families whose experts lie the other way round in published files than in transformers."""
HEAD = 32
"""Width of the heads, as vLLM's attention has them on a CPU."""
LONGEST = 512
RED, WIDE = picture((200, 0, 0)), picture((0, 150, 0), width=56, height=24)

Reply = tuple[RenderedPrompt, Sequence[int], Sequence[float]]
"""A prompt, the reply's tokens and their log-probs."""


def available() -> list[str]:
    """The families whose processors can be made here."""
    return [each for each in FAMILIES if each in WITHOUT_TORCHVISION or find_spec("torchvision")]


def examine(family: str) -> Finding:
    """Starts vLLM for one family. Gaps are those of the prompt where they are largest."""
    try:
        return asyncio.run(_examine(family))
    except Exception as error:
        return Finding(name=family, error=f"{type(error).__name__}: {error}")


async def _examine(family: str) -> Finding:
    dtype = DType.BFLOAT16 if family in BFLOAT16 else DType.FLOAT32
    with tempfile.TemporaryDirectory() as path:
        save_tiny_vlm(family, Path(path), head=HEAD)
        if family in NAMED_OTHERWISE:
            _name_as_published(Path(path) / "model.safetensors")
        if family in TURNED:
            _turn_as_published(Path(path) / "model.safetensors")
        tokenizer = load_tokenizer(path, flag=FLAG)
        processor = load_processor(path, tokenizer, flag=FLAG)
        settings = ModelConfig(model_name_or_path=path, dtype=dtype)
        model = make_actor_model(settings, images=ImageRenderer(processor))
        policy = TorchPolicy(model, tokenizer, OptimizerSettings(lr=0.0))
        codec = codec_of(processor)
        prompts = [ask(codec, "Is ", RED, " it?"), ask(codec, WIDE, "and?"), ask(codec, "What is 2 plus 2?")]
        if family not in ONE_IMAGE:
            prompts.append(ask(codec, "Are ", RED, " and ", WIDE, " alike?"))
        engine = VLLMEngine(
            path,
            eos_token_ids=(),
            dtype=str(dtype),
            max_tokens=LONGEST,
            max_batch_size=8,
            threads=1,
            memory_fraction=SHARE,
        )
        try:
            first = await _sampled(engine, prompts)
            found = Finding(name=family, before=_gap(policy, first))
            move(policy)
            await EngineWeights(engine).push(policy, 1)
            after = _gap(policy, await _sampled(engine, prompts))
            return evolve(found, after=after, moved=_gap(policy, first))
        finally:
            engine.close()


async def _sampled(engine: VLLMEngine, prompts: Sequence[RenderedPrompt]) -> list[Reply]:
    async def reply(prompt: RenderedPrompt, seed: int) -> Reply:
        params = SamplingParams(max_new_tokens=REPLY, seed=seed)
        made = await engine.generate(
            GenerationRequest(prompt_token_ids=prompt.token_ids, images=prompt.images, params=params)
        )
        return prompt, made.token_ids, made.logprobs

    return await asyncio.gather(*(reply(prompt, seed) for seed, prompt in enumerate(prompts)))


def _gap(policy: TorchPolicy, replies: Sequence[Reply]) -> float:
    """The largest mean difference of the trainer's log-probs from those of a reply."""
    sequences = [
        WeightedTokens(
            token_ids_T=torch.tensor([*prompt.token_ids, *tokens]),
            weights_T=torch.tensor([0.0] * len(prompt.token_ids) + [1.0] * len(tokens)),
            prompt_length=len(prompt.token_ids),
            images=prompt.images,
        )
        for prompt, tokens, _ in replies
    ]
    batch = pack_sequences(sequences, group_ids=[*range(len(replies))], sample_ids=[0] * len(replies))
    found_A = policy.score(batch).logprobs_N[batch.action_mask_N]
    expected = torch.tensor([logprobs for *_, logprobs in replies])
    return float((found_A.view(expected.shape) - expected).abs().mean(-1).max())


TOWER = re.compile(r"^(?:model\.)?vision_tower\.(?!vision_model)")
"""Beginning of names of a tower's weights in files that transformers writes of a new model."""


def _name_as_published(file: Path) -> None:
    """Gives weights of towers in a file the names that published files have, which a trained model keeps, and by which
    alone vLLM knows them."""
    from safetensors.torch import load_file, save_file

    named = {TOWER.sub("vision_tower.vision_model.", name): tensor for name, tensor in load_file(file).items()}
    save_file(named, file, metadata={"format": "pt"})


def _turn_as_published(file: Path) -> None:
    """Turns the joined experts in a file as they lie in published files."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    turned = {name: tensor.transpose(1, 2).contiguous() for name, tensor in tensors.items() if ".experts." in name}
    save_file({**tensors, **turned}, file, metadata={"format": "pt"})
