"""Models that see images: tokens are their processor's, and packed passes what transformers computes one by one."""

import asyncio
import copy
import inspect
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rollgrad.adapters.chat.image_files import opened
from rollgrad.adapters.chat.pictures import ImageRenderer
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.models.torch.compiling import compile_layers
from rollgrad.adapters.models.torch.forward import PackedLM
from rollgrad.adapters.models.torch.layers import image_attention
from rollgrad.adapters.models.torch.layers.attention import install_attention
from rollgrad.adapters.models.torch.layers.images import joined_tensors, placeholders
from rollgrad.adapters.models.torch.loading.image_check import check_images
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm
from rollgrad.application.episodes.ledger import TokenLedger
from rollgrad.application.episodes.runtime import AgentRuntime
from rollgrad.application.episodes.session import AgentSession
from rollgrad.domain.batches.packed import RolloutBatch, pack
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.episodes.images import Image, PlacedImage
from rollgrad.domain.episodes.messages import Action
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.trajectory import Trajectory, TrajectoryBuilder
from rollgrad.domain.errors import ConfigurationError, DataError
from rollgrad.domain.ports.chat_codec import RenderedPrompt
from rollgrad.domain.ports.environment import Environment, StepResult, WholePrompt
from rollgrad.domain.ports.rollout_engine import RolloutEngine
from tests.compiled_layers import AS_IT_IS, AS_WRITTEN, compiler, graphs
from tests.fakes import images as image_models
from tests.tiny_vision import TEXT, ask, codec_of, picture, save_tiny_vlm, tiny_vlm

EXACT = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "idefics3", "internvl", "llava_onevision", "gemma3")
WIDE_FAMILIES = [
    pytest.param(family, marks=pytest.mark.wide)
    for family in ("qwen2_vl", "qwen3_vl_moe", "glm4v", "llava", "llava_next")
]
RED, BLUE, WIDE = picture((200, 0, 0)), picture((0, 0, 200)), picture((0, 150, 0), width=56, height=24)


def played(prompt: RenderedPrompt, *actions: list[int], group: int, sample: int = 0) -> Trajectory:
    """An episode that replies with `actions`, and is asked the prompt again between them."""
    images, builder = list(prompt.images), None
    tokens = list(prompt.token_ids)
    for turn, action in enumerate(actions):
        if turn:
            images += [placed.moved(len(tokens)) for placed in prompt.images]
            tokens += prompt.token_ids
        tokens += action
    builder = TrajectoryBuilder(prompt.token_ids, group_id=group, sample_id=sample, images=tuple(images))
    for turn, action in enumerate(actions):
        if turn:
            builder.add_observation(prompt.token_ids)
        builder.add_action(
            Generation(
                token_ids=action,
                logprobs=[-1.0] * len(action),
                versions=[0] * len(action),
                stop_reason=StopReason.STOP,
            )
        )
    return builder.build(stop_reason=StopReason.STOP)


def one_by_one(model: Any, batch: RolloutBatch) -> Tensor:
    """Log-probs of the action tokens by the model's own forward pass over each sequence."""
    known = inspect.signature(model.forward).parameters.keys()
    found = []
    for index, start in enumerate(batch.starts_S.tolist()):
        stop = start + int(batch.lengths_S[index])
        tokens_T, images = batch.tokens_N[start:stop], batch.images_S[index] if batch.images_S else ()
        inputs: dict[str, Any] = joined_tensors(images, torch.device("cpu"), torch.float32) if images else {}
        for name in known & {"mm_token_type_ids", "token_type_ids"} if images else ():
            inputs[name] = placeholders(model, tokens_T, images).int()[None]
        logits_TV = model(input_ids=tokens_T[None], use_cache=False, **inputs).logits[0]
        logprobs_T = logits_TV[:-1].log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0]
        found.append(logprobs_T[batch.action_mask_N[start + 1 : stop]])
    return torch.cat(found)


def batch_of(codec: TemplateCodec) -> RolloutBatch:
    """Groups that share a prompt with its image, or its tokens alone; a reply to text; and one of two turns."""
    red, wide, text = ask(codec, "What is ", RED, "?"), ask(codec, WIDE, "and?"), ask(codec, "2 plus 2?")
    return pack(
        [
            played(red, [5, 9, 11], group=0),
            played(red, [7], group=0, sample=1),
            played(text, [20, 30], group=1),
            played(wide, [5, 6, 8], [40, 41], group=2),
            played(ask(codec, BLUE, "?"), [12], group=3),
            played(ask(codec, RED, "?"), [12], group=3, sample=1),  # equal tokens, another image
        ]
    )


