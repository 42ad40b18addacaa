"""Reward functions written for OpenRLHF, TRL and verl get what they get there, by the names of their parameters."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollgrad.adapters.rewards.function import FunctionReward, load_reward_function
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import Reward, RewardRequest
from rollgrad.domain.errors import ConfigurationError, NotApplicableError, RewardError

ASKED = [{"role": "user", "content": "3+4?"}]


def ask(reply: str = "7", *, row: Mapping[str, Any] | None = None, label: Any = "7", step: int = 0) -> RewardRequest:
    """A reply to a rendered chat prompt, as the single-turn executor describes it."""
    prompt = Prompt(
        token_ids=(1, 2),
        text="<user>3+4?<end><assistant>",
        label=label,
        datasource="sums",
        metadata={"input": "3+4?"} if row is None else row,
        messages=tuple(ASKED),
    )
    return RewardRequest(
        prompt=prompt,
        response=reply,
        stop_reason=StopReason.STOP,
        query=f"{prompt.text}{reply}<end>",
        token_ids=(1, 2, 40, 41),
        response_token_ids=(40, 41),
        step=step,
    )


MESSAGES = {"prompt": ASKED, "solution": "7", "level": 3}
"""A row of TRL's kind: its prompt is a conversation."""


async def score(func: Any, *requests: RewardRequest, **settings: Any) -> list[Reward]:
    return await FunctionReward(func, timeout=60.0, **settings).score(list(requests))


async def values(func: Any, *requests: RewardRequest) -> list[float]:
    return [reward.value for reward in await score(func, *requests)]


async def seen(signature: str, *requests: RewardRequest) -> dict[str, Any]:
    """Returns the arguments that a function with these parameters is passed."""
    calls: list[dict[str, Any]] = []
    names: dict[str, Any] = {"calls": calls}
    exec(
        f"def reward_func({signature}):\n    calls.append(dict(locals()))\n    return [0.0] * {len(requests)}\n", names
    )
    await score(names["reward_func"], *requests)
    (call,) = calls
    return call


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("queries", ["<user>3+4?<end><assistant>7<end>", "<user>3+4?<end><assistant>8<end>"]),
        ("prompts", ["<user>3+4?<end><assistant>"] * 2),
        ("labels", ["7", None]),
        ("messages", [[*ASKED, {"role": "assistant", "content": reply}] for reply in ("7", "8")]),
        ("tokens", [[40, 41]] * 2),
        ("metadata", [{"input": "3+4?", "level": 1}, {"input": "3+4?", "hint": "no"}]),
        ("step", 9),
        ("level", [1, None]),
        ("hint", [None, "no"]),
        ("input", ["3+4?"] * 2),
        ("*, level", [1, None]),
    ],
)
async def test_a_parameter_gets_what_it_is_called(name: str, wanted: Any) -> None:
    requests = [
        ask("7", row={"input": "3+4?", "level": 1}, step=8),
        ask("8", row={"input": "3+4?", "hint": "no"}, label=None, step=9),
    ]
    assert await seen(name, *requests) == {name.removeprefix("*, "): wanted}


async def test_several_columns_and_known_names_together() -> None:
    requests = [ask("7", row={"input": "3+4?", "low": 1, "high": 9})]
    assert await seen("queries, low, high, step, scale=2.0", *requests) == {
        "queries": [requests[0].query],
        "low": [1],
        "high": [9],
        "step": 0,
        "scale": 2.0,
    }


async def test_keywords_get_everything() -> None:
    kwargs = (await seen("queries, **kwargs", ask(row={"input": "3+4?", "level": 1})))["kwargs"]
    assert kwargs["prompts"] == ["<user>3+4?<end><assistant>"]
    assert kwargs["labels"] == ["7"]
    assert kwargs["level"] == [1]
    assert {"messages", "tokens", "metadata", "step", "completions"} <= kwargs.keys()


async def test_known_names_go_before_columns_but_for_trl_s_functions() -> None:
    row = {"prompt": ASKED, "labels": "a column", "step": "one by one"}
    assert (await seen("queries, labels, step", ask(row=row)))["labels"] == ["7"]
    assert (await seen("completions, labels, step", ask(row=row)))["labels"] == ["a column"]
    assert (await seen("completions, step", ask(row={"prompt": ASKED}, step=4)))["step"] == 4


# TRL


