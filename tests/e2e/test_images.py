"""Whole runs of a tiny model that sees images."""

import asyncio
import base64
import io
import json
import math
import re
import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from attrs import evolve
from safetensors.torch import load_file

import rollgrad
from rollgrad.adapters.chat.image_files import image_bytes, opened
from rollgrad.adapters.chat.pictures import ImageRenderer
from rollgrad.adapters.models.torch.loading.loading import load_critic
from rollgrad.adapters.models.torch.rewards.reward_model import RewardModel
from rollgrad.adapters.servers.anthropic_wire import AnthropicWire
from rollgrad.adapters.servers.guard import MAX_BODY_BYTES, HttpError
from rollgrad.adapters.servers.openai_wire import OpenAIWire
from rollgrad.adapters.servers.responses_wire import ResponsesWire
from rollgrad.adapters.servers.server import Server
from rollgrad.application.episodes.assistant import Assistant
from rollgrad.application.episodes.chat_request import ChatRequest
from rollgrad.application.episodes.reply import ChatReply
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.application.settings.sections.vllm import VLLMConfig
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams
from rollgrad.domain.episodes.messages import Action
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import RewardInput
from rollgrad.domain.errors import ConfigurationError, DataError
from rollgrad.domain.ports.agent_executor import EpisodeRequest
from rollgrad.domain.ports.environment import StepResult
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.cli.serve_agent import ServeAgentArguments, _loaded_app
from rollgrad.entrypoints.composition.rl.executors import make_tool_executor
from rollgrad.entrypoints.composition.rl.rewards import make_reward_model
from rollgrad.entrypoints.composition.rl.tracing import Tracing
from rollgrad.entrypoints.composition.serving.arguments import AssistantArguments
from rollgrad.entrypoints.composition.serving.assistant import load_assistant
from rollgrad.entrypoints.composition.tool_box import ToolBox
from rollgrad.entrypoints.openrlhf.command import translate_command
from rollgrad.testing.reward_source import FakeRewardSource
from tests.example_runs import logged, rollouts, weights
from tests.fakes.images import processor as processor_of
from tests.fakes.model_server import ModelServer
from tests.fakes.recording_engine import RecordingEngine
from tests.image_runs import Gallery, enter_picture_folder
from tests.judged_replies import judged_replies
from tests.tiny_vision import ask, codec_of, picture, save_tiny_reward, save_tiny_vlm

REWARD = """
def reward_func(queries, prompts, labels):
    return [float(len(query) % 3) for query in queries]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen2.5-VL with its processor."""
    return Path(save_tiny_vlm("qwen2_5_vl", tmp_path_factory.mktemp("model")))


