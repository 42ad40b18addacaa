"""Wrong inputs of a run are refused before a model is loaded, or an engine or a cluster started."""

import asyncio
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

import rollgrad
from rollgrad.adapters.engines.vllm.engine import VLLMEngine
from rollgrad.adapters.ray.session import RaySession
from rollgrad.adapters.servers.server import Server
from rollgrad.domain.errors import RollgradError
from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.composition.vocabulary import check_tokens
from tests.fakes.model_server import ModelServer
from tests.tiny_models import tiny_llama

ROWS = [{"question": f"{a}+1?", "answer": str(a + 1)} for a in range(4)]
UNFIT = "reward_func has the parameter 'completion', which is neither known to reward functions"
FILES = {
    "prompts.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    "unlabelled.jsonl": json.dumps({"question": "1+1?"}) + "\n",
    "without_prompt.jsonl": json.dumps({"question": "", "answer": "2"}) + "\n",
    "unfit.py": "def reward_func(completion, **given):\n    return [0.0] * len(completion)\n",
    "fit.py": "def reward_func(completions, **given):\n    return [0.0] * len(completions)\n",
    "empty.py": "",
    "texts.jsonl": json.dumps({"text": "1+1 is 2."}) + "\n",
    "pairs.jsonl": json.dumps({"prompt": "1+1?", "chosen": "2", "rejected": "3"}) + "\n",
    "labels.jsonl": json.dumps({"prompt": "1+1?", "completion": "2", "label": True}) + "\n",
    "steps.jsonl": json.dumps({"prompt": "1+1?", "completions": ["It is 2."], "labels": [True]}) + "\n",
}
SMALL = [
    *("--rollout.batch_size", "2", "--rollout.n_samples_per_prompt", "2", "--rollout.max_new_tokens", "4"),
    *("--ckpt.output_dir", "out"),
]
TRAIN = ["train", "rl", "--data.prompt_dataset", "prompts.jsonl", *SMALL]
EVAL = ["eval", "--eval.dataset", "prompts.jsonl", "--rollout.max_new_tokens", "4"]
LOOP = ["loop", "rs", "--data.prompt_dataset", "prompts.jsonl", *SMALL]
SFT = ["train", "sft", "--data.dataset", "prompts.jsonl", "--ckpt.output_dir", "out"]
VERIFIED = ["--reward.verifier", "last_number"]
UNFIT_REWARD = ["--reward.function_path", "unfit.py"]

Refused = Callable[..., list[str]]


class StartedError(Exception):
    """A model is loaded, or an engine or a cluster started."""


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> Refused:
    """Runs a command that must be refused; returns its errors, after making sure that nothing was started."""
    import transformers

    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    started: list[str] = []

    def start(*_: object, **__: object) -> None:
        started.append("something")
        raise StartedError

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", start)
    for cls in (RaySession, VLLMEngine):
        monkeypatch.setattr(cls, "__init__", start)

    def run(words: list[str], *, starts: bool = False) -> list[str]:
        try:
            status = main([*words, "--actor.model_name_or_path", str(tiny_model_dir)])
        except StartedError:
            status = 1
        assert bool(started) == starts
        assert status
        lines = capsys.readouterr().err.splitlines()
        return [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]

    return run


@pytest.mark.parametrize(
    "words",
    [
        TRAIN,
        [*TRAIN, "--dry_run"],
        [*TRAIN, "--rollout.engine", "vllm"],
        [*TRAIN, "--cluster.enable", "--rollout.engine", "vllm"],
        EVAL,
        LOOP,
    ],
)
def test_a_reward_function_that_cannot_be_called_is_refused(refused: Refused, words: list[str]) -> None:
    (error,) = refused([*words, *UNFIT_REWARD])
    assert error.startswith(UNFIT)
    assert "(answer, datasource, question)" in error
    assert not Path("out/loop.json").exists()


@pytest.mark.parametrize("words", [TRAIN, EVAL])
def test_one_that_can_be_called_is_not(refused: Refused, words: list[str]) -> None:
    refused([*words, "--reward.function_path", "fit.py"], starts=True)


