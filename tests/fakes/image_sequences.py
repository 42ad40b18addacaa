"""Passes over images that several processes make together: importable there."""

from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from rollgrad.adapters.models.torch.forward import PackedLM, PackedValue
from rollgrad.adapters.models.torch.layers.attention import install_attention
from rollgrad.domain.batches.examples import ExampleBatch, pack_sequences
from rollgrad.domain.episodes.examples import WeightedTokens
from tests.fakes.sequence_parallel import gradients, joined
from tests.meeting_processes import fork_all
from tests.tiny_vision import ask, codec_of, picture, tiny_vlm

RED, WIDE = picture((200, 0, 0)), picture((0, 150, 0), width=56, height=24)


def passes(family: str) -> dict[str, Any]:
    """This process's part of a batch with images and of one without: columns of the action tokens, and gradients."""
    model, processor = tiny_vlm(family)
    install_attention(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    whole = batch(codec_of(processor), several=family != "llava_onevision")
    result: dict[str, Any] = {}
    for name, packed in (("images", whole), ("texts", whole.select([3, 4]))):
        weights_A = torch.linspace(-1, 1, int(packed.action_mask_N.sum()))
        lm = PackedLM(model)
        logprobs_A, entropy_A = lm(packed)
        result[name] = {"logprobs": logprobs_A.detach(), "entropy": entropy_A.detach()}
        result[name]["gradients"] = gradients(lm, (weights_A * (logprobs_A + 0.3 * entropy_A)).sum())
        value = PackedValue(model, {"weight": torch.linspace(-1, 1, model.config.get_text_config().hidden_size)[None]})
        values_A = value(packed)
        result[name]["values"] = values_A.detach()
        result[name]["gradients_of_values"] = gradients(value, (weights_A * values_A.square()).sum())
    return result


def batch(codec: Any, *, several: bool) -> ExampleBatch:
    """Two replies to a prompt with images, one to another, and two to texts."""
    pictured = ask(codec, "Is ", RED, " like ", WIDE, "?") if several else ask(codec, "Is it ", RED, "?")
    prompts = [pictured, pictured, ask(codec, WIDE, "and?"), ask(codec, "2 plus 2?"), ask(codec, "What is it, then?")]
    sequences = [
        WeightedTokens(
            token_ids_T=torch.tensor([*prompt.token_ids, *reply]),
            weights_T=torch.tensor([0.0] * len(prompt.token_ids) + [0.1] * len(reply)),
            prompt_length=len(prompt.token_ids),
            images=prompt.images,
        )
        for prompt, reply in zip(prompts, ([5, 9, 11], [7], [8, 6], [9], [4] * 9), strict=True)
    ]
    packed = pack_sequences(sequences, group_ids=[0, 0, 1, 2, 3], sample_ids=[0, 1, 0, 0, 0])
    return evolve(packed, unit_ids_S=torch.arange(len(packed)))


def work(folder: Path, timeout: float, rank: int, processes: int, families: list[str]) -> None:
    """One of the processes: its results go to the file `<rank>` of `folder`."""
    with joined(folder, timeout, rank, processes):
        torch.save({family: passes(family) for family in families}, folder / str(rank))


if __name__ == "__main__":
    fork_all(work, tiny_vlm)
