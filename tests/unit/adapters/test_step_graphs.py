"""Decoding steps in padded shapes, captured and replayed, sample what other steps do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from rollgrad.adapters.engines.embedded import decoding
from rollgrad.adapters.engines.embedded.decoding import Decoder
from rollgrad.adapters.engines.embedded.kv_cache import BLOCK, Place
from rollgrad.adapters.engines.embedded.step_graphs import CudaCapture, StepGraphs, step_graphs
from rollgrad.adapters.models.torch.loading.compatibility import install_and_compare
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm
from tests.fakes.step_graphs import Cuda, Recorder
from tests.tiny_architectures import tiny_model

CPU = torch.device("cpu")


def decoder_with(model: Any, monkeypatch: pytest.MonkeyPatch, recorder: Recorder | None) -> Decoder:
    made = None if recorder is None else StepGraphs(model, CPU, recorder)
    monkeypatch.setattr(decoding, "step_graphs", lambda *_: made)
    decoder = Decoder(model)
    if recorder is not None:
        recorder.cache = decoder.cache
    return decoder


def decoded(decoder: Decoder, prompts: list[tuple[int, ...]], steps: int) -> list[Tensor]:
    """Logits of each step of sequences that go on with the most likely token, and of which the first ends halfway."""
    decoder.cache.capacity = 3 * len(prompts)
    places = [Place() for _ in prompts]
    lengths = [len(prompt) for prompt in prompts]
    for place, length in zip(places, lengths, strict=True):
        decoder.cache.reserve(place, length)
    found = [decoder.prefill(prompts, [[place] for place in places])]
    for step in range(steps):
        if step == steps // 2:
            decoder.cache.free(places[:1])
            places, lengths = places[1:], lengths[1:]
            found[-1] = found[-1][1:]
        for place, length in zip(places, lengths, strict=True):
            decoder.cache.reserve(place, length + 1)
        found.append(decoder.step(found[-1].argmax(1).tolist(), places, lengths).clone())
        lengths = [length + 1 for length in lengths]
    return found


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
@torch.no_grad()
def test_padded_and_replayed_steps_are_those_of_the_sequences_alone(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths cross the bounds of blocks, so that all shapes change."""
    model = tiny_model(model_type, max_position_embeddings=512)
    install_and_compare(model)
    numbers = torch.Generator().manual_seed(0)
    prompts = [
        tuple(torch.randint(3, 79, (length,), generator=numbers).tolist())
        for length in (5, BLOCK - 2, 7, BLOCK + 3, 2 * BLOCK - 3)
    ]
    recorder = Recorder(model)
    plain = decoded(decoder_with(model, monkeypatch, None), prompts, 12)
    found = decoded(decoder_with(model, monkeypatch, recorder), prompts, 12)
    for wanted_AV, found_AV in zip(plain, found, strict=True):
        torch.testing.assert_close(found_AV, wanted_AV, rtol=1e-4, atol=1e-4)
    assert recorder.replays == 12
    assert 2 <= recorder.captures <= 6, "five sequences and four, in more and more blocks"
    for rows, most, blocks in recorder.shapes:
        assert {rows, most} <= {1, 2, 4, 8, 16}
        assert blocks in {1, 2, 4, 8, 15, 16}, "a power of two, or all that the cache has"


@torch.no_grad()
def test_graphs_are_dropped_with_the_memory_and_where_weights_have_moved(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=CPU, flag="model")
    recorder = Recorder(model)
    own = decoder_with(model, monkeypatch, recorder)
    prompts = [(5, 6, 7), (8, 9)]

    def captures() -> int:
        before = recorder.captures
        decoded(own, prompts, 1)
        own.cache.clear()
        return recorder.captures - before

    assert captures() == 1
    assert captures() == 0, "the same shapes at the same addresses"
    model.model.norm.weight.mul_(2.0)
    assert captures() == 0, "a push of weights in place"
    model.model.norm.weight.data = model.model.norm.weight.data.clone()
    assert captures() == 1
    own.release()
    assert captures() == 1, "what was stored lies elsewhere"


