"""Wrong inputs of a run are refused before a model is loaded, or an engine or a cluster started."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rollgrad
from rollgrad.adapters.engines.vllm.engine import VLLMEngine
from rollgrad.adapters.engines.vllm_server.engine import ServedEngine
from rollgrad.adapters.ray.session import RaySession
from rollgrad.domain.errors import RollgradError
from rollgrad.entrypoints.cli.main import main

ROWS = [{"question": f"{a}+1?", "answer": str(a + 1)} for a in range(4)]
UNFIT = "reward_func has the parameter 'completion', which is neither known to reward functions"
FILES = {
    "prompts.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    "unlabelled.jsonl": json.dumps({"question": "1+1?"}) + "\n",
    "without_prompt.jsonl": json.dumps({"question": "", "answer": "2"}) + "\n",
    "unfit.py": "def reward_func(completion, **given):\n    return [0.0] * len(completion)\n",
    "fit.py": "def reward_func(completions, **given):\n    return [0.0] * len(completions)\n",
    "empty.py": "",
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
    for cls in (RaySession, VLLMEngine, ServedEngine):
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
    ],
)
def test_all_problems_of_inputs_are_told_together(refused: Refused, flags: list[str], problems: list[str]) -> None:
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