async def test_trl_s_functions_get_messages_where_the_row_has_messages() -> None:
    call = await seen("completions, prompts, completion_ids, trainer_state, **kwargs", ask("7", row=MESSAGES, step=6))
    assert call["completions"] == [[{"role": "assistant", "content": "7"}]]
    assert call["prompts"] == [ASKED]
    assert call["completion_ids"] == [[40, 41]]
    assert call["trainer_state"].global_step == 6
    assert call["kwargs"]["solution"] == ["7"]
    assert call["kwargs"]["level"] == [3]
    assert "prompt" not in call["kwargs"], "which TRL leaves out"


async def test_trl_s_functions_get_texts_where_the_row_has_a_text() -> None:
    call = await seen("completions, prompts", ask("7", row={"question": "3+4?"}))
    assert call == {"completions": ["7"], "prompts": ["3+4?"]}


async def test_with_queries_prompts_and_completions_are_texts_whatever_the_row_has() -> None:
    call = await seen("queries, prompts, completions", ask("7", row=MESSAGES))
    assert call["completions"] == ["7"]
    assert call["queries"][0].startswith(call["prompts"][0])


async def test_a_function_of_trl_s_own_runs() -> None:
    from trl.rewards import accuracy_reward, think_format_reward

    right, wrong = (ask(rf"It is $\boxed{{{n}}}$.", row={**MESSAGES, "solution": "$7$"}) for n in (7, 8))
    with capture_logs() as logs:
        first, second = await score(accuracy_reward, right, wrong)
    assert (first.value, second.value) == (1.0, 0.0)
    assert [line["dropped"] for line in logs if "dropped" in line] == [["answer_parsed", "gold_parsed", "solution"]]
    with pytest.raises(NotApplicableError, match="returned None for reply 0"):
        await score(accuracy_reward, ask("7", row={**MESSAGES, "solution": ""}))
    assert await values(think_format_reward, ask("<think>\nhm\n</think>\n7", row=MESSAGES)) == [1.0]


async def test_what_trl_s_functions_log_is_logged() -> None:
    def reward_func(completions: list[Any], log_metric: Any, log_extra: Any, **kwargs: Any) -> list[float]:
        log_metric("right", 0.5)
        log_extra("length", [len(completion[0]["content"]) for completion in completions])
        return [1.0, 0.0]

    first, second = await score(reward_func, ask("7", row=MESSAGES), ask("eight", row=MESSAGES))
    assert first.metrics == {"right": 0.5, "length": 1.0}
    assert second.metrics == {"right": 0.5, "length": 5.0}


async def test_a_function_for_messages_is_told_why_it_got_texts() -> None:
    def reward_func(completions: list[Any], **kwargs: Any) -> list[float]:
        return [float(completion[0]["content"] == "7") for completion in completions]

    assert await values(reward_func, ask("7", row=MESSAGES)) == [1.0]
    with pytest.raises(RewardError, match=r"raised TypeError.*completions are texts, as the rows have their prompts"):
        await score(reward_func, ask("7"))


async def test_none_says_that_a_reward_does_not_apply() -> None:
    with pytest.raises(NotApplicableError, match=r"^reward_func returned None for reply 1: no reward applies to it"):
        await score(lambda queries: [1.0, None], ask(), ask())
    parts = {"rewards": {"sum": [1.0, None], "form": [None, 2.0]}}
    assert await values(lambda queries: parts, ask(), ask()) == [1.0, 2.0]
    with pytest.raises(NotApplicableError, match="reply 1"):
        await score(lambda queries: {"rewards": {"sum": [1.0, None], "form": [None, None]}}, ask(), ask())


# verl

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": ASKED,
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 5},
}
"""A row of verl's kind."""


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    assert (data_source, ground_truth, extra_info) == ("openai/gsm8k", "72", {"split": "train", "index": 5})
    return 1.0 if solution_str.endswith(f"#### {ground_truth}") else 0.1


async def by_name(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any) -> float:
    await asyncio.sleep(0)
    return compute_score(data_source, solution_str, ground_truth, extra_info)


@pytest.mark.parametrize("label", [None, "72", VERL["reward_model"]], ids=["no label", "key", "column"])
@pytest.mark.parametrize("func", [compute_score, by_name])
async def test_verl_s_functions_judge_one_reply_at_a_time(func: Any, label: Any) -> None:
    requests = [ask(reply, row=VERL, label=label) for reply in ("so #### 72", "no", "#### 72")]
    assert await values(func, *requests) == [1.0, 0.1, 1.0]


