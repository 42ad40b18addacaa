"""Replies to images in files, and loops over them, of a tiny model that sees."""

import base64
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import rollgrad
from rollgrad.adapters.chat.row_error import RowError
from rollgrad.adapters.data.examples.formats import read_row
from rollgrad.adapters.data.examples.recognition import ReadingSettings
from rollgrad.application.settings.loop import CSFTRun, IterDPORun, LoopRun, RSRun
from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sections.examples import ExampleFormat
from rollgrad.application.settings.sft import SFTRun
from rollgrad.domain.episodes.rewards import RewardInput
from rollgrad.domain.errors import DataError
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.composition.rl.rewards import make_reward_model
from rollgrad.entrypoints.loop import _as_sampled
from tests.example_runs import logged, small, weights, written
from tests.fakes.images import processor as processor_of
from tests.image_runs import enter_picture_folder
from tests.judged_replies import judged_replies
from tests.tiny_vision import ask, codec_of, save_tiny_reward, save_tiny_vlm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen2.5-VL with its processor."""
    return Path(save_tiny_vlm("qwen2_5_vl", tmp_path_factory.mktemp("model")))


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return enter_picture_folder(tmp_path, monkeypatch)


def prompts() -> str:
    """Writes prompts with a path, with a data URI beside one, and without images; returns the file."""
    uri = f"data:image/png;base64,{base64.b64encode(Path('blue.png').read_bytes()).decode()}"
    rows = [
        {"prompt": "What is <image>?", "images": ["red.png"]},
        {"prompt": "Are they alike?", "images": [uri, "red.png"]},
        {"prompt": "What is 1 plus 1?", "images": []},
    ]
    return str(written(Path("prompts.jsonl"), rows))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def replies(workspace: Path, model: Path) -> Path:
    """A file of two replies to each prompt."""
    config = rollgrad.RLConfig()
    config.actor.model_name_or_path, config.actor.dtype = str(model), DType.FLOAT32
    config.data.prompt_dataset, config.data.image_key = prompts(), "images"
    config.rollout.n_samples_per_prompt, config.rollout.max_new_tokens = 2, 6
    rollgrad.generate(config, "replies.jsonl", logprobs=True)
    return workspace / "replies.jsonl"


def test_rows_of_replies_have_the_images_of_their_prompts(replies: Path, model: Path) -> None:
    first, _, third, _, last, _ = read(replies)
    assert first["images"] == [str(Path("red.png").absolute())]
    assert first["messages"] == [
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is "}, {"type": "image"}, {"type": "text", "text": "?"}],
        }
    ]
    blue, red = (Path(path).read_bytes() for path in third["images"])
    assert (blue, red) == (Path("blue.png").read_bytes(), Path("red.png").read_bytes())
    assert len(list(Path("replies.jsonl.images").iterdir())) == 1  # of all replies
    assert (last["images"], last["image_places"]) == ([], [])
    codec = codec_of(processor_of(str(model)))
    rendered = ask(codec, blue, red, "Are they alike?")
    assert tuple(third["prompt_tokens"]) == rendered.token_ids
    assert third["image_places"] == [[placed.start, placed.stop] for placed in rendered.images]
    with pytest.raises(RowError, match="The row has images, but text alone is trained"):
        read_row(third, ExampleFormat.COMPLETION, ReadingSettings())


def test_files_of_images_in_a_data_set_are_written_beside_replies(workspace: Path, model: Path) -> None:
    from datasets import Dataset

    file = Path("red.png").read_bytes()
    data = Dataset.from_list([{"prompt": "What is <image>?", "images": [{"bytes": file, "path": None}]}])
    data.to_parquet("p.parquet")
    words = ["generate", "--actor.model_name_or_path", str(model), "--data.prompt_dataset", "p.parquet"]
    words += ["--data.image_key", "images", "--rollout.n_samples_per_prompt", "1", "--rollout.max_new_tokens", "3"]
    assert main([*words, "--output", "replies.jsonl"]) == 0
    (row,) = read(Path("replies.jsonl"))
    assert Path(row["images"][0]).read_bytes() == file
    assert Path(row["images"][0]).suffix == ".png"


def test_replies_are_learned_from_as_they_were_sampled(replies: Path, model: Path) -> None:
    """The first loss is what the engine said of the sampled tokens, which depend on the images."""
    rows = [{**row, "reward": 0.0} for row in read(replies)]
    run = small(
        SFTRun(), model, written(Path("rows.jsonl"), [*map(_as_sampled, rows)]), Path("out"), lr=0, batch_size=6
    )
    run.data.image_key, run.data.format = "images", ExampleFormat.TOKENS
    rollgrad.train_sft(run)
    said = [logprob for row in rows for logprob in row["logprobs"]]
    assert logged(Path("out"))[0]["train/loss"] == pytest.approx(-statistics.mean(said), abs=1e-5)


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ([[0, 3]], "0 of the 4 that stand for the image there"),
        ([], "1 images, and image_places"),
        ([[2, 1, 0]], "a place is the first token and the one behind the last"),
        (None, "image_places None: each image needs one"),
    ],
)
def test_tokens_with_images_elsewhere_are_refused(
    replies: Path, model: Path, places: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = _as_sampled({**read(replies)[0], "reward": 0.0})
    written(Path("rows.jsonl"), [{**row, "image_places": places}])
    words = ["train", "sft", "--actor.model_name_or_path", str(model), "--data.dataset", "rows.jsonl"]
    assert main([*words, "--data.image_key", "images", "--data.format", "tokens"]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_reward_model_judges_kept_replies_to_images(
    replies: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_reward(str(model), tmp_path / "reward")
    judged = judged_replies(monkeypatch)
    config = rollgrad.RLConfig()
    config.reward.model_name_or_path, config.actor.dtype = str(tmp_path / "reward"), DType.FLOAT32
    with pytest.raises(DataError, match=r"which a reward model sees with --data\.image_key images"):
        rollgrad.score(config, replies, "blind.jsonl")
    config.data.image_key = "images"
    rollgrad.score(config, replies, "scored.jsonl")
    assert [len(reply.images) for reply, _ in judged] == [1, 1, 2, 2, 0, 0]
    config.actor.model_name_or_path = str(model)
    codec, file = codec_of(processor_of(str(model))), Path("red.png").read_bytes()
    prompt = ask(codec, "What is ", file, "?")
    first, *_ = read(Path("scored.jsonl"))
    tokens = (*prompt.token_ids, *first["tokens"])
    ((score, _),) = make_reward_model(config).judge([RewardInput(text="", token_ids=tokens, images=prompt.images)])  # type: ignore[misc]
    assert first["reward"] == pytest.approx(score, abs=1e-5)
    other = [{name: value for name, value in row.items() if name != "image_places"} for row in read(replies)]
    with pytest.raises(DataError, match="whose places among its tokens are not known"):
        rollgrad.score(config, written(Path("other.jsonl"), other), "unplaced.jsonl")


def loop_of(kind: type[LoopRun], model: Path, **loop: Any) -> Any:
    run = kind()
    run.actor.model_name_or_path, run.actor.dtype, run.actor.adam.lr = str(model), DType.FLOAT32, 1e-2
    run.data.prompt_dataset, run.data.image_key = prompts(), "images"
    run.rollout.batch_size, run.rollout.n_samples_per_prompt, run.rollout.max_new_tokens = 3, 4, 60
    run.rollout.stop_strings = tuple("abcdefghi stuvw")  # short, but whole
    run.train.batch_size, run.loop.iterations = 16, 2
    run.ckpt.output_dir, run.logger.console = "loop", False
    for name, value in loop.items():
        setattr(run.loop, name, value)
    return run


@pytest.mark.parametrize(("kind", "loop"), [(RSRun, {"top_k": 2}), (IterDPORun, {}), (CSFTRun, {})])
def test_a_loop_learns_from_replies_to_images(
    workspace: Path, model: Path, kind: type[LoopRun], loop: dict[str, Any]
) -> None:
    """Also in its second iteration, on the same prompts; the reward is given the images, and the tower learns."""
    shown = set()

    def reward(completions: list[str], messages: list[Any]) -> list[float]:
        contents = [message["content"] for message in messages[0] if isinstance(message["content"], list)]
        seen = sum(part.get("image") is not None for content in contents for part in content)
        shown.add(seen)
        return [float(len(text)) for text in completions]

    result = rollgrad.loop(loop_of(kind, model, **loop), reward=reward)
    assert result.model is not None
    assert shown == {0, 1, 2}
    for iteration in (1, 2):
        here = Path("loop") / f"iteration_{iteration}"
        examples = read(here / "examples.jsonl")
        assert {len(row["images"]) for row in examples} >= {1, 2}
        losses = [row["train/loss"] for row in logged(here / "run") if "train/loss" in row]
        assert losses
    before, after = load_file(model / "model.safetensors"), weights(Path("loop/iteration_2/run"))
    assert any("visual" in name and not before[name].equal(after[name]) for name in before)
