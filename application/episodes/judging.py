"""Requests to the reward source about an episode, for episodes without a reward of their own.

Invariant: `query` is the exact text that the model read and sampled. Does not own: the reward.
"""

from collections.abc import Sequence

from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.images import PlacedImages
from rollgrad.domain.episodes.messages import Message, assistant_message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import Reward, RewardRequest
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.chat_codec import ChatCodec
from rollgrad.domain.ports.reward_source import RewardSource

NO_REWARD = (
    "The agent gave no reward for its episode, and no reward is set that could judge it: let it return a number, or "
    "set --reward.function_path, --reward.model_name_or_path, --reward.remote_url, --reward.judge_url or "
    "--reward.verifier."
)


def judge_request(
    codec: ChatCodec,
    prompt: Prompt,
    token_ids: Sequence[int],
    *,
    opening: int,
    response: str,
    stop_reason: StopReason,
    step: int,
    completion: Sequence[Message] = (),
    images: PlacedImages = (),
) -> RewardRequest:
    """Returns the request to judge the episode whose tokens are `token_ids`.

    Args:
        codec: decodes.
        prompt: the task.
        token_ids: prompt, replies, and the environment's tokens between them.
        opening: number of tokens before the first reply.
        response: the last reply, without special tokens.
        stop_reason: why the episode ended.
        step: version of the policy.
        completion: replies and observations as messages; by default `response` as one message.
        images: images that some of the tokens stand for.
    """
    tokens = tuple(map(int, token_ids))
    known = len(prompt.token_ids)
    text = prompt.text
    if tokens[:known] != prompt.token_ids:  # the environment opened with another text, or with tools
        known = opening
        text = codec.decode(tokens[:known], special_tokens=True)
    return RewardRequest(
        prompt=prompt,
        response=response,
        stop_reason=stop_reason,
        query=text + _continuation(codec, tokens, known),
        token_ids=tokens,
        response_token_ids=tokens[known:],
        completion=tuple(completion) or (assistant_message(response),),
        images=images,
        step=step,
    )


def answer_request(codec: ChatCodec, prompt: Prompt, answer: str, *, step: int) -> RewardRequest:
    """Returns the request to judge an answer that is not a whole reply, but was taken from one."""
    return RewardRequest(
        prompt=prompt,
        response=answer,
        stop_reason=StopReason.STOP,
        query=prompt.text + answer + codec.end_of_turn,
        images=prompt.images,
        step=step,
    )


async def judged(rewards: RewardSource | None, request: RewardRequest) -> Reward:
    """Returns the reward of the run's source, for an episode without a reward of its own.

    Raises:
        ConfigurationError: there is no source.
        RewardError: the source gave no reward.
    """
    if rewards is None:
        raise ConfigurationError(NO_REWARD)
    (reward,) = await rewards.score([request])
    return reward


def _continuation(codec: ChatCodec, tokens: tuple[int, ...], start: int) -> str:
    """Returns the text of the tokens from `start` on, with special tokens.

    It is a part of the text of all tokens, because some tokenizers drop a space at the beginning of a decoded text.
    """
    whole = codec.decode(tokens, special_tokens=True)
    before = codec.decode(tokens[:start], special_tokens=True)
    if whole.startswith(before):
        return whole[len(before) :]
    return codec.decode(tokens[start:], special_tokens=True)