async def test_verl_s_mappings_have_a_score_and_numbers_to_log() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> dict[str, Any]:
        return {"score": -1, "acc": False, "pred": "[INVALID]", "feedback": "no number"}

    wanted = Reward(value=-1.0, score=-1.0, metrics={"acc": 0.0}, answer="[INVALID]", feedback="no number")
    assert await score(compute_score, ask(row=VERL)) == [wanted]
    with pytest.raises(RewardError, match=r"returned a mapping with \['acc'\]: it needs the key 'score'"):
        await score(lambda solution_str, ground_truth: {"acc": 1}, ask(row=VERL))


async def test_verl_s_functions_go_without_what_the_row_lacks() -> None:
    def compute_score(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, method: str = ""
    ) -> float:
        assert (data_source, extra_info, method) == ("sums", {}, "")
        return float(solution_str == ground_truth)

    assert await values(compute_score, ask("7")) == [1.0]


# Signatures that do not fit


@pytest.mark.parametrize(
    "signature", ["queries, answer", "completions, answer", "solution_str, answer", "answer", "queries, *, answer"]
)
async def test_an_unknown_parameter_is_one_sentence(signature: str) -> None:
    """It ends the run rather than an episode: every other one would fail alike."""
    with pytest.raises(ConfigurationError) as error:
        await seen(signature, ask(row={"question": "3+4?", "solution": "7"}))
    message = str(error.value)
    assert message.startswith("reward_func has the parameter 'answer', which is neither known to reward functions")
    assert ("solution_str" if "solution_str" in signature else "completions") in message
    assert "nor a column of 'sums' (question, solution)" in message


@pytest.mark.parametrize(("misspelt", "meant"), [("lables", "labels"), ("soluton", "solution")])
async def test_a_misspelt_parameter_is_told_what_it_may_mean(misspelt: str, meant: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"has the parameter '{misspelt}', .*: rename it \({meant}\?\), "):
        await seen(f"queries, {misspelt}", ask(row={"question": "3+4?", "solution": "7"}))


@pytest.mark.parametrize("signature", ["", "a, b, /", "a, /, queries"])
def test_a_function_that_nothing_can_be_passed_to_is_refused_before_the_run(signature: str) -> None:
    names: dict[str, Any] = {}
    exec(f"def reward_func({signature}): ...", names)
    with pytest.raises(ConfigurationError, match=r"reward_func takes .*give it some of queries, prompts, labels"):
        FunctionReward(names["reward_func"], timeout=1.0)


@pytest.mark.parametrize("signature", ["q, p, y", "query, prompt, label", "*arguments", "q, p, y, /"])
async def test_other_names_are_passed_by_position_as_ever(signature: str) -> None:
    row = {"prompt": ASKED, "label": "7"}
    found = await seen(signature, ask(row=row))
    given = found["arguments"] if "arguments" in found else tuple(found.values())
    assert given == ([ask().query], ["<user>3+4?<end><assistant>"], ["7"])


async def test_columns_are_not_taken_for_positions() -> None:
    row = {"question": "3+4?", "answer": "7", "level": 2}
    assert await seen("question, answer, level", ask(row=row)) == {name: [value] for name, value in row.items()}
    with pytest.raises(ConfigurationError, match="parameter 'levle'"):
        await seen("question, answer, levle", ask(row=row))


# Files


@pytest.mark.parametrize(
    ("suffix", "source", "wanted"),
    [
        ("", "def reward_func(queries): return [1.0]", 1.0),
        ("", "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 2.0", 2.0),
        ("", "def compute_score(solution_str): return 2.0\ndef reward_func(queries): return [1.0]", 1.0),
        (
            ":second",
            "def reward_func(queries): return [1.0]\nasync def second(completions, **kwargs): return [3.0]",
            3.0,
        ),
    ],
)
async def test_a_file_s_function_by_its_usual_name_or_its_own(
    suffix: str, source: str, wanted: float, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(source)
    path = f"{tmp_path / 'reward.py'}{suffix}"
    assert await values(load_reward_function(path), ask()) == [wanted]
    (reward,) = await FunctionReward.load(path, timeout=60.0).score([ask()])
    assert reward.value == wanted


async def test_objects_that_are_called_are_read_too() -> None:
    class Judge:
        def __call__(self, completions: list[Any], level: list[int]) -> list[float]:
            return [float(number) for number in level]

    class Later:
        async def __call__(self, solution_str: str) -> float:
            return float(solution_str)

    assert await values(Judge(), ask(row=MESSAGES)) == [3.0]
    assert await values(Later(), ask("4"), ask("5")) == [4.0, 5.0]
    assert await values(SimpleNamespace(rule=lambda queries: [6.0]).rule, ask()) == [6.0]