@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        (
            ["--eval.dataset", "unlabelled.jsonl", "--reward.verifier", "last_number", "--agent.tools", "empty.py"],
            ["--data.label_key", "no function in it is marked as a tool"],
        ),
        (["--eval.dataset", "without_prompt.jsonl", *UNFIT_REWARD], ["Row 1 of eval.dataset", UNFIT]),
        (["--train.agent_func_path", "empty.py"], ["defines no class Environment"]),
        (
            ["--agent.command", "no-such-program -x", *UNFIT_REWARD],
            ["which cannot be run (no program of this name", UNFIT],
        ),
        (["--reward.model_name_or_path", "REWARDS", "--reward.step_separator", ";"], ["is no process reward model"]),
        (
            [
                *("--reward.model_name_or_path", "WRITER"),
                *("--algo.kl.init_coef", "1", "--ref.model_name_or_path", "REWARDS"),
            ],
            ["no reward model (its weights lack score.weight)", "--ref.model_name_or_path is 'REWARDS', a Llama"],
        ),
    ],
)
def test_all_problems_of_inputs_are_told_together(
    refused: Refused, reward_model_dir: Path, tiny_model_dir: Path, flags: list[str], problems: list[str]
) -> None:
    def named(text: str) -> str:
        return text.replace("REWARDS", str(reward_model_dir)).replace("WRITER", str(tiny_model_dir))

    flags, problems = [*map(named, flags)], [*map(named, problems)]
    for words in (TRAIN, [*TRAIN, "--dry_run"]):
        errors = refused([*words, *flags])
        assert len(errors) == len(problems), errors
        for problem in problems:
            assert sum(problem in error for error in errors) == 1


def test_a_reward_of_the_caller_is_checked_as_one_of_a_file_is(refused: Refused, tiny_model_dir: Path) -> None:
    def unfit(completion: list[str], **given: object) -> list[float]:
        return [0.0]

    config = rollgrad.RLConfig()
    config.actor.model_name_or_path = str(tiny_model_dir)
    config.data.prompt_dataset = "prompts.jsonl"
    config.rollout.max_new_tokens = 4
    with pytest.raises(RollgradError, match="unfit has the parameter 'completion'"):
        rollgrad.train(config, reward=unfit)
    with pytest.raises(RollgradError, match="StartedError"):
        rollgrad.train(config, reward=lambda completions: [0.0] * len(completions))


@pytest.mark.parametrize(
    ("words", "extras"),
    [
        ([*TRAIN, *VERIFIED, "--rollout.engine", "vllm"], ["vllm"]),
        ([*TRAIN, *VERIFIED, "--rollout.engine", "vllm", "--dry_run"], ["vllm"]),
        ([*LOOP, *VERIFIED], []),
        (SFT, []),
        ([*SFT, "--dry_run"], []),
    ],
)
def test_missing_packages_are_named_together(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, words: list[str], extras: list[str]
) -> None:
    for package in ("vllm", "peft", "tensorboard", "mlflow"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    errors = refused(
        [*words, *("--actor.lora.rank", "2", "--logger.tensorboard_dir", "curves", "--logger.report_to", "mlflow")]
    )
    named = [extra for error in errors for extra in re.findall(r"pip install rollgrad\[([\w-]+)\]", error)]
    assert sorted(named) == sorted([*extras, "lora", "tracking", "mlflow"])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("rm --data.dataset pairs.jsonl --rm.margin", "no row of data.dataset has a number other than 0"),
        ("kto --data.dataset labels.jsonl --kto.loss kto", "data.dataset has one reply alone"),
        ("kto --data.dataset labels.jsonl --kto.loss apo_zero_unpaired --kto.balance", "All 1 replies of data.dataset"),
        ("prm --data.dataset steps.jsonl --prm.reward_tokens + no-such-token", "writes as"),
        ("dpo --data.dataset pairs.jsonl --ref.model_name_or_path other", "another vocabulary than the actor"),
        ("kd --data.dataset texts.jsonl --teacher.model_name_or_path other", "another vocabulary than the actor"),
        ("dpo --data.dataset pairs.jsonl --ref.model_name_or_path REWARDS", "which judges texts and writes none"),
        ("kd --data.dataset texts.jsonl --teacher.model_name_or_path REWARDS", "which judges texts and writes none"),
    ],
)
def test_what_a_trainer_cannot_learn_from_is_refused(
    refused: Refused, tiny_tokenizer: Any, reward_model_dir: Path, words: str, problem: str
) -> None:
    other_model(tiny_tokenizer, Path("other"))
    words = words.replace("REWARDS", str(reward_model_dir))
    for flags in ([], ["--dry_run"]):
        (error,) = refused(["train", *words.split(), "--ckpt.output_dir", "out", *flags])
        assert problem in error


async def test_a_server_that_samples_otherwise_is_refused(refused: Refused) -> None:
    """Here one that is no server of a model at all."""
    server = Server(FastAPI(), name="web server", max_body=1)
    await server.start()
    try:
        served = ["--rollout.engine", "server", "--rollout.server_urls", str(server.url)]
        (error,) = await asyncio.to_thread(refused, [*TRAIN, *VERIFIED, *served])
    finally:
        await server.stop()
    assert error.startswith(f"The server {server.url} answered /v1/models with 404")


async def test_a_server_that_takes_no_weights_is_refused(refused: Refused) -> None:
    server = ModelServer(tokens=False, develops=False)
    served = ["--rollout.engine", "server", "--rollout.server_urls", server.url, *VERIFIED]
    try:
        (error,) = await asyncio.to_thread(refused, [*TRAIN, *served])
    finally:
        server.close()
    assert "VLLM_SERVER_DEV_MODE=1" in error


