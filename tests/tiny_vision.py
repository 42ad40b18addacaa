"""Models of transformers that see images, tiny and random, with their processors; and images for them."""

import io
import json
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any

from rollgrad.adapters.chat.pictures import VIDEO_PART, ImageRenderer, without_videos
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.domain.ports.chat_codec import RenderedPrompt
from tests.tiny_models import make_tiny_tokenizer, saved

PARTS_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NARROW = 8
HEAD = ContextVar("width of the heads of language models", default=NARROW)
"""vLLM's attention takes heads of 32 numbers or more on a CPU."""
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
}
QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 8,
    "initializer_range": 0.2,
}
FAMILIES = ("qwen2_5_vl", "idefics3", "qwen3_vl", "internvl", "llava_onevision", "gemma3")


def picture(color: tuple[int, int, int], *, width: int = 40, height: int = 40) -> bytes:
    """A PNG whose left half has a color, and whose right half is noise that the color seeds."""
    import torch
    from PIL import Image

    noise = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(sum(color)))
    image = Image.fromarray(noise.to(torch.uint8).numpy())
    image.paste(color, (0, 0, width // 2, height))
    written = io.BytesIO()
    image.save(written, format="PNG")
    return written.getvalue()


def glass() -> bytes:
    """A PNG of one color that is transparent at its left."""
    from PIL import Image

    image = Image.new("RGB", (40, 40), (0, 0, 200))
    image.putalpha(Image.linear_gradient("L").rotate(90).resize((40, 40)))
    written = io.BytesIO()
    image.save(written, format="PNG")
    return written.getvalue()


def _tokenizer(mark: str, *special: str, **named: str) -> Any:
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = PARTS_TEMPLATE.replace("IMAGE", mark)
    tokenizer._set_model_specific_special_tokens(named)  # as transformers does with those that files name
    return tokenizer


def _text(tokenizer: Any, **more: Any) -> dict[str, Any]:
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    times, rope = HEAD.get() // NARROW, more.get("rope_parameters")
    wide: dict[str, Any] = {"hidden_size": _width()}
    if "head_dim" in more:
        wide["head_dim"] = times * more["head_dim"]
    if rope is not None:
        wide["rope_parameters"] = {**rope, "mrope_section": [times * part for part in rope["mrope_section"]]}
    return {**TEXT, "vocab_size": len(tokenizer), **ends, **more, **wide}


def _width() -> int:
    """The hidden size of language models."""
    return int(TEXT["num_attention_heads"]) * HEAD.get()


def _qwen_tower(**more: Any) -> dict[str, Any]:
    return {**QWEN_TOWER, "out_hidden_size": _width(), **more}


def _qwen_tokens(tokenizer: Any) -> dict[str, int]:
    marks = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{mark}|>") for name, mark in marks.items()}


def qwen2_5_vl() -> tuple[Any, Any]:
    """A Qwen2.5-VL with windows in its tower, and positions of three numbers."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = _tokenizer(
        "<|vision_start|><|image_pad|><|vision_end|>",
        *("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
    )
    images = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, min_pixels=256, max_pixels=2048)
    config = Qwen2_5_VLConfig(
        text_config=_text(
            tokenizer, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        ),
        vision_config=_qwen_tower(window_size=32, fullatt_block_indexes=[1]),
        **_qwen_tokens(tokenizer),
        tie_word_embeddings=False,
    )
    return Qwen2_5_VLForConditionalGeneration(config), _processor(Qwen2_5_VLProcessor, images, tokenizer)


def qwen3_vl() -> tuple[Any, Any]:
    """A Qwen3-VL, whose first layers get features of the tower's layers."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = _tokenizer(
        "<|vision_start|><|image_pad|><|vision_end|>",
        *("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
    )
    images = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, min_pixels=256, max_pixels=2048)
    config = Qwen3VLConfig(
        text_config=_text(
            tokenizer,
            head_dim=8,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        ),
        vision_config=_qwen_tower(num_position_embeddings=64, deepstack_visual_indexes=[0]),
        **_qwen_tokens(tokenizer),
        tie_word_embeddings=False,
    )
    return Qwen3VLForConditionalGeneration(config), _processor(Qwen3VLProcessor, images, tokenizer)


def qwen3_5() -> tuple[Any, Any]:
    """A Qwen3.5, of whose layers one attends and one hands a state on."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = _tokenizer(
        "<|vision_start|><|image_pad|><|vision_end|>",
        *("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
    )
    images = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, min_pixels=256, max_pixels=2048)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    config = Qwen3_5Config(
        text_config=_text(
            tokenizer,
            head_dim=16,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=3,
            linear_num_value_heads=6,
            linear_key_head_dim=8 if HEAD.get() == NARROW else 128,
            linear_value_head_dim=8 if HEAD.get() == NARROW else 128,
            rope_parameters=rope | {"mrope_interleaved": True},
        ),
        vision_config=_qwen_tower(num_position_embeddings=64),
        **_qwen_tokens(tokenizer),
        tie_word_embeddings=False,
    )
    return Qwen3_5ForConditionalGeneration(config), _processor(Qwen3VLProcessor, images, tokenizer)


def idefics3() -> tuple[Any, Any]:
    """An Idefics3, whose class SmolVLM shares: images are cut into tiles."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = _tokenizer(
        "<image>",
        *("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
        *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    )
    images = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    config = Idefics3Config(
        text_config={"model_type": "llama", **_text(tokenizer), "head_dim": 32},  # which vLLM has on a CPU
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
            "initializer_range": 0.2,
        },
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    return Idefics3ForConditionalGeneration(config), Idefics3Processor(
        images, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template
    )


def internvl() -> tuple[Any, Any]:
    """An InternVL with a Qwen2 as its language model."""
    from transformers import InternVLConfig, InternVLForConditionalGeneration, InternVLProcessor
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    tokenizer = _tokenizer(
        "<IMG_CONTEXT>",
        *("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    images = GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, crop_to_patches=True, max_patches=4)
    config = InternVLConfig(
        text_config={"model_type": "qwen2", **_text(tokenizer)},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [32, 32],
            "patch_size": [8, 8],
            "initializer_range": 0.2,
        },
        downsample_ratio=0.5,
        image_seq_length=4,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        tie_word_embeddings=False,
    )
    return InternVLForConditionalGeneration(config), _processor(
        InternVLProcessor, images, tokenizer, image_seq_length=4
    )


def llava_onevision() -> tuple[Any, Any]:
    """A LLaVA-OneVision: tiles in a grid, with a token at the end of each of its lines."""
    from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, LlavaOnevisionProcessor
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )

    tokenizer = _tokenizer("<image>", "<image>", "<video>")
    grid = [[32, 32], [32, 64], [64, 32], [64, 64]]
    images = LlavaOnevisionImageProcessorPil(size={"height": 32, "width": 32}, image_grid_pinpoints=grid)
    config = LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **_text(tokenizer)},
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
            "vision_use_head": False,
        },
        image_grid_pinpoints=grid,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        tie_word_embeddings=False,
    )
    processor = _processor(
        LlavaOnevisionProcessor, images, tokenizer, num_image_tokens=16, vision_feature_select_strategy="full"
    )
    return LlavaOnevisionForConditionalGeneration(config), processor


