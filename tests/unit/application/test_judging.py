"""Judges get the text that the model saw and wrote, its tokens, and the version of the policy that wrote it."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.rewards.function import FunctionReward
from rollgrad.application.episodes.judging import answer_request
from rollgrad.application.episodes.multi_turn import MultiTurnExecutor
from rollgrad.application.episodes.single_turn import SingleTurnExecutor
from rollgrad.application.episodes.tool_environment import ToolEnvironment
from rollgrad.domain.episodes.generation import SamplingParams, StopReason
from rollgrad.domain.episodes.images import Image, PlacedImage
from rollgrad.domain.episodes.messages import Action
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import FailureKind, Reward, RewardRequest, RolloutFailure
from rollgrad.domain.episodes.trajectory import Trajectory
from rollgrad.domain.errors import ConfigurationError, NotApplicableError
from rollgrad.domain.ports.agent_executor import EpisodeRequest
from rollgrad.domain.ports.environment import Environment, StepResult, WholePrompt
from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.testing.reward_source import FakeRewardSource
from tests.fakes.chat_templates import tokenizer_with
from tests.fakes.scripted_engine import ScriptedEngine

MESSAGES = ({"role": "user", "content": "Add 2 and 3."},)
ENDS = {"gemma3": "<end_of_turn>", "phi3": "<|end|>", "qwen2_5": "<|im_end|>", "llama3_1": "<|eot_id|>"}


@pytest.fixture(params=ENDS)
def family(request: pytest.FixtureRequest, tiny_tokenizer: Any) -> tuple[Any, str]:
    """A tokenizer with a model family's template, and what ends a turn in it, which is not its end of sequence."""
    tokenizer = tokenizer_with(request.param, tiny_tokenizer)
    tokenizer.add_special_tokens({"eos_token": "<|sequence_ends|>"})
    return tokenizer, ENDS[request.param]


async def play(
    tokenizer: Any, end: str, rewards: Any, *, environment: type[Environment] | None = None, **params: Any
) -> tuple[list[Trajectory] | RolloutFailure, Prompt]:
    codec = TemplateCodec(tokenizer)
    rendered = codec.render(MESSAGES)
    prompt = Prompt(token_ids=rendered.token_ids, text=rendered.text, messages=MESSAGES, label="5")
    engine = ScriptedEngine(codec, tokenizer.convert_tokens_to_ids(end), ["It is 5.", "Five it is."])
    request = EpisodeRequest(prompt=prompt, params=SamplingParams(max_new_tokens=64, **params), group_id=0, sample_id=0)
    if environment is None:
        return await SingleTurnExecutor(engine, codec, rewards).run(request), prompt
    executor = MultiTurnExecutor(engine, codec, lambda params: environment(), max_turns=2, rewards=rewards)
    return await executor.run(request), prompt


async def test_a_query_is_the_text_of_all_tokens_that_the_model_saw_and_wrote(family: tuple[Any, str]) -> None:
    tokenizer, end = family
    rewards = FakeRewardSource(lambda request: 1.0)
    result, prompt = await play(tokenizer, end, rewards)
    assert isinstance(result, list)
    tokens = result[0].token_ids_T.tolist()
    (judged,) = rewards.requests
    assert judged.query == tokenizer.decode(tokens, skip_special_tokens=False)
    assert judged.query == f"{prompt.text}It is 5.{end}"
    assert judged.response == "It is 5.", "verifiers read no special tokens"
    assert judged.token_ids == tuple(tokens)
    assert judged.response_token_ids == tuple(tokens[len(prompt.token_ids) :])


async def test_functions_get_such_queries(family: tuple[Any, str]) -> None:
    tokenizer, end = family
    seen: list[str] = []

    def reward_func(queries: list[str], prompts: list[str], labels: list[Any]) -> list[float]:
        seen.extend(query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True))
        return [0.0]

    await play(tokenizer, end, FunctionReward(reward_func, timeout=60.0))
    assert seen == [f"It is 5.{end}"]


@pytest.mark.parametrize(
    ("observation", "warns"), [("Again.", True), ("{end}Again.", False), ("  ", False)], ids=["bare", "marked", "empty"]
)
async def test_a_text_without_the_template_s_marks_behind_a_rendered_prompt_is_told(
    family: tuple[Any, str], observation: str, warns: bool
) -> None:
    tokenizer, end = family

    class Texts(Silent):
        async def step(self, action: Action) -> StepResult:
            return StepResult(observation=observation.format(end=end), reward=1.0)

    with capture_logs() as logs:
        await play(tokenizer, end, None, environment=Texts)
    assert [entry["event"].partition(" that")[0] for entry in logs if entry["log_level"] == "warning"] == (
        ["the environment answers with a text"] if warns else []
    )