@torch.no_grad()
def test_a_push_of_weights_in_place_is_seen_by_what_was_captured(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=CPU, flag="model")
    own, plain = (decoder_with(model, monkeypatch, recorder) for recorder in (Recorder(model), None))
    decoded(own, [(5, 6, 7), (8, 9)], 2)
    own.cache.clear()
    model.model.layers[0].mlp.down_proj.weight.mul_(3.0)
    for found_AV, wanted_AV in zip(
        decoded(own, [(5, 6, 7), (8, 9)], 2), decoded(plain, [(5, 6, 7), (8, 9)], 2), strict=True
    ):
        torch.testing.assert_close(found_AV, wanted_AV)


@torch.no_grad()
def test_steps_that_cannot_be_captured_are_taken_one_by_one(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a model that waits for a number of the GPU's in its forward pass."""

    def failing(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=CPU, flag="model")
    monkeypatch.setattr(decoding, "step_graphs", lambda *_: StepGraphs(model, CPU, failing))
    prompts = [(5, 6, 7), (8, 9)]
    with capture_logs() as logs:
        found = decoded(Decoder(model), prompts, 4)
    assert [each["event"] for each in logs] == [
        "The model's decoding steps cannot be captured as CUDA graphs (operation not permitted when stream is "
        "capturing): they take longer."
    ]
    for found_AV, wanted_AV in zip(found, decoded(decoder_with(model, monkeypatch, None), prompts, 4), strict=True):
        torch.testing.assert_close(found_AV, wanted_AV, rtol=1e-4, atol=1e-4)


def test_graphs_share_the_memory_of_those_that_live(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, capture, streams = Cuda(monkeypatch), CudaCapture(), []
    own = cuda.stream

    def compute(_: Any) -> Tensor:
        streams.append(cuda.stream)
        return torch.zeros(1)

    captured = [capture(compute, None) for _ in range(2)]  # type: ignore[arg-type]
    assert cuda.pools[0] == cuda.pools[1]
    beside, again, capturing = streams[:3]
    assert beside is again is not own, "the steps before a capture run on another stream"
    assert capturing == "capturing"
    assert cuda.stream is own
    captured.clear()
    captured = [capture(compute, None) for _ in range(2)]  # type: ignore[arg-type]
    assert cuda.pools[2] == cuda.pools[3] != cuda.pools[0]
    CudaCapture()(compute, None)  # type: ignore[arg-type]
    assert cuda.streams == 2, "each stream would have a workspace of cuBLAS for as long as the process lives"
    captured[0][1]()
    assert cuda.done[-1] == "replay"


@pytest.mark.parametrize("notices", [False, True], ids=["torch 2.11", "torch 2.13"])
def test_a_capture_that_fails_leaves_all_as_it_was(notices: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, capture = Cuda(monkeypatch), CudaCapture()
    own = cuda.stream

    def compute(_: Any) -> Tensor:
        if cuda.stream == "capturing":
            if notices:
                cuda.under_way.clear()
                cuda.draws = True
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="not permitted"):
        capture(compute, None)  # type: ignore[arg-type]
    assert cuda.stream is own
    assert cuda.pools
    assert not cuda.under_way, "torch gives no memory back while a capture is under way"
    assert cuda.draws


def test_steps_on_a_cpu_are_not_captured_and_those_of_mixtures_in_bfloat16(tiny_mixture_dir: Path) -> None:
    cuda = torch.device("cuda")
    model = load_causal_lm(str(tiny_mixture_dir), dtype=torch.float32, device=CPU, flag="model")
    assert step_graphs(model, cuda) is None
    assert step_graphs(model.to(torch.bfloat16), cuda) is not None
    assert step_graphs(tiny_model("llama"), CPU) is None


@pytest.mark.gpu
@torch.inference_mode()
def test_graphs_of_a_gpu_compute_what_steps_without_them_do(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = torch.device("cuda")
    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=cuda, flag="model")
    made: Callable[..., StepGraphs | None] = step_graphs
    prompts = [(5, 6, 7), tuple(range(3, BLOCK)), (8, 9)]
    monkeypatch.setattr(decoding, "step_graphs", lambda *_: None)
    plain = decoded(Decoder(model), prompts, 12)
    monkeypatch.setattr(decoding, "step_graphs", made)
    captured = Decoder(model)
    assert captured._graphs is not None
    for found_AV, wanted_AV in zip(decoded(captured, prompts, 12), plain, strict=True):
        torch.testing.assert_close(found_AV, wanted_AV, rtol=1e-3, atol=1e-3)
    captured.release()
    assert not captured._graphs._captured