@pytest.mark.parametrize("family", [*EXACT, *WIDE_FAMILIES])
def test_packed_values_and_gradients_are_those_of_one_sequence_at_a_time(family: str) -> None:
    model, processor = tiny_vlm(family)
    own = copy.deepcopy(model)
    install_attention(model)
    batch = batch_of(codec_of(processor))
    weights_A = torch.linspace(-1, 1, int(batch.action_mask_N.sum()))
    expected_A, found_A = one_by_one(own, batch), PackedLM(model)(batch)[0]
    torch.testing.assert_close(found_A, expected_A, atol=1e-5, rtol=1e-5)
    (expected_A * weights_A).sum().backward()
    (found_A * weights_A).sum().backward()
    largest = max(float(p.grad.abs().max()) for p in own.parameters() if p.grad is not None)
    seen = 0.0
    for (name, mine), theirs in zip(model.named_parameters(), own.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None and theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5 * largest, rtol=0, msg=name)
            seen += float(mine.grad.abs().max()) * ("vis" in name)
    assert seen > 0  # the tower learns


def test_a_model_of_texts_or_images_is_loaded_for_what_it_is_to_see(tmp_path: Path) -> None:
    """Qwen3.5, whose tower a run of texts leaves out."""
    path = save_tiny_vlm("qwen3_5", tmp_path)
    seeing = image_models.policy(path).module  # which compares what it makes of images
    reading = load_causal_lm(path, dtype=torch.float32, device=torch.device("cpu"), flag="--model")
    tower = {name for name, _ in seeing.named_parameters() if "visual" in name}
    assert tower
    assert not any("visual" in name for name, _ in reading.named_parameters())
    assert len([*seeing.parameters()]) == len([*reading.parameters()]) + len(tower)


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.parametrize(("family", "backend"), [("qwen2_5_vl", AS_WRITTEN), ("gemma3", AS_IT_IS)])
def test_compiled_layers_compute_images_as_others_do(family: str, backend: str) -> None:
    model, processor = tiny_vlm(family)
    install_attention(model)
    batch = batch_of(codec_of(processor))

    def passed() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        logprobs_A = PackedLM(model)(batch)[0]
        (logprobs_A * torch.linspace(-1, 1, len(logprobs_A))).sum().backward()
        return logprobs_A.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected_A, expected = passed()
    with compiler(backend):
        compile_layers(model)
        found_A, found = passed()
        assert graphs() > 1
    torch.testing.assert_close(found_A, expected_A, atol=1e-5, rtol=0)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5 * largest, rtol=0, msg=name)


@pytest.mark.parametrize("family", EXACT)
def test_tokens_and_tensors_are_those_of_the_processor(family: str) -> None:
    _, processor = tiny_vlm(family)
    codec = codec_of(processor)
    found = ask(codec, "Is ", WIDE, " red?")
    content = [{"type": "text", "text": "Is "}, {"type": "image"}, {"type": "text", "text": " red?"}]
    text = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    expected = processor(text=[text], images=[opened(WIDE)], return_tensors="pt", add_special_tokens=False)
    assert found.token_ids == tuple(expected["input_ids"][0].tolist())
    (placed,) = found.images
    for name, tensor in placed.image.tensors.items():
        torch.testing.assert_close(tensor, expected[name])
    mark = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    spelled = ask(codec, "Is ", WIDE, f" like {processor.image_token}?")
    assert spelled.images == found.images
    assert mark not in spelled.token_ids[placed.stop :]  # a mark that the user spells out is text


@pytest.mark.parametrize("family", [*EXACT, *WIDE_FAMILIES])
def test_a_family_is_accepted(family: str) -> None:
    model, processor = tiny_vlm(family)
    tower = model.config.vision_config._attn_implementation
    install_attention(model)
    check_images(model, ImageRenderer(processor), family, "--model")
    assert model.config.vision_config._attn_implementation == tower != "eager"  # which keeps all scores of an image


@pytest.mark.parametrize("family", EXACT)
def test_several_images_are_those_of_the_processor_or_refused(family: str) -> None:
    _, processor = tiny_vlm(family)
    codec, image = codec_of(processor), {"type": "image", "image": RED}
    text = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}] * 2}], tokenize=False, add_generation_prompt=True
    )
    expected = processor(text=[text], images=[[opened(RED)] * 2], return_tensors="pt", add_special_tokens=False)
    if family != "llava_onevision":
        assert ask(codec, RED, RED).token_ids == tuple(expected["input_ids"][0].tolist())
        return
    asked = [{"role": "user", "content": [image]}, {"role": "assistant", "content": "red"}]
    reply = codec.encode("red")
    with pytest.raises(DataError, match="2 images, which the model's processor renders together"):
        ask(codec, RED, RED)
    with pytest.raises(DataError, match="2 images, which the model's processor renders together"):
        codec.continued(asked, [{"role": "user", "content": [image]}], reply_token_ids=reply)
    with pytest.raises(DataError, match="2 images, which the model's processor renders together"):
        codec.marked(processor.image_token, [RED], earlier=1)