@pytest.mark.parametrize(
    ("opening", "warns"),
    [
        (lambda prompt: WholePrompt(f"<turn>user: {prompt.text}</turn>assistant:"), True),
        (lambda prompt: [{"role": "user", "content": prompt.text}], True),
        (lambda prompt: WholePrompt(f"Be brief.{prompt.text}"), False),
        (lambda prompt: WholePrompt("<turn>user: Add 2 and 3.</turn>"), False),
        (lambda prompt: prompt.messages, False),
        (lambda prompt: " Let me see:", False),
    ],
    ids=["text", "message", "system prompt", "own text", "messages", "begun reply"],
)
async def test_a_conversation_around_the_rendered_prompt_is_told(
    family: tuple[Any, str], opening: Any, warns: bool
) -> None:
    tokenizer, end = family

    class Opens(Silent):
        async def reset(self, prompt: Prompt) -> Any:
            return opening(prompt)

    with capture_logs() as logs:
        await play(tokenizer, end, FakeRewardSource(lambda request: 1.0), environment=Opens)
    told = [entry["event"] for entry in logs if entry["event"].startswith("the environment puts the prompt")]
    assert len(told) == warns
    assert all("--data.no_apply_chat_template" in event and "prompt.messages" in event for event in told)


async def test_an_answer_ends_as_the_template_ends_a_reply(family: tuple[Any, str]) -> None:
    """One that an agent took out of a reply, so that nobody sampled its end."""
    tokenizer, end = family
    codec = TemplateCodec(tokenizer)
    assert codec.end_of_turn == end
    images = (PlacedImage(image=Image(digest="1", data=b"", tensors={}), start=0, stop=1),)
    prompt = Prompt(token_ids=(1,), text="Add.", messages=MESSAGES, images=images)
    request = answer_request(codec, prompt, "5", step=3)
    assert (request.query, request.response, request.token_ids, request.step) == (f"Add.5{end}", "5", None, 3)
    rewards = FakeRewardSource(lambda request: 1.0)
    await _finished(ToolEnvironment([], rewards=rewards, end_of_turn=codec.end_of_turn), prompt)
    assert rewards.requests[0].query == f"Add.7{end}"
    assert request.images == rewards.requests[0].images == images


async def _finished(environment: ToolEnvironment, prompt: Prompt) -> StepResult:
    await environment.reset(prompt)
    return await environment.reward_hook("7", prompt)


def test_a_tokenizer_without_a_template_ends_a_reply_with_its_end_of_sequence(tiny_tokenizer: Any) -> None:
    tokenizer = tokenizer_with("smollm2", tiny_tokenizer)
    tokenizer.chat_template = None
    assert TemplateCodec(tokenizer).end_of_turn == tokenizer.eos_token


class Silent(Environment):
    """Two turns, and no word on what they are worth but for `first`."""

    first: float | None = None

    def __init__(self) -> None:
        self.turns = 0

    async def reset(self, prompt: Prompt) -> str:
        return ""

    async def step(self, action: Action) -> StepResult:
        self.turns += 1
        reward = self.first if self.turns == 1 else None
        return StepResult(observation=" Again: ", reward=reward, terminated=self.turns == 2)

    async def close(self) -> None:
        pass


async def test_an_environment_without_rewards_is_judged_by_the_run_s(family: tuple[Any, str]) -> None:
    tokenizer, end = family
    rewards = FakeRewardSource(lambda request: 0.75)
    result, prompt = await play(tokenizer, end, rewards, environment=Silent)
    assert isinstance(result, list)
    (trajectory,) = result
    (judged,) = rewards.requests
    assert judged.query == f"{prompt.text}It is 5.{end} Again: Five it is.{end}"
    assert judged.query == tokenizer.decode(trajectory.token_ids_T.tolist())
    assert judged.token_ids == tuple(trajectory.token_ids_T.tolist())
    assert judged.response == "Five it is.", "verifiers judge the last reply"
    assert [s.reward for s in trajectory.segments if s.kind == "action"] == [0.0, 0.75]
    assert trajectory.score == 0.75


