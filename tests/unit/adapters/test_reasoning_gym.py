"""reasoning-gym tasks: specification, prompts, and scoring in processes of their own."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.data.reasoning_gym.source import (
    ReasoningGymPromptSource,
    ReasoningGymReward,
    TaskSpec,
    parse_spec,
)
from rollgrad.adapters.data.reasoning_gym.worker import extract_answer
from rollgrad.application.settings.sections.data import DataConfig
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import Reward, RewardRequest
from rollgrad.domain.errors import DataError, MissingExtraError, RewardError
from tests.hostile_replies import ask, score, tasks

SPEC = "reasoning_gym:basic_arithmetic?min_terms=2&max_terms=2&operators=['+']"


def source(tokenizer: Any, spec: str = SPEC, *, size: int = 5, seed: int = 1) -> ReasoningGymPromptSource:
    return ReasoningGymPromptSource(spec, TemplateCodec(tokenizer), DataConfig(), size=size, seed=seed)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("reasoning_gym:chain_sum", TaskSpec("chain_sum")),
        (
            "reasoning_gym:x?a=2&b=[1,'+']&c=True&d=plain&e=-0.5",
            TaskSpec("x", (("a", 2), ("b", [1, "+"]), ("c", True), ("d", "plain"), ("e", -0.5))),
        ),
    ],
)
def test_a_specification_is_a_task_and_typed_settings(spec: str, expected: TaskSpec) -> None:
    assert parse_spec(spec) == expected


@pytest.mark.parametrize("spec", ["chain_sum", "reasoning_gym:", "reasoning_gym:a,reasoning_gym:b"])
def test_another_form_is_refused(spec: str) -> None:
    with pytest.raises(DataError, match="reasoning_gym:TASK"):
        parse_spec(spec)


@pytest.mark.parametrize(
    ("response", "answer"),
    [("<answer> 7 </answer>", "7"), ("<answer>1</answer> no: <answer>\n2</answer>.", "2"), (" 7\n", "7")],
)
def test_the_answer_is_in_the_last_tags_or_the_whole_reply(response: str, answer: str) -> None:
    assert extract_answer(response) == answer


def test_prompts_follow_the_settings_and_carry_their_entry(tiny_tokenizer: Any) -> None:
    for prompt in source(tiny_tokenizer).prompts():
        assert prompt.metadata["metadata"]["num_terms"] == 2
        assert "+" in prompt.metadata["metadata"]["expression"]
        assert prompt.metadata["question"] in prompt.text
        assert prompt.label == prompt.metadata["answer"]
        assert prompt.datasource == "basic_arithmetic"


def test_tasks_depend_on_the_seed_alone(tiny_tokenizer: Any) -> None:
    same = [[p.text for p in source(tiny_tokenizer, seed=seed).prompts()] for seed in (1, 1, 2)]
    assert same[0] == same[1] != same[2]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("reasoning_gym:basic_aritmetic", "no task 'basic_aritmetic': the nearest are basic_arithmetic"),
        ("reasoning_gym:chain_sum?terms=2", r"chain_sum refuses its settings \(terms=2\)"),
        ("reasoning_gym:basic_arithmetic?min_terms=-3", r"refuses its settings \(min_terms=-3\): .*positive"),
    ],
)
def test_unknown_tasks_and_settings_are_refused(spec: str, message: str, tiny_tokenizer: Any) -> None:
    with pytest.raises(DataError, match=message):
        source(tiny_tokenizer, spec)
    with pytest.raises(DataError, match=message):
        ReasoningGymReward(spec, timeout=1.0)


@pytest.fixture(scope="module")
def reward() -> Iterator[ReasoningGymReward]:
    made = ReasoningGymReward(SPEC, timeout=60.0)
    yield made
    made.close()


async def judge(reward: ReasoningGymReward, prompt: Prompt, response: str) -> Reward:
    request = RewardRequest(prompt=prompt, response=response, stop_reason=StopReason.STOP)
    return (await reward.score([request]))[0]


async def test_the_tasks_own_scorer_judges(tiny_tokenizer: Any, reward: ReasoningGymReward) -> None:
    prompt = source(tiny_tokenizer).take(1)[0]
    assert (await judge(reward, prompt, f"I think <answer>{prompt.label}</answer>")).value == 1.0
    assert (await judge(reward, prompt, "no idea")).value == 0.0
    partial = await judge(reward, prompt, f"it is {prompt.label}")
    assert 0.0 < partial.value < 1.0


async def test_a_prompt_of_another_task_is_judged_by_its_own_scorer(
    tiny_tokenizer: Any, reward: ReasoningGymReward
) -> None:
    # Countdown accepts every expression that reaches the target; a comparison with the reference would not.
    prompt = source(tiny_tokenizer, "reasoning_gym:countdown").take(1)[0]
    rewritten = f"({prompt.label})"
    assert rewritten != prompt.label
    assert (await judge(reward, prompt, f"<answer>{rewritten}</answer>")).value == 1.0


async def test_a_scorer_that_breaks_down_gives_nothing_and_is_counted(
    tiny_tokenizer: Any, reward: ReasoningGymReward
) -> None:
    prompt = source(tiny_tokenizer).take(1)[0]
    broken = Prompt(
        token_ids=(1,),
        text="?",
        datasource=prompt.datasource,
        metadata={"question": "?", "answer": None, "metadata": {}},
    )
    result = await judge(reward, broken, "7")
    assert (result.value, result.metrics["judge_failed"]) == (0.0, 1.0)


async def test_a_prompt_from_elsewhere_is_refused(reward: ReasoningGymReward) -> None:
    with pytest.raises(RewardError, match=r"'gsm8k' is no reasoning-gym task"):
        await judge(reward, Prompt(token_ids=(1,), text="?", datasource="gsm8k"), "7")


@pytest.mark.slow
@pytest.mark.wide
def test_the_sandbox_changes_no_score() -> None:
    """Right, wrong and half right answers of every task are worth what its scorer says outside of the sandbox."""
    import reasoning_gym

    requests, expected, names = [], [], []
    for task in tasks():
        dataset = reasoning_gym.create_dataset(task, size=1, seed=5)
        made = dict(dataset[0])
        answer = str(made["answer"])
        for reply in (answer, answer + " 1", "no", ""):
            requests.append(ask(f"<answer>{reply}</answer>", None, task=task, entry=made))
            try:
                expected.append(float(dataset.score_answer(reply.strip(), made)))
            except Exception:  # which the sandbox counts as a failed judgement
                expected.append(0.0)
            names.append(f"{task}: {reply}")
    patient = ReasoningGymReward(SPEC, timeout=120.0)
    scores = [reward.value for reward in score(patient, requests)]
    patient.close()
    assert dict(zip(names, scores, strict=True)) == dict(zip(names, expected, strict=True))


def test_reasoning_gym_is_asked_for_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingExtraError, match=r"reasoning_gym:chain_sum needs .*rollgrad\[reasoning-gym\]"):
        ReasoningGymReward("reasoning_gym:chain_sum", timeout=1.0)