def test_a_model_that_the_run_would_replace_is_refused(refused: Refused, tiny_model_dir: Path) -> None:
    shutil.copytree(tiny_model_dir, "out/best")
    before = ["--ref.model_name_or_path", "out/best", "--algo.kl.init_coef", "0.1", "--ckpt.overwrite"]
    for flags in ([], ["--dry_run"]):
        (error,) = refused([*TRAIN, *VERIFIED, *before, *flags])
        assert error.startswith("ref.model_name_or_path is 'out/best', which the run would replace")
    assert Path("out/best/config.json").is_file()


@pytest.mark.parametrize("words", [[*TRAIN, *VERIFIED, "--cluster.enable", "--rollout.engine", "vllm"], SFT])
def test_a_model_without_weights_is_refused(
    refused: Refused, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """A dry run plans with its settings and its tokenizer alone, and says so."""
    shutil.copytree(tiny_model_dir, "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    rows = ["--data.input_key", "question", "--data.output_key", "answer"] if words is SFT else []
    bare = ["--actor.model_name_or_path", "bare", "--ckpt.output_dir", "out", *rows]
    assert main([*words, *bare]) == 2
    assert "actor.model_name_or_path is 'bare', which holds no weights" in capsys.readouterr().err
    assert main([*words, *bare, "--dry_run"]) == 0
    assert "actor.model_name_or_path is 'bare', which holds no weights" in " ".join(capsys.readouterr().out.split())


def test_weights_that_need_gpus_are_refused_without(refused: Refused) -> None:
    (error,) = refused([*TRAIN, *VERIFIED, "--rollout.engine", "vllm", "--vllm.sync_backend", "cuda_ipc"])
    assert error.startswith("vllm.sync_backend is cuda_ipc, which needs GPUs, but")


@pytest.mark.parametrize("words", [[*TRAIN, *VERIFIED], [*SFT, "--data.input_key", "question"]])
def test_metrics_that_cannot_be_written_are_refused(refused: Refused, words: list[str]) -> None:
    for flags in ([], ["--dry_run"]):
        (error,) = refused([*words, "--logger.tensorboard_dir", "empty.py/curves", *flags])
        assert re.match(r"logger.tensorboard_dir is 'empty.py/curves', but .*/empty.py is no directory", error)


def test_models_of_other_vocabularies_are_refused(refused: Refused, tiny_tokenizer: Any) -> None:
    other_model(tiny_tokenizer, Path("other"))
    others = ["--ref.model_name_or_path", "other", "--critic.model_name_or_path", "other"]
    words = [*TRAIN, *VERIFIED, *others, "--algo.advantage.estimator", "gae", "--algo.kl.init_coef", "0.1"]
    for flags in ([], ["--dry_run"]):
        reference, critic = refused([*words, *flags])
        assert reference.startswith("ref.model_name_or_path is 'other', which has another vocabulary than the actor: 2")
        assert critic.startswith("critic.model_name_or_path is 'other'")
    (error,) = refused(
        [*words, "--algo.kl.use_loss", "--algo.kl.estimator", "full", "--critic.model_name_or_path", "None"]
    )
    assert "another vocabulary than the actor: 2 tokens differ" in error
    shutil.rmtree("other")
    tiny_llama(tiny_tokenizer, Path("other"), head_dim=16)
    refused(words, starts=True)


@pytest.mark.parametrize("words", [[*TRAIN, *VERIFIED], [*LOOP, *VERIFIED], SFT, [*SFT, "--dry_run"]])
def test_layers_that_get_adapters_are_the_models(refused: Refused, words: list[str]) -> None:
    data = ["--data.dataset", "texts.jsonl"] if words[1] == "sft" else []
    (error,) = refused([*words, *data, "--actor.lora.rank", "2", "--actor.lora.target_modules", "qproj"])
    assert error.startswith("actor.lora.target_modules has 'qproj', but the linear layers of")


def test_special_tokens_may_have_other_names(tiny_tokenizer: Any, tmp_path: Path) -> None:
    path = tiny_llama(tiny_tokenizer, tmp_path / "older", head_dim=16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (path / name).read_text()
        assert "<|im_start|>" in text or name == "tokenizer_config.json"
        (path / name).write_text(text.replace("<|im_start|>", "<|reserved|>"))
    check_tokens("ref", str(path), tiny_tokenizer)


def other_model(tokenizer: Any, path: Path) -> None:
    """Saves a model for whose tokenizer two tokens are swapped."""
    tiny_llama(tokenizer, path, head_dim=16)
    content = json.loads((path / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (path / "tokenizer.json").write_text(json.dumps(content))
