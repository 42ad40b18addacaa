"""A tiny model that sees images learns to name shapes, which this script draws: `make demo-shapes`.

The model, an Idefics3 (the class of SmolVLM) of random weights, is told nothing but whether its one token was
right: it first finds out which words are answers, and then has to look.
"""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro
from attrs import define, frozen
from smollm2 import HERE, Options, show

import rollgrad
from rollgrad.entrypoints.cli.logs import configure_logging

SHAPES = ("circle", "square", "triangle", "cross")
SIZE = 32
"""Pixels of the side of an image, as the model sees it."""
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %} :{% endif %}"
)


def draw(shape: str, chance: random.Random) -> Any:
    """Returns an image of a shape, of random place, size and color, on a random dark ground."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIZE, SIZE), tuple(chance.randrange(80) for _ in range(3)))
    pen, color = ImageDraw.Draw(image), tuple(chance.randrange(150, 256) for _ in range(3))
    side = chance.randrange(16, 24)
    left, top = chance.randrange(SIZE - side), chance.randrange(SIZE - side)
    right, bottom, middle = left + side, top + side, left + side // 2
    if shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=color)
    elif shape == "square":
        pen.rectangle((left, top, right, bottom), fill=color)
    elif shape == "triangle":
        pen.polygon([(middle, top), (right, bottom), (left, bottom)], fill=color)
    else:
        pen.line((left, top, right, bottom), fill=color, width=4)
        pen.line((right, top, left, bottom), fill=color, width=4)
    return image


def one_shape(chance: random.Random) -> tuple[Any, str, str]:
    """Returns an image, the question about it, and the answer."""
    shape = chance.choice(SHAPES)
    return draw(shape, chance), "<image> what shape ?", shape


@frozen(kw_only=True)
class PictureTask:
    """A task of images: what draws an image, with its question and its answer; the words of answers; and the
    environment of its episodes, None where they have one turn."""

    drawn: Callable[[random.Random], tuple[Any, str, str]]
    words: tuple[str, ...]
    environment: Callable[[], Any] | None = None


SHAPE_TASK = PictureTask(drawn=one_shape, words=SHAPES)


@define(kw_only=True)
class PictureOptions(Options):
    """Flags of this example."""

    rows: int = 2000
    """Images to train on; a tenth as many are held out."""


def prepare(task: PictureTask, config: Any, folder: Path, rows: int) -> None:
    """Draws the images of a task, makes a model, and gives both to a run."""
    seed = config.train.seed
    chance = random.Random(seed)
    for name, count in {"train": rows, "test": rows // 10}.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        written = []
        for number in range(count):
            image, question, answer = task.drawn(chance)
            path = folder / name / f"{number}.png"
            image.save(path)
            written.append({"prompt": question, "image": str(path), "label": answer})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    make_model(folder / "model", seed, task.words)
    config.actor.model_name_or_path = str(folder / "model")
    config.data.prompt_dataset, config.eval.dataset = str(folder / "train.jsonl"), str(folder / "test.jsonl")


def make_model(path: Path, seed: int, answers: tuple[str, ...]) -> None:
    """Writes a random model with its processor."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3Processor,
        PreTrainedTokenizerFast,
    )
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    words = ["<pad>", "<unk>", "<end>", "what", "shape", "?", ":", *answers]
    words += [f"<word {number}>" for number in range(8)]  # words that are no answer
    words += ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"]
    table = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    table.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=table,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
        additional_special_tokens=words[-4:],
        chat_template=TEMPLATE,
    )
    # Heads of 32 numbers: the least that vLLM's attention has on a CPU.
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    marks = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in {"image_token_id": "<image>"}.items()}
    ends = {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None}
    torch.manual_seed(seed)
    model = Idefics3ForConditionalGeneration(
        Idefics3Config(
            text_config={
                "model_type": "llama",
                "vocab_size": len(words),
                "max_position_embeddings": 64,
                **sizes,
                **ends,
            },
            vision_config={"image_size": SIZE, "patch_size": 8, **sizes},
            scale_factor=2,
            tie_word_embeddings=False,
            pad_token_id=0,
            **marks,
        )
    )
    model.save_pretrained(path)
    images = Idefics3ImageProcessorPil(
        do_image_splitting=False, size={"longest_edge": SIZE}, max_image_size={"longest_edge": SIZE}
    )
    tokens = (SIZE // 8) ** 2 // 2**2
    Idefics3Processor(images, tokenizer, image_seq_len=tokens, chat_template=TEMPLATE).save_pretrained(path)


def main(name: str, task: PictureTask, description: str) -> None:
    """Draws, trains with the settings of NAME.yaml, and shows what came of it."""
    configure_logging()
    config = rollgrad.load_config(HERE / f"{name}.yaml")
    assert config.train.max_steps is not None
    steps, output = config.train.max_steps, Path(config.ckpt.output_dir)
    defaults = PictureOptions(seed=config.train.seed, steps=steps, output_dir=output)
    options = tyro.cli(PictureOptions, default=defaults, description=description)
    config.train.seed, config.train.max_steps = options.seed, options.steps
    config.ckpt.output_dir, config.ckpt.overwrite = str(options.output_dir), True
    prepare(task, config, options.output_dir.with_name(f"{options.output_dir.name}_data"), options.rows)
    started = time.monotonic()
    show(rollgrad.train(config, environment=task.environment), time.monotonic() - started, "images")


if __name__ == "__main__":
    main("shapes", SHAPE_TASK, "Train a tiny model to name the shapes in images.")