async def test_turns_keep_what_they_earned_beside_the_judgement(tiny_tokenizer: Any) -> None:
    class Shaping(Silent):
        first = 0.5

    rewards = FakeRewardSource(lambda request: 1.0)
    result, _ = await play(tiny_tokenizer, tiny_tokenizer.eos_token, rewards, environment=Shaping)
    assert isinstance(result, list)
    assert [s.reward for s in result[0].segments if s.kind == "action"] == [0.5, 1.0]
    assert (result[0].reward, result[0].score) == (1.5, 1.0)


async def test_an_environment_that_rewards_is_not_judged(tiny_tokenizer: Any) -> None:
    class Rewarding(Silent):
        async def step(self, action: Action) -> StepResult:
            return StepResult(reward=0.25, terminated=True)

    rewards = FakeRewardSource(lambda request: 1.0)
    result, _ = await play(tiny_tokenizer, tiny_tokenizer.eos_token, rewards, environment=Rewarding)
    assert isinstance(result, list)
    assert result[0].reward == 0.25
    assert not rewards.requests


class Speaking(RewardSource):
    """Says of each reply what it answered, and what there is to say of it."""

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        return [Reward(value=0.5, answer="7", feedback="It is too long.") for _ in requests]


class Told(Silent):
    async def step(self, action: Action) -> StepResult:
        return StepResult(reward=0.5, terminated=True, answer="7", feedback="It is too long.")


async def test_what_a_reward_says_of_an_episode_is_kept_in_each_branch(tiny_tokenizer: Any) -> None:
    for environment in (None, Silent, Told):
        result, prompt = await play(tiny_tokenizer, tiny_tokenizer.eos_token, Speaking(), environment=environment)
        assert isinstance(result, list)
        assert {(branch.answer, branch.feedback) for branch in result} == {("7", "It is too long.")}
    judged = await ToolEnvironment([], rewards=Speaking()).reward_hook("x", prompt)
    assert (judged.answer, judged.feedback) == ("7", "It is too long.")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"reward": math.nan}, "The environment returned the reward nan: it must be a finite number."),
        ({"score": math.inf}, "The environment returned the score inf: it must be a finite number."),
        ({"reward_parts": {"style": "good"}}, "The environment returned the reward part style 'good'"),
        ({"metrics": {"length": math.nan}}, "The environment returned the metric length nan: it must be a finite"),
        ({"reward": torch.zeros(2)}, "The environment returned the reward tensor([0., 0.]): it must be a finite"),
        ({"metrics": {"path": "left"}}, "The environment returned the metric path 'left': it must be a finite number."),
        ({"metrics": {"steps": None}}, "The environment returned the metric steps None: it must be a finite number."),
        (
            {"rewards": None},
            "The environment returned the rewards None: they must be a mapping from names to numbers, or left out.",
        ),
    ],
)
async def test_what_cannot_be_learned_from_fails_its_own_episode(
    tiny_tokenizer: Any, answer: dict[str, Any], message: str
) -> None:
    class Odd(Silent):
        async def step(self, action: Action) -> StepResult:
            return StepResult(**{"reward": 1.0, "terminated": True, **answer})

    result, _ = await play(tiny_tokenizer, tiny_tokenizer.eos_token, None, environment=Odd)
    assert isinstance(result, RolloutFailure)
    assert result.kind is FailureKind.ENVIRONMENT
    assert message in result.message


async def test_without_any_reward_the_run_ends_with_one_sentence(tiny_tokenizer: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"The agent gave no reward.*--reward\.function_path"):
        await play(tiny_tokenizer, tiny_tokenizer.eos_token, None, environment=Silent)


async def test_a_reply_to_which_no_reward_applies_is_nobody_s_failure(tiny_tokenizer: Any) -> None:
    class Undecided(FakeRewardSource):
        async def score(self, requests: Any) -> list[Reward]:
            raise NotApplicableError("there is nothing to compare with")

    for environment in (None, Silent):
        result, _ = await play(tiny_tokenizer, tiny_tokenizer.eos_token, Undecided(), environment=environment)
        assert isinstance(result, RolloutFailure)
        assert result.kind is FailureKind.NOT_APPLICABLE


def test_a_request_made_by_hand_reads_as_prompt_and_response() -> None:
    request = RewardRequest(prompt=Prompt(token_ids=(1,), text="Hi "), response="you", stop_reason=StopReason.STOP)
    assert request.query == "Hi you"
    assert request.completion == ({"role": "assistant", "content": "you"},)