def gemma3() -> tuple[Any, Any]:
    """A Gemma 3, in which the tokens of an image see each other, in a layer that looks back a little and in one that
    sees all."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer = _tokenizer(
        "<start_of_image>",
        *("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        boi_token="<start_of_image>",
        image_token="<image_soft_token>",
        eoi_token="<end_of_image>",
    )
    config = Gemma3Config(
        text_config=_text(tokenizer, head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        },
        mm_tokens_per_image=4,
        image_token_index=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        tie_word_embeddings=False,
    )
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    return Gemma3ForConditionalGeneration(config), Gemma3Processor(
        images, tokenizer, chat_template=tokenizer.chat_template, image_seq_length=4
    )


def _processor(kind: Any, images: Any, tokenizer: Any, **settings: Any) -> Any:
    return without_videos(kind)(images, tokenizer, chat_template=tokenizer.chat_template, **settings)


def tiny_vlm(family: str, *, seed: int = 0) -> tuple[Any, Any]:
    """A random model of a family, whose parts all have an effect, and its processor."""
    import torch

    from tests import tiny_vision_families

    torch.manual_seed(seed)
    model, processor = (globals().get(family) or getattr(tiny_vision_families, family))()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
            elif name.endswith("bias"):
                parameter.normal_(std=0.05)
    return model.eval(), processor


def save_tiny_vlm(family: str, path: Path, *, positions: int = 512, head: int = NARROW) -> str:
    """Writes a model of a family, of so many positions, with heads so wide, and its processor; returns the folder."""
    model, processor = copy_context().run(_with_heads, head, family)
    model.config.text_config.max_position_embeddings = positions  # they are rotations, of which no weight knows
    saved(model, processor, path)
    if VIDEO_PART in type(processor).__base__.get_attributes():  # published models have it, torchvision asks for it
        # GLM-4.1V's has a size, which vLLM reads.
        settings = {"size": {"shortest_edge": 256, "longest_edge": 65536}} if family == "glm4v" else {}
        (path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return str(path)


def _with_heads(width: int, family: str) -> tuple[Any, Any]:
    HEAD.set(width)
    return tiny_vlm(family)


def save_tiny_reward(base: str, path: Path) -> None:
    """Writes the model in the folder `base` as a reward model, whose head is random, to the folder `path`."""
    import torch

    from rollgrad.adapters.models.torch.loading.loading import load_critic, load_tokenizer
    from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
    from rollgrad.adapters.models.torch.rewards.trained_reward import TorchReward

    model, _ = load_critic(base, dtype=torch.float32, device=torch.device("cpu"), flag="base")
    width = model.config.get_text_config().hidden_size
    head = {"weight": torch.randn(1, width, generator=torch.Generator().manual_seed(1))}
    settings = OptimizerSettings(lr=1e-3, total_steps=1)
    TorchReward(model, load_tokenizer(base, flag="base"), settings, head=head).save(path)


def codec_of(processor: Any) -> TemplateCodec:
    """The codec of a processor's template."""
    return TemplateCodec(processor.tokenizer, images=ImageRenderer(processor))


def ask(codec: TemplateCodec, *parts: bytes | str) -> RenderedPrompt:
    """A prompt of one message with texts and images."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return codec.render([{"role": "user", "content": content}])