@pytest.mark.parametrize("template", ["smolvlm", "llava_onevision"])
def test_templates_that_read_parts_alone_write_texts(template: str) -> None:
    """Those of the models themselves, which take the characters of a text for parts and write none of them."""
    _, processor = tiny_vlm("idefics3")
    processor.tokenizer.chat_template = {
        "smolvlm": (
            "{% for message in messages %}{{message['role'] | capitalize}}"
            "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
            "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
            "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
        ),
        "llava_onevision": (
            "{% for message in messages %}{{'<|im_start|>' + message['role'] + ' '}}"
            "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}"
            "{% endfor %}"
            "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
            "{{ '\n' + content['text'] }}{% endfor %}{{'<|im_end|>'}}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        ),
    }[template]
    codec = codec_of(processor)
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 plus 2?"}]
    rendered = codec.render(asked)
    assert "Be brief." in rendered.text
    assert "2 plus 2?" in rendered.text
    answered = [*asked, {"role": "assistant", "content": "4"}]
    new = [{"role": "user", "content": [{"type": "image", "image": RED}, {"type": "text", "text": "and?"}]}]
    found = codec.continued(answered, new, reply_token_ids=codec.encode("4<|im_end|>"))
    assert found is not None
    assert "and?" in codec.decode(found.token_ids)


class Opening(Environment):
    """Opens an episode with a text, and ends it."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def reset(self, prompt: Prompt) -> str:
        return self._text

    async def step(self, action: Action) -> StepResult:
        return StepResult(terminated=True)

    async def close(self) -> None:
        """Has nothing to close."""


async def test_a_text_in_the_place_of_a_prompt_keeps_its_images() -> None:
    _, processor = tiny_vlm("qwen2_5_vl")
    codec, asked = codec_of(processor), []

    class Engine:
        async def generate(self, request: GenerationRequest, **_: Any) -> Generation:
            asked.append(request)
            return Generation(token_ids=[5], logprobs=[-1.0], versions=[0], stop_reason=StopReason.STOP)

    async def play(opening: str) -> None:
        rendered = ask(codec, "What is ", RED, "?")
        prompt = Prompt(token_ids=rendered.token_ids, text=rendered.text, images=rendered.images)
        runtime = AgentRuntime(cast("RolloutEngine", Engine()), codec, max_turns=1)
        session = AgentSession(Opening(opening))
        async for _ in runtime.play(session, TokenLedger(codec), prompt, SamplingParams(max_new_tokens=1, seed=0)):
            pass

    await play(WholePrompt("Look: " + ask(codec, "What is ", RED, "?").text))
    (request,), (placed,) = asked, ask(codec, RED).images
    (found,) = request.images
    assert found.image == placed.image
    mark = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    assert set(request.prompt_token_ids[found.start : found.stop]) == {mark}
    with pytest.raises(DataError, match="0 marks for 1 images"):
        await play(WholePrompt("Look!"))
    with pytest.raises(DataError, match="no image that it stands for"):
        await play(f" and {processor.image_token}?")


def test_a_model_whose_images_are_computed_otherwise_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = tiny_vlm("gemma3")
    install_attention(model)
    monkeypatch.setattr(image_attention, "sees_whole_images", lambda model: False)
    with pytest.raises(ConfigurationError, match=r"gemma3.*Gemma3ForConditionalGeneration.*leave out --data.image_key"):
        check_images(model, ImageRenderer(processor), "gemma3", "--model")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "idefics3", "gemma3"])
async def test_replies_to_images_are_scored_as_they_were_sampled(family: str) -> None:
    model, processor = tiny_vlm(family)
    own = copy.deepcopy(model)
    install_attention(model)
    codec = codec_of(processor)
    engine = EmbeddedEngine(model, eos_token_ids=[])
    prompts = [ask(codec, "What is ", data, "?") for data in (RED, RED, BLUE)] + [ask(codec, "2 plus 2?")]

    def request(prompt: RenderedPrompt, seed: int, **changes: Any) -> GenerationRequest:
        params = SamplingParams(max_new_tokens=6, seed=seed)
        return GenerationRequest(
            prompt_token_ids=prompt.token_ids, params=params, keep=True, images=changes.get("images", prompt.images)
        )

    async def replies() -> list[Generation]:
        together = [engine.generate(request(prompt, seed)) for seed, prompt in enumerate(prompts)]
        return [
            *await asyncio.gather(*together),
            await engine.generate(request(prompts[2], 0, images=prompts[0].images)),
        ]

    *found, again = await replies()
    batch = pack([played(p, list(r.token_ids), group=n) for n, (p, r) in enumerate(zip(prompts, found, strict=True))])
    for reply, expected_T in zip(found, one_by_one(own, batch).split([6] * len(prompts)), strict=True):
        torch.testing.assert_close(torch.tensor(reply.logprobs), expected_T, atol=1e-5, rtol=1e-5)
    assert again.token_ids == found[0].token_ids  # equal tokens with other images are another prompt


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_a_conversation_goes_on_with_images(family: str) -> None:
    _, processor = tiny_vlm(family)
    codec = codec_of(processor)
    image = {"type": "image", "image": WIDE}
    asked = [{"role": "user", "content": [{"type": "image", "image": RED}, {"type": "text", "text": "?"}]}]
    then = [{"role": "user", "content": [image, {"type": "text", "text": "and?"}]}]
    answered = [*asked, {"role": "assistant", "content": "red"}]
    ledger, reply = TokenLedger(codec), codec.encode("red")
    first = ledger.prepare(asked)
    ledger.commit(
        first,
        Generation(
            token_ids=reply, logprobs=[-1.0] * len(reply), versions=[0] * len(reply), stop_reason=StopReason.STOP
        ),
        answered[-1],
    )
    second, whole = ledger.prepare([*answered, *then]), codec.render([*answered, *then])
    assert second.parent == 0
    assert (second.token_ids, second.images) == (whole.token_ids, whole.images)
    other = [{"role": "user", "content": [{"type": "image", "image": BLUE}, {"type": "text", "text": "?"}]}]
    assert ledger.prepare([*other, *answered[1:], *then]).parent is None  # another image is another history
    mark = processor.tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}], tokenize=False)
    followed = ledger.follow(f" so {mark}", [WIDE])
    assert followed.images[0] == first.images[0]
    assert followed.images[1].image == whole.images[1].image


def gemma4(kind: str | None) -> Any:
    """A Gemma 4 with a layer that looks back a little, and one that sees all."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    torch.manual_seed(0)
    text = {**TEXT, "vocab_size": 60, "head_dim": 8, "global_head_dim": 8, "sliding_window": 6, "pad_token_id": 0}
    tower = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2)
    config = Gemma4Config(
        text_config={
            **text,
            "layer_types": ["sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": 60,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 0,
            "use_bidirectional_attention": kind,
        },
        vision_config={
            **tower,
            "hidden_size": 32,
            "intermediate_size": 48,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 128,
        },
        audio_config=None,
        image_token_id=59,
        video_token_id=58,
        audio_token_id=57,
        tie_word_embeddings=False,
    )
    model = Gemma4ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model.eval()


@pytest.mark.parametrize("kind", ["vision", None])
def test_tokens_of_an_image_see_each_other_where_layers_have_windows(kind: str | None) -> None:
    """Gemma 4, larger and smaller ones; its processor needs torchvision, so that the tensors are made here."""
    model = gemma4(kind)
    own = copy.deepcopy(model)
    places_P2 = torch.cartesian_prod(torch.arange(8), torch.arange(8))
    tensors = {"pixel_values": torch.rand(1, 64, 48), "image_position_ids": places_P2[None]}
    image = Image(digest="image", data=b"", tensors=tensors)
    batch = pack([played_to(image, reply, sample) for sample, reply in enumerate(([5, 9, 11], [7, 8]))])
    install_attention(model)
    found_A, expected_A = PackedLM(model)(batch)[0], one_by_one(own, batch)
    torch.testing.assert_close(found_A, expected_A, atol=1e-5, rtol=1e-5)


def played_to(image: Image, reply: list[int], sample: int) -> Trajectory:
    """A reply to a prompt with 16 tokens of an image."""
    placed = PlacedImage(image=image, start=3, stop=19)
    builder = TrajectoryBuilder([5, 6, 7, *[59] * 16, 8, 9], group_id=0, sample_id=sample, images=(placed,))
    made = [-1.0] * len(reply)
    builder.add_action(
        Generation(token_ids=reply, logprobs=made, versions=[0] * len(reply), stop_reason=StopReason.STOP)
    )
    return builder.build(stop_reason=StopReason.STOP)
