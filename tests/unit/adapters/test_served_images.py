"""Prompts with images for engines by URL: what goes to the server, and what of its answer is believed."""

import base64
import io
from collections.abc import AsyncIterator, Iterator
from typing import Any

import PIL.Image
import pytest
import pytest_asyncio
from attrs import evolve

from rollgrad.adapters.chat import image_files
from rollgrad.adapters.chat.image_files import opened, portable
from rollgrad.adapters.chat.pictures import ImageRenderer
from rollgrad.adapters.engines.vllm_server.core import ServedCore
from rollgrad.adapters.engines.vllm_server.engine import ServedEngine
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams
from rollgrad.domain.errors import ConfigurationError, DataError, EngineError, ImageError
from tests.fakes.model_server import ModelServer
from tests.tiny_vision import ask, codec_of, glass, idefics3, picture

RED, WIDE = picture((200, 0, 0)), picture((0, 150, 0), width=56, height=24)
GLASS = glass()


@pytest.fixture(scope="module")
def processor() -> Any:
    return idefics3()[1]


@pytest.fixture
def renderer(processor: Any) -> ImageRenderer:
    return ImageRenderer(processor)


@pytest.fixture
def server(renderer: ImageRenderer) -> Iterator[ModelServer]:
    server = ModelServer(renderer=renderer)
    yield server
    server.close()


@pytest_asyncio.fixture
async def engine(server: ModelServer, renderer: ImageRenderer) -> AsyncIterator[ServedEngine]:
    engine = ServedEngine(server.url, eos_token_ids=[2], vocabulary=50)
    await engine.ready()
    await engine.require_images(renderer)
    yield engine
    await engine.close()


def request_of(processor: Any, *parts: bytes | str) -> GenerationRequest:
    prompt = ask(codec_of(processor), *parts)
    return GenerationRequest(
        prompt_token_ids=prompt.token_ids, images=prompt.images, params=SamplingParams(max_new_tokens=4)
    )


def data_uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


async def test_images_go_as_files_and_one_placeholder_each(
    engine: ServedEngine, server: ModelServer, processor: Any, renderer: ImageRenderer
) -> None:
    pictured = request_of(processor, "Is ", RED, " like ", WIDE, " or ", GLASS, "?")
    assert list((await engine.generate(pictured)).token_ids) == [100, 101, 102, 103]
    body = server.bodies[-1]
    assert [part["url"] for part in body["content_parts"]] == [data_uri(RED), data_uri(WIDE), data_uri(portable(GLASS))]
    assert {part["type"] for part in body["content_parts"]} == {"image_url"}
    assert body["token_ids"].count(renderer.mark_token) == 3
    sent = sum(placed.stop - placed.start - 1 for placed in pictured.images)
    assert len(body["token_ids"]) == len(pictured.prompt_token_ids) - sent
    text = request_of(processor, "2 plus 2?")
    await engine.generate(text)
    assert server.bodies[-1]["token_ids"] == list(text.prompt_token_ids)
    assert not {"content_parts", "return_token_ids"}.intersection(server.bodies[-1])


async def test_a_sampled_placeholder_stands_for_no_image(
    engine: ServedEngine, server: ModelServer, processor: Any, renderer: ImageRenderer
) -> None:
    pictured = request_of(processor, RED, "and?")
    behind = evolve(pictured, prompt_token_ids=(*pictured.prompt_token_ids, renderer.mark_token, 7))
    await engine.generate(behind)
    assert server.bodies[-1]["token_ids"][-2:] == [renderer.mark_token, 7]
    before = evolve(
        pictured,
        prompt_token_ids=(renderer.mark_token, *pictured.prompt_token_ids),
        images=tuple(placed.moved(1) for placed in pictured.images),
    )
    asked = len(server.bodies)
    with pytest.raises(DataError, match="before an image that it does not stand for"):
        await engine.generate(before)
    assert len(server.bodies) == asked


async def core_of(server: ModelServer, renderer: ImageRenderer, *, trains: bool) -> ServedCore:
    core = ServedCore(server.url, vocabulary=50, max_requests=4, flag="rollout.server_urls")
    await core.probe()
    await core.require_images(renderer)
    if trains:
        await core.require_weights()
    return core


