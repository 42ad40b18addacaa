"""A language model as judge, against real HTTP servers that answer, fail and ramble."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.data.datasets.prompt_builder import PromptBuilder
from rollgrad.adapters.data.datasets.source import DatasetPromptSource
from rollgrad.adapters.rewards.judge import MAX_IN_FLIGHT, TOKEN_VARIABLE, JudgePrompt, LLMJudge
from rollgrad.adapters.rewards.rubric import criteria
from rollgrad.application.settings.sections.data import DataConfig
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import RewardRequest
from rollgrad.domain.errors import ConfigurationError, DataError, RewardError
from tests.fakes.reward_server import JsonServer

PROMPT = "Task: {prompt}\nReply: {response}\nReference: {label}\nLevel: {level}\nGrade it from 0 to 10."
MESSAGES = ({"role": "user", "content": "3+4?"},)


def ask(response: str = "7", **row: Any) -> RewardRequest:
    prompt = Prompt(token_ids=(1,), text="<user>3+4?", label="seven", messages=MESSAGES, metadata={"level": 2, **row})
    return RewardRequest(prompt=prompt, response=response, stop_reason=StopReason.STOP)


Serve = Callable[..., JsonServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[JsonServer] = []

    def start(answer: Any = "Grade: 7", status: int = 200) -> JsonServer:
        body = {"choices": [{"message": {"role": "assistant", "content": answer}}]} if status == 200 else answer
        servers.append(JsonServer(lambda path, question: (status, body)))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def judge_of(*servers: JsonServer, prompt: str = PROMPT, **how: Any) -> LLMJudge:
    return LLMJudge(
        [f"{server.url}/v1" for server in servers],
        model="judge",
        prompt=JudgePrompt(prompt, "judge.txt"),
        **{"timeout": 60.0, **how},
    )


async def judged(
    *servers: JsonServer, requests: tuple[RewardRequest, ...] = (), prompt: str = PROMPT, **how: Any
) -> list[float]:
    source = judge_of(*servers, prompt=prompt, **how)
    try:
        return [reward.value for reward in await source.score(requests or (ask(),))]
    finally:
        await source.aclose()


async def test_the_judge_is_asked_as_openai_s_clients_ask(serve: Serve) -> None:
    server = serve()
    assert await judged(server) == [7.0]
    assert server.paths == ["/v1/chat/completions"]
    question = "Task: 3+4?\nReply: 7\nReference: seven\nLevel: 2\nGrade it from 0 to 10."
    assert server.bodies == [
        {"model": "judge", "messages": [{"role": "user", "content": question}], "temperature": 0.0}
    ]


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("7", 7.0),
        ("The sum 3+4 is 7, so the grade is 9.5", 9.5),
        ("**Score: 8/10**", 8.0),
        ("I give it 8 out of 10.", 8.0),
        ("[[-2]]", -2.0),
        ("<think>maybe 3, or 4</think>\n5", 5.0),
    ],
)
async def test_the_last_number_is_the_reward(serve: Serve, answer: str, wanted: float) -> None:
    assert await judged(serve(answer)) == [wanted]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("I cannot say.", "'I cannot say.', which has no number: let --reward.judge_prompt ask for one"),
        ("<think>It is 7", "which has no number"),
        ("11", "whose last number 11 is not from 0 to 10: let --reward.judge_prompt ask"),
        (None, "which is no chat completion with a text"),
    ],
)
async def test_an_answer_without_a_judgement_is_a_reward_error(serve: Serve, answer: Any, message: str) -> None:
    with pytest.raises(RewardError) as error:
        await judged(serve(answer), bounds=(0.0, 10.0))
    assert message in str(error.value)


async def test_what_fails_in_passing_is_asked_again_elsewhere(serve: Serve) -> None:
    bad, good = serve("busy", 503), serve("3")
    assert await judged(bad, good, requests=tuple(ask(str(n)) for n in range(6))) == [3.0] * 6
    assert len(good.bodies) == 6


async def test_questions_that_are_given_up_say_nothing_about_the_server() -> None:
    hold = threading.Event()

    def answer(path: str, question: Any) -> tuple[int, Any]:
        hold.wait(60.0)
        return 200, {"choices": [{"message": {"role": "assistant", "content": "7"}}]}

    server = JsonServer(answer)
    judge = LLMJudge([f"{server.url}/v1"], model="judge", prompt=JudgePrompt(PROMPT, "judge.txt"), timeout=5.0)
    try:
        episodes = [asyncio.create_task(judge.score([ask()])) for _ in range(4)]
        while len(server.bodies) < 4:
            await asyncio.sleep(0.01)
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)
        hold.set()
        assert [reward.value for reward in await judge.score([ask()])] == [7.0]
    finally:
        hold.set()
        await judge.aclose()
        server.close()


async def test_what_another_attempt_would_not_change_is_one_sentence(serve: Serve) -> None:
    server = serve({"error": {"message": "no model judge"}}, 404)
    with pytest.raises(RewardError, match=r"The judge .*/v1/chat/completions answered 404 .*no model judge.*judge_url"):
        await judged(server)
    assert len(server.bodies) == 1


async def test_a_judge_serves_one_run_after_another(serve: Serve) -> None:
    server = serve("4")
    judge = LLMJudge([f"{server.url}/v1"], model="judge", prompt=JudgePrompt(PROMPT, "f"), timeout=60.0)

    async def crowd() -> list[float]:
        try:
            return [reward.value for reward in await judge.score([ask()] * (MAX_IN_FLIGHT + 6))]
        finally:
            await judge.aclose()

    for _ in range(2):  # each in an event loop of its own, with more questions than are asked at once
        assert await crowd() == [4.0] * (MAX_IN_FLIGHT + 6)


async def test_the_deadline_is_the_reward_s(serve: Serve) -> None:
    with pytest.raises(RewardError, match=r"No judge judged 1 reply within 0\.3 s.*--reward\.timeout"):
        await judged(serve("busy", 500), timeout=0.3)


async def test_the_token_travels_in_a_header_only(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "sesame")
    server = serve()
    await judged(server)
    assert server.headers[0]["Authorization"] == "Bearer sesame"
    assert "sesame" not in json.dumps(server.bodies)


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"reward\.judge_url is 'localhost:8000/v1/chat/completions'.*http://"):
        LLMJudge(["localhost:8000/v1"], model="judge", prompt=JudgePrompt("{response}", "f"), timeout=1.0)


def test_braces_around_no_name_and_doubled_ones_stay() -> None:
    prompt = JudgePrompt('{response} {{label}} {"grade": 3} \\frac{1}{2} {query}', "f")
    assert prompt.filled(ask("{label}")) == '{label} {label} {"grade": 3} \\frac{1}{2} <user>3+4?{label}'


def test_a_conversation_is_written_with_its_roles() -> None:
    messages = ({"role": "system", "content": "Be brief."}, *MESSAGES)
    prompt = Prompt(token_ids=(1,), text="rendered", messages=messages)
    request = RewardRequest(prompt=prompt, response="7", stop_reason=StopReason.STOP)
    assert JudgePrompt("{prompt}|{response}", "f").filled(request) == "system:\nBe brief.\n\nuser:\n3+4?|7"


def test_images_are_named_and_not_written_out() -> None:
    parts = [{"type": "text", "text": "Is "}, {"type": "image", "image": b"file"}, {"type": "text", "text": " red?"}]
    prompt = Prompt(token_ids=(1,), text="rendered", messages=({"role": "user", "content": parts},))
    request = RewardRequest(prompt=prompt, response="7", stop_reason=StopReason.STOP)
    assert JudgePrompt("{prompt}|{response}", "f").filled(request) == "Is <image> red?|7"


async def test_a_placeholder_that_nothing_fills_ends_the_run(serve: Serve) -> None:
    with pytest.raises(ConfigurationError) as error:
        await judged(serve(), prompt="{response} {lable}")
    assert str(error.value) == (
        "--reward.judge_prompt judge.txt has the placeholder {lable}, which is neither one of prompt, response, query, "
        "label nor a column of 'default' (level): correct it, or write {{lable}} for the text itself."
    )


@pytest.mark.parametrize("text", ["Grade it.", "{prompt} {{response}}"])
def test_a_prompt_that_shows_no_reply_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "judge.txt").write_text(text)
    with pytest.raises(ConfigurationError, match=r"judge\.txt has neither \{response\} nor \{query\}"):
        JudgePrompt.read(str(tmp_path / "judge.txt"))
    with pytest.raises(ConfigurationError, match=r"--reward\.judge_prompt is .*missing.*cannot be read"):
        JudgePrompt.read(str(tmp_path / "missing"))


RUBRIC = [
    {"criterion": "adds up", "weight": 3},
    {"description": "is brief", "points": 1.5, "tags": ["style"]},
    "is polite",
    {"text": "insults", "weight": -2},
]
QUESTION = "Reply: {response}\nDoes it hold that it {criterion}? {level}"


def answering(marks: dict[str, str]) -> JsonServer:
    """A judge that answers by the criterion in the question."""

    def answer(path: str, question: Any) -> tuple[int, Any]:
        asked = question["messages"][0]["content"]
        (mark,) = [mark for text, mark in marks.items() if f"it {text}?" in asked]
        return 200, {"choices": [{"message": {"role": "assistant", "content": mark}}]}

    return JsonServer(answer)


async def test_each_criterion_is_asked_about_by_itself_and_weighed() -> None:
    """A reply gets 3 x 1, 1.5 x 0.5 and 1 x 0 of 3 + 1.5 + 1 points, and loses 2 x 0.25."""
    server = answering({"adds up": "so: 10", "is brief": "6", "is polite": "2", "insults": "4 of 10: 4"})
    prompt = JudgePrompt(QUESTION, "judge.txt", rubric=True)
    judge = LLMJudge(
        [f"{server.url}/v1"], model="judge", prompt=prompt, timeout=60.0, bounds=(2.0, 10.0), rubric_key="marks"
    )
    try:
        first, second = await judge.score([ask(marks=RUBRIC), ask("8", marks=["is brief"])])
    finally:
        await judge.aclose()
        server.close()
    assert first.value == pytest.approx((3 * 1 + 1.5 * 0.5 + 0 - 2 * 0.25) / 5.5)
    assert first.metrics == {"rubric_met": pytest.approx((1 + 0.5 + 0 + 0.25) / 4)}
    assert second.value == 0.5
    said = ("adds up\nso: 10", "is brief\n6", "is polite\n2", "insults\n4 of 10: 4")
    assert (first.feedback, second.feedback) == ("\n\n".join(said), "is brief\n6")
    asked = [body["messages"][0]["content"] for body in server.bodies]
    wanted = [f"Reply: 7\nDoes it hold that it {text}? 2" for text in ("adds up", "is brief", "is polite", "insults")]
    assert sorted(asked) == sorted([*wanted, "Reply: 8\nDoes it hold that it is brief? 2"])


async def test_a_criterion_without_a_judgement_fails_the_reply() -> None:
    server = answering({"adds up": "1", "is brief": "perhaps"})
    prompt = JudgePrompt(QUESTION, "judge.txt", rubric=True)
    judge = LLMJudge(
        [f"{server.url}/v1"], model="judge", prompt=prompt, timeout=60.0, bounds=(0.0, 1.0), rubric_key="marks"
    )
    try:
        with pytest.raises(RewardError, match=r"'perhaps', which has no number"):
            await judge.score([ask(marks=["adds up", "is brief"])])
    finally:
        await judge.aclose()
        server.close()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "holds None, which is no list of criteria"),
        ({"marks": "be brief"}, "no list of criteria"),
        ({"marks": []}, "no list of criteria"),
        ({"marks": [""]}, "write a text, or a mapping"),
        ({"marks": [{"weight": 1}]}, "write a text, or a mapping"),
        ({"marks": [{"criterion": "a", "weight": "2"}]}, "a number as its weight"),
        ({"marks": [{"criterion": "a", "weight": float("nan")}]}, "a number as its weight"),
        ({"marks": [{"criterion": "a", "weight": -1}, {"criterion": "b", "weight": 0}]}, "none of the 2 criteria"),
    ],
)
def test_rows_without_criteria_are_refused_before_the_first_step(
    tiny_tokenizer: Any, row: dict[str, Any], message: str
) -> None:
    builder = PromptBuilder(TemplateCodec(tiny_tokenizer), DataConfig(), check=partial(criteria, key="marks"))
    rows = [{"input": "a", "marks": RUBRIC}, {"input": "b", **row}]
    with pytest.raises(DataError, match=f"Row 2 of data.prompt_dataset cannot be used: .*{message}"):
        DatasetPromptSource(rows, builder, seed=0)


def test_a_question_about_criteria_has_a_place_for_them() -> None:
    assert JudgePrompt("{response}", "judge.txt")
    with pytest.raises(ConfigurationError, match=r"no \{criterion\}, but each criterion of --reward.judge_rubric_key"):
        JudgePrompt("{response}", "judge.txt", rubric=True)
