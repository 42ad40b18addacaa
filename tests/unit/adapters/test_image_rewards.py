"""Reward models that see images: scores and gradients are those of transformers' classifier, one by one."""

import copy
import inspect
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from rollgrad.adapters.chat.pictures import ImageRenderer
from rollgrad.adapters.models.ray.wire import SentReplies
from rollgrad.adapters.models.torch.forward import PackedReward
from rollgrad.adapters.models.torch.layers.attention import install_attention
from rollgrad.adapters.models.torch.layers.classifier import sequence_classifier
from rollgrad.adapters.models.torch.layers.images import joined_tensors, placeholders
from rollgrad.adapters.models.torch.layers.layout import build_layout
from rollgrad.adapters.models.torch.rewards.reward_model import RewardModel, _packed
from rollgrad.adapters.models.torch.rewards.reward_text import EncodedText
from rollgrad.adapters.models.torch.rewards.together import PassesTogether
from rollgrad.domain.batches.examples import pack_comparisons
from rollgrad.domain.episodes.examples import Preference, WeightedTokens
from rollgrad.domain.episodes.images import PlacedImages
from rollgrad.domain.episodes.rewards import RewardInput
from rollgrad.domain.errors import CheckpointError
from rollgrad.domain.ports.chat_codec import RenderedPrompt
from tests.tiny_vision import FAMILIES, ask, codec_of, picture, save_tiny_reward, save_tiny_vlm, tiny_vlm

RED, BLUE, WIDE = picture((200, 0, 0)), picture((0, 0, 200)), picture((0, 150, 0), width=56, height=24)
CPU = torch.device("cpu")
Text = tuple[tuple[int, ...], PlacedImages]
"""Tokens, and the images among them."""


def replied(prompt: RenderedPrompt, *tokens: int) -> Text:
    return (*prompt.token_ids, *tokens), prompt.images


def texts_of(processor: Any) -> list[Text]:
    """Replies to two images, two replies to one, one to text, and one to another image behind equal tokens."""
    codec = codec_of(processor)
    red = ask(codec, "What is ", RED, "?")
    texts = [replied(red, 5, 9, 11), replied(red, 7), replied(ask(codec, "2 plus 2?"), 20, 30)]
    return [*texts, replied(ask(codec, WIDE, "and?"), 5, 6), replied(ask(codec, "What is ", BLUE, "?"), 7)]


def one_by_one(classifier: Any, texts: Sequence[Text]) -> Tensor:
    """Scores by a classifier's own forward pass over each text."""
    body = inspect.signature(classifier.base_model.forward).parameters.keys()
    found = []
    for tokens, images in texts:
        tokens_T = torch.tensor(tokens)
        inputs: dict[str, Any] = joined_tensors(images, CPU, torch.float32) if images else {}
        for name in body & {"mm_token_type_ids", "token_type_ids"} if images else ():
            inputs[name] = placeholders(classifier, tokens_T, images).int()[None]
        found.append(classifier(input_ids=tokens_T[None], use_cache=False, **inputs).logits[0, 0])
    return torch.stack(found)


def head_of(model: Any) -> dict[str, Tensor]:
    width = model.config.get_text_config().hidden_size
    return {"weight": torch.randn(1, width, generator=torch.Generator().manual_seed(1))}


def classifier_of(model: Any, head: dict[str, Tensor]) -> Any:
    """The classifier with a copy of a model's body, and a head."""
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    classifier = sequence_classifier(config, torch.float32).eval()
    classifier.base_model.load_state_dict(model.base_model.state_dict())
    classifier.score.load_state_dict(head)
    return classifier


def compared(texts: Sequence[Text]) -> list[Preference]:
    """Pairs of neighbours."""
    replies = [
        WeightedTokens(
            token_ids_T=torch.tensor(tokens),
            weights_T=torch.tensor([0.0] * (len(tokens) - 1) + [1.0]),
            prompt_length=len(tokens) - 1,
            images=images,
        )
        for tokens, images in texts
    ]
    return [Preference(chosen=one, rejected=other, row=0) for one, other in pairwise(replies)]


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_gradients_are_those_of_one_text_at_a_time(family: str) -> None:
    model, processor = tiny_vlm(family)
    head = head_of(model)
    own = classifier_of(model, head)
    install_attention(model)
    packed = PackedReward(model, head)
    texts = texts_of(processor)
    batch = pack_comparisons(compared(texts))
    found_A = packed(batch)
    scores = one_by_one(own, texts)
    expected_A = torch.stack([scores[place] for one in range(len(texts) - 1) for place in (one, one + 1)])
    torch.testing.assert_close(found_A, expected_A, atol=1e-5, rtol=1e-5)
    assert len({round(float(score), 3) for score in scores}) == len(texts)
    weights_A = torch.linspace(-1, 2, len(found_A))
    (found_A * weights_A).sum().backward()
    (expected_A * weights_A).sum().backward()
    theirs = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
    largest = max(float(grad.abs().max()) for grad in theirs.values())
    mine = {
        name.replace("value_head.", "score."): p.grad for name, p in packed.named_parameters() if p.grad is not None
    }
    assert mine.keys() == theirs.keys()
    assert any("vis" in name for name in mine)  # the tower learns
    for name, grad in mine.items():
        torch.testing.assert_close(grad, theirs[name], atol=1e-5 * largest, rtol=0, msg=name)