@pytest.fixture
def workspace(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with rows of one, two and no images, a reward and a configuration of two steps."""
    enter_picture_folder(tmp_path, monkeypatch)
    red = base64.b64encode((tmp_path / "red.png").read_bytes()).decode()
    rows = [
        {"prompt": "What is <image>?", "images": ["red.png"], "label": "red"},
        {"prompt": "Are they alike?", "images": ["blue.png", f"data:image/png;base64,{red}"], "label": "no"},
        {"prompt": "What is 1 plus 1?", "images": [], "label": "2"},
        {"prompt": "<image>: which color?", "images": ["blue.png"], "label": "blue"},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "reward.py").write_text(REWARD)
    settings = {
        "actor": {"model_name_or_path": str(model), "dtype": "float32", "adam": {"lr": 1e-2}},
        "algo": {"kl": {"init_coef": 0.01}},
        "data": {"prompt_dataset": "prompts.jsonl", "image_key": "images", "label_key": "label"},
        "reward": {"function_path": "reward.py"},
        "rollout": {"batch_size": 4, "n_samples_per_prompt": 2, "max_new_tokens": 6},
        "train": {"max_steps": 2, "batch_size": 4},
        "logger": {"console": False},
        "ckpt": {"output_dir": "out"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


@pytest.mark.parametrize("frozen", [False, True])
def test_a_policy_learns_from_images(
    workspace: Path, model: Path, frozen: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--actor.freeze_visual_encoder"] if frozen else []
    assert main(["train", "rl", "--config", "run.yaml", *flags]) == 0
    steps = [row for row in logged(workspace / "out") if "policy/loss" in row]
    assert len(steps) == 2
    assert steps[0]["policy/mismatch_abs"] < 1e-5  # the trainer scores what the engine sampled
    before, after = weights_of(model), weights(workspace / "out")
    changed = {name for name in before if not before[name].equal(after[name])}
    assert any("visual" not in name for name in changed)
    assert any("visual" in name for name in changed) != frozen
    flags = ["--actor.model_name_or_path", "out/model", "--eval.dataset", "prompts.jsonl", "--ckpt.output_dir", "out2"]
    assert main(["eval", "--config", "run.yaml", *flags]) == 0  # the model is saved with its processor
    capsys.readouterr()
    assert main(["replay", "out", "--step", "1"]) == 2
    assert "rollouts are kept without their images" in capsys.readouterr().err


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return dict(load_file(model / "model.safetensors"))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "What is <image>?", "images": ["none.png"]}, "Row 5 of .*none.png cannot be read"),
        ({"prompt": "What is <image>?", "images": ["broken.png"]}, "Row 5 of .*An image cannot be read"),
        ({"prompt": "<image> <image>", "images": ["red.png"]}, "Row 5 of .*1 images, but its messages have 2 marks"),
        ({"prompt": "?", "images": ["http://nowhere/red.png"]}, "Row 5 of .*in a network"),
        ({"prompt": "?", "images": ["thin.png"]}, "Row 5 of .*processor refuses an image of 9000 x 1 pixels"),
        ({"prompt": "?", "images": ["red.png"] * 3}, "Row 5 of .*has 3 images, but data.max_images_per_prompt is 2"),
    ],
)
def test_a_broken_row_is_named(
    workspace: Path, capsys: pytest.CaptureFixture[str], row: dict[str, object], said: str
) -> None:
    (workspace / "broken.png").write_bytes((workspace / "red.png").read_bytes()[:100])
    (workspace / "thin.png").write_bytes(picture((200, 0, 0), width=9000, height=1))
    with (workspace / "prompts.jsonl").open("a") as rows:
        rows.write("\n" + json.dumps({**row, "label": ""}))
    assert main(["train", "rl", "--config", "run.yaml", "--data.max_images_per_prompt", "2"]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_long_images_are_dropped_whole(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data.max_prompt_tokens", "25", "--train.max_steps", "1"]
    assert main(["train", "rl", "--config", "run.yaml", *flags, "--dry_run"]) == 0
    assert "over-long prompts dropped" in capsys.readouterr().err


def test_what_is_given_no_images_refuses_them(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--cluster.enable", "--ds.tensor_parallel_size", "2", "--actor.num_gpus_per_node", "2"]
    assert main(["train", "rl", "--config", "run.yaml", *flags]) == 2
    assert "leave out --ds.tensor_parallel_size" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("command", ["train rl", "eval"])
def test_a_server_without_the_endpoint_for_images_is_refused(
    workspace: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ModelServer(tokens=False)
    flags = ["--rollout.engine", "server", "--rollout.server_urls", server.url, "--eval.dataset", "prompts.jsonl"]
    try:
        assert main([*command.split(), "--config", "run.yaml", *flags]) == 2
    finally:
        server.close()
    (said,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert f"rollout.server_urls names {server.url}, which is shown no images" in said
    assert "start it with vllm serve --enable-scale-out" in said


def test_vllm_is_refused_where_it_cannot_make_the_processor(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.utils.is_torchvision_available", lambda: False)
    assert main(["train", "rl", "--config", "run.yaml", "--rollout.engine", "vllm"]) == 2
    assert re.search("part for videos needs torchvision.*--rollout.engine embedded", capsys.readouterr().err, re.DOTALL)


SUPERVISED = [
    {"prompt": "What is <image>?", "images": ["red.png"], "completion": "red"},
    {"prompt": "Are they alike?", "images": ["blue.png", "red.png"], "completion": "no"},
    {"prompt": "What is 1 plus 1?", "images": [], "completion": "2"},
]
PAIRS = [
    {"prompt": "What is <image>?", "images": ["red.png"], "chosen": "red", "rejected": "blue"},
    {"prompt": "What is 1 plus 1?", "images": None, "chosen": "2", "rejected": "3"},
]


def learning(trainer: str, rows: list[dict[str, object]], model: Path, *flags: str) -> list[str]:
    """Writes rows; returns the words of a command that takes two optimizer steps of all of them."""
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["train", trainer, "--actor.model_name_or_path", str(model), "--actor.dtype", "float32"]
    words += ["--actor.adam.lr", "1e-2", "--data.dataset", "rows.jsonl", "--data.image_key", "images"]
    words += ["--train.batch_size", str(len(rows)), "--train.num_epochs", "2", "--ckpt.output_dir", f"out-{trainer}"]
    return [*words, "--logger.no_console", *flags]


def test_supervised_training_learns_from_images(workspace: Path, model: Path) -> None:
    assert main(learning("sft", SUPERVISED, model)) == 0
    first, second = (row["train/loss"] for row in logged(workspace / "out-sft") if "train/loss" in row)
    assert first == pytest.approx(loss_of_transformers(model), abs=1e-4)
    assert second < first
    before, after = weights_of(model), weights(workspace / "out-sft")
    assert any("visual" in name and not before[name].equal(after[name]) for name in before)


def loss_of_transformers(path: Path) -> float:
    """The mean loss of the trained tokens of SUPERVISED by the model's own code, one row at a time."""
    import torch
    from transformers import AutoModelForImageTextToText

    from rollgrad.adapters.chat.image_files import opened
    from rollgrad.adapters.chat.pictures import load_processor
    from rollgrad.adapters.models.torch.loading.loading import load_tokenizer

    own = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(str(path), flag="path")
    processor = load_processor(str(path), tokenizer, flag="path")
    losses = []
    for row in SUPERVISED:
        images = [opened(Path(name).read_bytes()) for name in row["images"]]
        mark, text = {"type": "image"}, {"type": "text"}
        before, _, behind = str(row["prompt"]).rpartition("<image>")
        content = [{**text, "text": before}, *([mark] * len(images)), {**text, "text": behind}]
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        prompt, whole = (
            processor(text=[text], images=images or None, return_tensors="pt")
            for text in (asked, f"{asked}{row['completion']}<|im_end|>")
        )
        logits_TV = own(**whole).logits[0].detach().log_softmax(-1)
        start, ids = prompt["input_ids"].shape[1], whole["input_ids"][0]
        losses += [-float(logits_TV[place - 1, ids[place]]) for place in range(start, len(ids))]
    return sum(losses) / len(losses)


LABELLED = [{"prompt": p["prompt"], "images": p["images"], "completion": p["chosen"], "label": True} for p in PAIRS]


@pytest.mark.parametrize(("trainer", "rows"), [("sft", SUPERVISED), ("dpo", PAIRS), ("kto", LABELLED)])
def test_streamed_rows_have_their_images(
    workspace: Path, model: Path, trainer: str, rows: list[dict[str, object]]
) -> None:
    """A step has all rows, so that their order makes no difference."""
    found = []
    for flags in (["--data.stream", "--train.max_steps", "2"], ["--train.num_epochs", "2"]):
        words = learning(trainer, rows, model, "--data.cache_dir", "cache")
        place = words.index("--train.num_epochs")
        assert main([*words[:place], *words[place + 2 :], *flags]) == 0
        found.append([row["train/loss"] for row in logged(workspace / f"out-{trainer}") if "train/loss" in row])
        (workspace / f"out-{trainer}").rename(workspace / f"out-{len(found)}")
    assert found[0] == pytest.approx(found[1], abs=1e-5)


@pytest.mark.parametrize("trainer", ["dpo", "kto"])
def test_a_reference_sees_the_images_of_pairs(workspace: Path, model: Path, trainer: str) -> None:
    """A policy that begins as its reference has the loss of no preference, which another input would change."""
    cache = ["--data.cache_dir", "cache"]
    assert main(learning(trainer, PAIRS, model, *cache)) == 0
    losses = [row["train/loss"] for row in logged(workspace / f"out-{trainer}") if "train/loss" in row]
    assert losses[0] == pytest.approx(math.log(2) if trainer == "dpo" else 0.5, abs=1e-4)
    assert losses[1] != pytest.approx(losses[0], abs=1e-3)


@pytest.mark.parametrize(
    ("how", "flags"),
    [("whole", []), ("frozen", ["--actor.freeze_visual_encoder"]), ("adapters", ["--actor.lora.rank", "4"])],
)
def test_a_reward_model_learns_from_images(workspace: Path, model: Path, how: str, flags: list[str]) -> None:
    """The saved model gives the scores that its evaluation saw, and only what was to learn has changed."""
    assert main(learning("rm", PAIRS, model, "--eval.dataset", "rows.jsonl", *flags)) == 0
    saved = workspace / "out-rm" / "model"
    processor = processor_of(str(saved))
    codec, file = codec_of(processor), (workspace / "red.png").read_bytes()
    asked = [(ask(codec, "What is ", file, "?"), "red", "blue"), (ask(codec, "What is 1 plus 1?"), "2", "3")]
    replies = [
        RewardInput(text="", token_ids=(*prompt.token_ids, *codec.encode(f"{reply}<|im_end|>")), images=prompt.images)
        for prompt, *both in asked
        for reply in both
    ]
    settings = {"dtype": torch.float32, "device": torch.device("cpu"), "flag": "model"}
    judge = RewardModel.load(str(saved), policy_tokenizer=processor.tokenizer, **settings)
    scores = [score for score, _ in judge.judge(replies)]
    assert json.loads((saved / "config.json").read_text())["mean"] == pytest.approx(statistics.mean(scores), abs=1e-4)
    before, after = (load_critic(str(path), **settings)[0].base_model.state_dict() for path in (model, saved))
    changed = {name for name in before if not before[name].equal(after[name])}
    assert any("language_model" in name for name in changed)
    assert any("visual" in name for name in changed) == (how == "whole")


def test_what_a_reward_model_does_not_learn_with_images_is_refused(
    workspace: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data.num_workers", "2", "--actor.freeze_visual_encoder", "--actor.lora.rank", "4"]
    assert main(learning("rm", PAIRS, model, *flags)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "leave out --data.num_workers" in said
    assert "leave out --actor.freeze_visual_encoder" in said


@pytest.fixture(scope="module")
def reward_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reward model that sees images as `model` does."""
    path = tmp_path_factory.mktemp("reward")
    save_tiny_reward(str(model), path)
    return path


class Silent(Gallery):
    """Answers with images, and gives no reward."""

    async def step(self, action: Action) -> StepResult:
        return evolve(await super().step(action), reward=None)


@pytest.mark.parametrize("turns", ["one", "several", "several of a client"])
def test_a_reward_model_judges_the_images_of_rollouts(
    workspace: Path, reward_model: Path, turns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = judged_replies(monkeypatch)
    config = rollgrad.load_config("run.yaml")
    config.reward.function_path, config.reward.model_name_or_path = None, str(reward_model)
    config.data.label_key, config.train.max_steps = None, 1
    if turns == "several of a client":
        (workspace / "agent.py").write_text(CLIENT.partition("        return float")[0])
        config.train.agent_func_path, config.rollout.max_new_tokens = "agent.py", 60
        config.rollout.stop_strings = tuple("abcdefghi stuvw")
    rollgrad.train(config, environment=Silent if turns == "several" else None)
    assert len(judged) == 8
    (step,) = (row for row in logged(workspace / "out") if "policy/loss" in row)
    assert step["reward/mean"] == pytest.approx(sum(score for _, score in judged) / len(judged), abs=1e-4)
    seen = [len(reply.images) for reply, _ in judged]
    own = [0, 0, 1, 1, 1, 1, 2, 2]  # of two replies to each prompt
    assert sorted(seen) == own if turns == "one" else sum(seen) > sum(own)
    for reply, _ in judged:  # each stands where the policy saw it
        assert reply.token_ids is not None
        placed = {token for image in reply.images for token in reply.token_ids[image.start : image.stop]}
        assert len(placed) == bool(reply.images)


def test_a_reward_model_that_sees_otherwise_is_refused(workspace: Path, reward_model: Path, reader: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    other, steps = workspace / "other", workspace / "steps"
    image_settings = json.loads((reward_model / "processor_config.json").read_text())["image_processor"]
    for folder, file, change in (
        (other, "processor_config.json", {"image_processor": {**image_settings, "merge_size": 1}}),
        (steps, "config.json", {"reward_tokens": ["+", "-"]}),
    ):
        shutil.copytree(reward_model, folder)
        settings = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**settings, **change}))
    judge = AutoModelForSequenceClassification.from_pretrained(reader, num_labels=1)
    judge.save_pretrained(reader)
    for folder, said in (
        (reader, "sees no images"),
        (other, "another vocabulary or another processor"),
        (steps, "a process reward model, which is given no images"),
    ):
        config = rollgrad.load_config("run.yaml")
        config.reward.function_path, config.reward.model_name_or_path = None, str(folder)
        with pytest.raises(ConfigurationError, match=said):
            make_reward_model(config)


def test_a_critic_sees_images(workspace: Path, model: Path, reward_model: Path) -> None:
    """It begins as the reward model, and its tower learns."""
    flags = ["--algo.advantage.estimator", "gae", "--critic.model_name_or_path", str(reward_model)]
    assert main(["train", "rl", "--config", "run.yaml", "--critic.adam.lr", "1e-2", *flags]) == 0
    steps = [row for row in logged(workspace / "out") if "policy/loss" in row]
    assert all(row["critic/loss"] > 0 for row in steps)
    before = load_file(reward_model / "model.safetensors")
    after = load_file(workspace / "out" / "model" / "critic" / "model.safetensors")
    assert any(not before[f"model.{name}"].equal(weight) for name, weight in after.items() if "visual" in name)


def test_a_critic_that_sees_no_images_is_refused(
    workspace: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--algo.advantage.estimator", "gae", "--critic.model_name_or_path", str(tiny_model_dir)]
    assert main(["train", "rl", "--config", "run.yaml", *flags]) == 2
    assert re.search("--critic.model_name_or_path .*it sees no images", capsys.readouterr().err)


@pytest.fixture
def reader(model: Path, tmp_path: Path) -> Path:
    """The folder of a tiny model with the same vocabulary that sees nothing."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(model)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=1, max_position_embeddings=512, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "reader")
    tokenizer.save_pretrained(tmp_path / "reader")
    return tmp_path / "reader"


def test_a_reference_that_sees_no_images_is_refused(
    workspace: Path, reader: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--algo.kl.use_loss", "--algo.kl.estimator", "full", "--ref.model_name_or_path", str(reader)]
    assert main(["train", "rl", "--config", "run.yaml", *flags]) == 2
    assert re.search("--ref.model_name_or_path .*it sees no images", capsys.readouterr().err)


@pytest.mark.parametrize("wire", ["chat", "responses", "messages"])
async def test_a_served_model_sees_the_images_of_clients(workspace: Path, model: Path, wire: str) -> None:
    """The tokens are those of a rollout, on each wire, and a client cannot have the server read its own files."""
    file = (workspace / "red.png").read_bytes()
    written = base64.b64encode(file).decode()
    uri = f"data:image/png;base64,{written}"

    def bodies(url: str, source: dict[str, str]) -> tuple[Any, list[dict[str, Any]]]:
        ask = {"type": "text", "text": "What is it?"}
        if wire == "chat":
            return OpenAIWire(), [{"type": "image_url", "image_url": {"url": url}}, ask]
        if wire == "responses":
            return ResponsesWire(), [{"type": "input_image", "image_url": url}, {**ask, "type": "input_text"}]
        return AnthropicWire(), [{"type": "image", "source": source}, ask]

    def body(url: str, source: dict[str, str]) -> tuple[Any, dict[str, Any]]:
        made, content = bodies(url, source)
        field, limit = ("input", "max_output_tokens") if wire == "responses" else ("messages", "max_tokens")
        return made, {field: [{"role": "user", "content": content}], "model": "m", limit: 3}

    assistant = load_assistant(AssistantArguments(model=str(model), dtype=DType.FLOAT32))
    made, asked = body(uri, {"type": "base64", "media_type": "image/png", "data": written})

    async def answer() -> ChatReply:
        try:
            return await assistant.assistant.answer(made.decode(asked).request)
        finally:
            await assistant.aclose()

    parts = [{"type": "image", "image": file}, {"type": "text", "text": "What is it?"}]
    expected = assistant.codec.render([{"role": "user", "content": parts}])
    assert len(expected.images) == 1
    assert (await answer()).prompt_token_ids == expected.token_ids
    for path in ("red.png", "http://nowhere/red.png"):
        made, asked = body(path, {"type": "url", "url": path})
        with pytest.raises(HttpError, match="an image without its content"):
            made.decode(asked)


TOOL = """
import PIL.Image
import rollgrad


@rollgrad.tool
def look(color: str) -> object:
    "Shows a picture."
    return PIL.Image.open(f"{color}.png")
"""


async def test_a_tool_shows_its_image(workspace: Path, model: Path) -> None:
    (workspace / "tools.py").write_text(TOOL)
    loaded = load_assistant(AssistantArguments(model=str(model), tools="tools.py", dtype=DType.FLOAT32))
    assert loaded.assistant.sees_images
    call = json.dumps({"name": "look", "arguments": {"color": "blue"}})
    replies = [f"<tool_call>\n{call}\n</tool_call><|im_end|>", "Blue.<|im_end|>"]
    seen: list[list[Any]] = []

    def reply(request: GenerationRequest, number: int) -> Sequence[int]:
        seen.append([opened(placed.image.data).getpixel((0, 0)) for placed in request.images])
        return loaded.codec.encode(replies[number])

    params = SamplingParams(max_new_tokens=200)
    engine = RecordingEngine(reply)
    assistant = Assistant(engine, loaded.codec, loaded.tools.open, params=params, read_image=image_bytes)
    await assistant.conversation().say([{"type": "image", "image": "red.png"}, {"type": "text", "text": "The other?"}])
    assert seen == [[(200, 0, 0)], [(200, 0, 0), (0, 0, 200)]]


async def test_images_of_tools_that_the_template_does_not_write_are_refused(workspace: Path, model: Path) -> None:
    """In training they end the run, for episodes with them would be left out."""
    folder = workspace / "model"
    shutil.copytree(model, folder)
    template = (folder / "chat_template.jinja").read_text()
    texts = template.replace("is string %}", "is string or (tools and message['role'] == 'tool') %}")
    assert texts != template
    (folder / "chat_template.jinja").write_text(texts)
    (workspace / "tools.py").write_text(TOOL)
    loaded = load_assistant(AssistantArguments(model=str(folder), tools="tools.py", dtype=DType.FLOAT32))
    called = '<tool_call>\n{"name": "look", "arguments": {"color": "blue"}}\n</tool_call><|im_end|>'
    engine = RecordingEngine(lambda request, number: loaded.codec.encode(called))
    params, read_image = SamplingParams(max_new_tokens=200), loaded.assistant._read_image
    assistant = Assistant(engine, loaded.codec, loaded.tools.open, params=params, read_image=read_image)
    with pytest.raises(DataError, match=r"writes none in tools' answers: name a model .* of --tools"):
        await assistant.conversation().say([{"type": "image", "image": "red.png"}, {"type": "text", "text": "?"}])

    config = rollgrad.load_config("run.yaml")
    config.agent.tools = "tools.py"
    executor = make_tool_executor(
        config, engine, loaded.codec, FakeRewardSource(), ToolBox("tools.py"), Tracing("model")
    )
    prompt = Prompt(token_ids=(1,), text="?", messages=({"role": "user", "content": "?"},))
    with pytest.raises(ConfigurationError, match=r"--data.chat_template.*--agent.tools"):
        await executor.run(EpisodeRequest(prompt=prompt, params=params, group_id=0, sample_id=0))


def test_chat_shows_images(
    workspace: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reply is that which a served model gives; images are of the message that follows them."""
    flags = ["chat", "--model", str(model), "--dtype", "float32", "--seed", "5", "--max_new_tokens", "6"]
    said = "/image red.png\n/image blue.png\nAlike?\nSure?\n/image red.png\n/new\nAlike?\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    assert main([*flags, "--json"]) == 0
    printed = capsys.readouterr()
    first, second, third = map(json.loads, printed.out.splitlines())
    content = first["messages"][0]["content"]
    assert [part.get("image", part.get("text")) for part in content] == ["red.png", "blue.png", "Alike?"]
    assert [message["content"] for message in (second["messages"][2], third["messages"][0])] == ["Sure?", "Alike?"]
    noted = [line for line in printed.err.splitlines() if line.startswith("(with your next message: ")]
    assert [line.partition(": ")[2] for line in noted] == ["red.png)", "red.png, blue.png)", "red.png)"]
    loaded = load_assistant(AssistantArguments(model=str(model), dtype=DType.FLOAT32, seed=5, max_new_tokens=6))
    served = asyncio.run(loaded.assistant.answer(ChatRequest(messages=first["messages"][:1])))
    assert list(served.generation.token_ids) == first["token_ids"] != third["token_ids"]


@pytest.mark.parametrize(
    ("name", "said", "sentence"),
    [
        ("model", "/image none.png\nWhat?", "none.png cannot be read"),
        ("model", "/image\nWhat?", "/image names no file"),
        ("model", "/image red.png", "No message follows /image red.png"),
        ("reader", "/image red.png", "is shown no images: leave out /image red.png"),
    ],
)
def test_chat_names_images_that_it_cannot_show(
    workspace: Path,
    name: str,
    said: str,
    sentence: str,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["chat", "--model", str(request.getfixturevalue(name)), "--prompt", said]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "reason"), [(False, "vllm serve --enable-scale-out"), (True, "takes no images as vLLM 0.32 does")]
)
def test_images_for_a_server_that_takes_none_are_refused_in_one_sentence(
    workspace: Path, model: Path, tokens: bool, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ModelServer(tokens=tokens)
    flags = ["--model", str(model), "--engine", "server", "--server_url", server.url]
    (workspace / "asked.json").write_text(
        json.dumps([{"role": "user", "content": [{"type": "image", "image": "red.png"}]}])
    )
    try:
        assert main(["chat", *flags, "--prompt", "/image red.png\nWhat?"]) == 2
        assert main(["chat", *flags, "--messages", "asked.json", "--prompt", "What?"]) == 2
    finally:
        server.close()
    lines = capsys.readouterr().err.splitlines()
    shown, written = (line for line in lines if line.startswith("error: "))
    assert "is shown no images" in shown
    assert "A message has an image, but the model is shown none" in written
    for said in (shown, written):
        assert "--engine embedded or vllm" in said
        assert "a server of vllm serve --enable-scale-out" in said
    assert reason in next(line for line in lines if "messages with images are refused" in line)


def test_chat_shows_a_server_images(workspace: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = ModelServer(renderer=ImageRenderer(processor_of(str(model))))
    flags = ["--model", str(model), "--engine", "server", "--server_url", server.url, "--max_new_tokens", "3"]
    try:
        assert main(["chat", *flags, "--json", "--prompt", "/image red.png\nWhat?"]) == 0
    finally:
        server.close()
    assert json.loads(capsys.readouterr().out)["token_ids"] == [100, 101, 102]
    (part,) = server.bodies[-1]["content_parts"]
    assert base64.b64decode(part["url"].partition(",")[2]) == (workspace / "red.png").read_bytes()


def test_an_image_may_have_more_bytes_than_its_tokens_as_text(model: Path) -> None:
    with _loaded_app(ServeAgentArguments(model=str(model), dtype=DType.FLOAT32), []) as (_, largest):
        assert largest == MAX_BODY_BYTES


AGENT = """
from pathlib import Path

import torch

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class Instance(AgentInstanceBase):
    async def reset(self, states):
        self.turns = 0
        return {"observation": states["observation"]}

    async def step(self, states):
        self.turns += 1
        picture = Path("blue.png").read_bytes()
        return {
            "rewards": torch.tensor(float(len(states["action_text"]) % 2)),
            "environment_feedback": " and <|vision_start|><|image_pad|><|vision_end|>?",
            "environment_images": [picture],
            "done": self.turns == 2,
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Instance)
"""


CLIENT = """
import base64
from pathlib import Path

import openai

BLUE = "data:image/png;base64," + base64.b64encode(Path("blue.png").read_bytes()).decode()
NEXT = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": BLUE}}, {"type": "text", "text": "?"}]}


async def run_agent(task):
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        messages = list(task.prompt.messages)
        for turn in range(2):
            reply = await client.chat.completions.create(model=task.model, messages=messages)
            messages += [reply.choices[0].message.to_dict(), NEXT]
        return float(len(reply.choices[0].message.content or "") % 2)
"""


@pytest.mark.parametrize("plays", ["environment", "agent file", "client"])
def test_an_environment_answers_with_images(workspace: Path, plays: str) -> None:
    config = rollgrad.load_config("run.yaml")
    config.reward.function_path, config.data.label_key = None, None
    config.rollout.max_new_tokens, config.rollout.stop_strings = 60, tuple("abcdefghi stuvw")  # short, but whole
    (workspace / "agent.py").write_text(CLIENT if plays == "client" else AGENT)
    if plays != "environment":
        config.train.agent_func_path = "agent.py"
    result = rollgrad.train(config, environment=Gallery if plays == "environment" else None)
    assert result.steps == 2
    first = next(row for row in logged(workspace / "out") if "policy/loss" in row)
    assert first["policy/mismatch_abs"] < 1e-5  # tokens of all turns are scored as they were sampled
    assert first["reward/turns"] > 1.5


@pytest.mark.demo
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("demo", ["shapes", "streak"])
def test_the_demo_draws_and_trains(demo: str, run_script: Callable[..., str], tmp_path: Path) -> None:
    output = tmp_path / "run"
    printed = run_script(f"examples/{demo}.py", "--steps", "1", "--rows", "40", "--output_dir", str(output))
    assert re.search(r"greedy accuracy +│ +\d+%", printed)
    assert any("policy/loss" in row for row in logged(output))


SCHEMA = {
    "type": "object",
    "properties": {"red": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["red", "n"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "seen", "schema": SCHEMA}}
ASKING = f"""
import openai


async def run_agent(task):
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        for more in ({{}}, {{"response_format": {FORM!r}}}):
            await client.chat.completions.create(model=task.model, messages=task.prompt.messages, **more)
        return 1.0
"""


def test_a_conversation_has_the_same_tokens_in_chat_in_a_server_and_in_training(
    workspace: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With images in two messages; and, in a server and in training, also with a reply of a prescribed form."""
    opening = [
        {"role": "user", "content": [{"type": "image", "image": "red.png"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "It is red."},
    ]
    last = {"role": "user", "content": [{"type": "image", "image": "blue.png"}, {"type": "text", "text": "And now?"}]}
    (workspace / "opening.json").write_text(json.dumps(opening))
    likeliest = ["--model", str(model), "--dtype", "float32", "--top_k", "1", "--max_new_tokens", "60"]
    said = "/image blue.png\nAnd now?"
    assert main(["chat", *likeliest, "--messages", "opening.json", "--json", "--prompt", said]) == 0
    in_chat = json.loads(capsys.readouterr().out)["token_ids"]

    served = served_replies(model, [*opening, last])
    assert served[0][1] == in_chat
    assert json.loads(served[1][2])["red"] in (True, False)

    def marked(message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        text = content if isinstance(content, str) else f"<image>{content[1]['text']}"
        return {"role": message["role"], "content": text}

    row = {"prompt": [*map(marked, [*opening, last])], "images": ["red.png", "blue.png"]}
    (workspace / "prompts.jsonl").write_text(json.dumps(row))
    (workspace / "agent.py").write_text(ASKING)
    config = rollgrad.load_config("run.yaml")
    config.reward.function_path, config.data.label_key, config.train.agent_func_path = None, None, "agent.py"
    config.rollout.top_k, config.rollout.max_new_tokens = 1, 60
    config.rollout.batch_size, config.rollout.n_samples_per_prompt = 1, 1
    config.train.max_steps, config.train.batch_size = 1, None
    config.algo.advantage.estimator = "reinforce"
    rollgrad.train(config)
    trained = [
        (stored["token"][: stored["prompt_tokens"]], stored["token"][stored["prompt_tokens"] :])
        for stored in rollouts(workspace / "out", ("kind", "token", "prompt_tokens"))
        if stored["kind"] == "update"
    ]
    assert sorted(trained) == sorted((prompt, reply) for prompt, reply, _ in served)


def served_replies(model: Path, messages: list[dict[str, Any]]) -> list[tuple[list[int], list[int], str]]:
    """Prompt tokens, reply tokens and text of a served model's replies: as it likes, and in a form."""

    def sent(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] != "image":
            return part
        file = base64.b64encode(Path(part["image"]).read_bytes()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{file}"}}

    wired = [
        {**message, "content": [*map(sent, content)]} if isinstance(content := message["content"], list) else message
        for message in messages
    ]
    with _loaded_app(ServeAgentArguments(model=str(model), dtype=DType.FLOAT32, top_k=1, max_new_tokens=60), []) as (
        app,
        _,
    ):
        return asyncio.run(answered(app, wired))


async def answered(app: Any, messages: list[Any]) -> list[tuple[list[int], list[int], str]]:
    from openai import AsyncOpenAI

    server, found = Server(app, name="agent server"), []
    async with AsyncOpenAI(base_url=f"{await server.start()}/v1", api_key="none") as client:
        for more in ({}, {"response_format": FORM}):
            asked: dict[str, Any] = {"model": "model", "messages": messages, **more}
            reply: Any = await client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
            (choice,) = reply.choices
            found.append((reply.prompt_token_ids, choice.token_ids, choice.message.content))
    await server.stop()
    return found


VLM_SCRIPT = """
python3 -m openrlhf.cli.train_ppo_ray --actor.num_nodes 1 --actor.num_gpus_per_node 1
--algo.advantage.estimator reinforce_baseline --algo.kl.init_coef 0 --train.micro_batch_size 1 --train.batch_size 8
--rollout.micro_batch_size 1 --rollout.batch_size 4 --rollout.n_samples_per_prompt 2 --train.num_episodes 1
--data.prompt_dataset prompts.jsonl --data.input_key prompt --data.label_key label --data.image_key images
--data.max_images_per_prompt 2 --data.apply_chat_template --actor.freeze_visual_encoder --actor.adam.lr 1e-2
--rollout.max_new_tokens 60 --data.max_len 400 --train.agent_func_path agent.py --ckpt.output_dir out
"""
"""OpenRLHF's launch script for models that see images, for one process, with an agent file."""


def test_a_launch_script_of_openrlhf_trains_an_agent_file_that_answers_with_images(
    workspace: Path, model: Path
) -> None:
    (workspace / "agent.py").write_text(AGENT)
    translated = translate_command([*VLM_SCRIPT.split(), "--actor.model_name_or_path", str(model)])
    assert not [note for note in translated.notes if note.startswith("not honoured")]
    config = translated.run
    assert isinstance(config, RLConfig)
    # vLLM makes this model's processor with torchvision alone.
    config.rollout.engine, config.vllm = Engine.EMBEDDED, VLLMConfig()
    config.logger.console = False
    rollgrad.train(config)
    (step,) = (row for row in logged(workspace / "out") if "policy/loss" in row)
    assert step["reward/turns"] > 1
    kept = list(rollouts(workspace / "out", ("kind", "token", "prompt_tokens")))
    pad = processor_of(str(model)).tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert any(pad in row["token"][row["prompt_tokens"] :] for row in kept)  # of the file's answers
    before, after = weights_of(model), weights(workspace / "out")
    changed = [name for name in before if not before[name].to(after[name].dtype).equal(after[name])]
    assert changed
    assert not any("visual" in name for name in changed)