async def test_features_of_other_weights_have_other_names(
    server: ModelServer, processor: Any, renderer: ImageRenderer
) -> None:
    """Also those that another run, or this one's last start, left in the server."""
    request = request_of(processor, RED, " like ", RED, "?")

    async def names(core: ServedCore, name: str) -> list[str]:
        generation: Generation = await core.sample(name, request, frozenset(), None)
        assert len(generation.token_ids) == 4
        return [part["uuid"] for part in server.bodies[-1]["content_parts"]]

    core = await core_of(server, renderer, trains=True)
    first, second = await names(core, "a"), await names(core, "b")
    assert first == second
    assert len(set(first)) == 1
    await core.forget()  # as after a push
    third = await names(core, "c")
    core.set_apart()  # as after one while replies are frozen
    fourth = await names(core, "d")
    restarted = await core_of(server, renderer, trains=True)
    fifth = await names(restarted, "a")
    samples = await core_of(server, renderer, trains=False)  # whose server's weights others may bring
    sixth, seventh = await names(samples, "a"), await names(samples, "b")
    assert len({each[0] for each in (first, third, fourth, fifth, sixth, seventh)}) == 6
    for used in (core, restarted, samples):
        await used.http.aclose()


async def test_tokens_that_are_not_the_trainers_are_refused(
    engine: ServedEngine, server: ModelServer, processor: Any
) -> None:
    other = idefics3()[1]
    other.image_seq_len = 9
    server.renderer = ImageRenderer(other)
    with pytest.raises(ConfigurationError, match=r"read \d+ tokens for a prompt with images that has \d+, or others"):
        await engine.generate(request_of(processor, RED, "?"))


async def test_a_server_that_comes_back_is_shown_an_image_again(engine: ServedEngine, server: ModelServer) -> None:
    server.renderer = None
    with pytest.raises(ConfigurationError, match=r"takes no images as vLLM 0\.32 does"):
        await engine.restart()


@pytest.mark.parametrize(
    ("lacking", "fails", "kind", "said"),
    [
        (
            {"tokens": False},
            [],
            ConfigurationError,
            r"lacks the endpoint .*start it with vllm serve --enable-scale-out",
        ),
        ({}, [], ConfigurationError, "takes no images as vLLM 0.32 does"),
        ({}, [400], ConfigurationError, r"refuses one \(.*400: not now.*serve a model that sees images"),
        ({}, [500], EngineError, "500: not now"),
    ],
)
async def test_a_server_that_takes_no_images_is_one_sentence(
    renderer: ImageRenderer, lacking: dict[str, Any], fails: list[int], kind: type[Exception], said: str
) -> None:
    server = ModelServer(**lacking)
    engine = ServedEngine(server.url, eos_token_ids=[2], vocabulary=50, flag="--server_url")
    await engine.ready()
    server.fails = [*fails]
    with pytest.raises(kind, match=said):
        await engine.require_images(renderer)
    assert len((await engine.generate(GenerationRequest(prompt_token_ids=(5,), params=SamplingParams()))).token_ids)
    await engine.close()
    server.close()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "CMYK", "L"])
def test_a_file_that_others_might_read_otherwise_is_written_anew(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = PIL.Image.effect_noise((24, 16), 90).convert("RGB").convert(mode)
    if mode in ("RGBA", "LA"):
        picture.putalpha(PIL.Image.linear_gradient("L").resize((24, 16)))
    written = io.BytesIO()
    picture.save(written, format="TIFF" if mode == "CMYK" else "PNG")
    data = written.getvalue()
    sent = portable(data)
    with PIL.Image.open(io.BytesIO(sent)) as found:
        assert (found.format, found.mode) == ("PNG", "RGB")
        assert found.tobytes() == opened(data).tobytes()
    assert portable(sent) == sent
    monkeypatch.setattr(image_files, "MOST_BYTES", 50)
    with pytest.raises(ImageError, match="is too large"):
        portable(data)