def saved(family: str, path: Path) -> tuple[Any, list[Text]]:
    """Writes a model of a family as a reward model, with its processor; returns its classifier, and texts."""
    save_tiny_reward(save_tiny_vlm(family, path / "base"), path / "rm")
    model, processor = tiny_vlm(family)
    return classifier_of(model, head_of(model)), texts_of(processor)


def judge_of(path: Path, processor: Any, **settings: Any) -> RewardModel:
    return RewardModel.load(
        str(path),
        dtype=torch.float32,
        device=CPU,
        flag="--model",
        policy_tokenizer=processor.tokenizer,
        images=ImageRenderer(processor),
        codec=codec_of(processor),
        **settings,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_scores_as_transformers_does(family: str, tmp_path: Path) -> None:
    """By our judge, in passes of any size, and by its class, which finds all weights in the files."""
    classifier, texts = saved(family, tmp_path)
    with torch.no_grad():
        expected = one_by_one(classifier, texts).tolist()
        again, info = type(classifier).from_pretrained(tmp_path / "rm", output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert one_by_one(again.eval(), texts).tolist() == pytest.approx(expected, abs=1e-5)
    assert again.config.architectures == [type(classifier).__name__]
    _, processor = tiny_vlm(family)
    for budget in (1, 16384):
        judge = judge_of(tmp_path / "rm", processor, batch_tokens=budget)
        sent = SentReplies.of([RewardInput(text="", token_ids=tokens, images=images) for tokens, images in texts])
        judged = judge.judge(sent)  # type: ignore[arg-type] # which is gone through once
        assert judged == [(pytest.approx(score, abs=1e-5), False) for score in expected]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """The folder of a reward model, its classifier and its processor."""
    path = tmp_path_factory.mktemp("qwen")
    classifier, _ = saved("qwen2_5_vl", path)
    return path / "rm", classifier, tiny_vlm("qwen2_5_vl")[1]


def test_an_answer_of_no_tokens_has_the_images_of_its_prompt(model: tuple[Path, Any, Any]) -> None:
    path, classifier, processor = model
    codec = codec_of(processor)
    prompt = ask(codec, "What is ", RED, "?")
    mark = processor.image_token
    judge = judge_of(path, processor)
    whole = replied(prompt, *codec.encode("red<|im_end|>"))
    spelled = RewardInput(text=f"{prompt.text}red{mark}<|im_end|>\n", images=prompt.images)
    ((score, truncated),) = judge.judge([spelled])
    assert not truncated
    with torch.no_grad():
        assert score == pytest.approx(float(one_by_one(classifier, [whole])), abs=1e-5)


def test_a_long_text_loses_whole_images(model: tuple[Path, Any, Any]) -> None:
    path, classifier, processor = model
    prompt = ask(codec_of(processor), RED, "and ", WIDE, "?")
    first, second = prompt.images
    tokens = (*prompt.token_ids, 5, 6)
    judge = judge_of(path, processor, max_length=len(tokens) - first.start - 1)  # one token of the first image
    (found,) = [judge.encode_reply(RewardInput(text="", token_ids=tokens, images=prompt.images))]
    assert found.truncated
    assert found.tokens == tokens[first.stop :]
    assert found.images == (second.moved(-first.stop),)
    with torch.no_grad():
        expected = float(one_by_one(classifier, [(found.tokens, found.images)]))
    assert judge.score_encoded([found]) == pytest.approx([expected], abs=1e-5)


def test_a_divided_model_computes_an_image_in_every_pass(
    model: tuple[Path, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes, of which another may have one, put the tower together in all passes."""
    path, classifier, processor = model
    passes = []
    monkeypatch.setattr(PassesTogether, "_any_has", lambda self, mine: mine)

    def divide(module: Any) -> Any:
        return lambda batch: passes.append(batch) or module(batch)

    judge = judge_of(path, processor, divide=divide, batch_tokens=1)
    texts = texts_of(processor)
    with torch.no_grad():
        expected = one_by_one(classifier, texts).tolist()
    scores = judge.score_encoded([EncodedText(tokens, truncated=False, images=images) for tokens, images in texts])
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len(passes) == len(texts)
    assert all(any(batch.images_S) for batch in passes)


def test_an_image_of_several_replies_is_computed_once(model: tuple[Path, Any, Any]) -> None:
    texts = [EncodedText(tokens, truncated=False, images=images) for tokens, images in texts_of(model[2])]
    seen = build_layout(_packed(texts)).images
    assert len(seen) == len({placed.image.digest for placed in seen}) == 3


def test_what_has_no_head_of_scores_is_refused(model: tuple[Path, Any, Any], tmp_path: Path) -> None:
    path, _, processor = model
    with pytest.raises(CheckpointError, match=r"no reward model \(its weights lack score.weight\)"):
        judge_of(path.with_name("base"), processor)


def test_images_travel_once_and_whole(model: tuple[Path, Any, Any]) -> None:
    _, _, processor = model
    red = ask(codec_of(processor), RED)
    replies = [RewardInput(text=name, token_ids=(1,), images=red.images) for name in ("one", "two")]
    sent = SentReplies.of(replies)
    assert [list(tensors) for tensors in sent.tensors.values()] == [list(red.images[0].image.tensors)]
    assert not any(placed.image.tensors for reply in sent.replies for placed in reply.images)
    for found, reply in zip(sent, replies, strict=True):
        assert evolve(found, images=()) == evolve(reply, images=())
        (placed,), (own,) = found.images, reply.images
        assert placed == own
        assert placed.image.data == RED
        for name, tensor in own.image.tensors.items():
            assert torch.equal(placed.image.tensors[name], tensor)
