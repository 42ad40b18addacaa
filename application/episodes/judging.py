"""What a reward source is shown of an episode, and who judges an episode that brings no reward.

Invariant: `query` is what the model saw and wrote, token for token. Does not own: what a reward is.
"""

from collections.abc import Sequence

from rollgrad.domain.episodes.generation import StopReason
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
) -> RewardRequest:
    """The request to judge the episode whose tokens are `token_ids`.

    Args:
        codec: decodes.
        prompt: the task.
        token_ids: prompt, replies and what the environment wrote between them.
        opening: how many of them stood before the first reply.
        response: the last reply, without special tokens.
        stop_reason: why the episode ended.
        step: updates behind the policy.
        completion: replies and observations as messages; default: `response` as one.
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
        step=step,
    )


def answer_request(codec: ChatCodec, prompt: Prompt, answer: str, *, step: int) -> RewardRequest:
    """The request to judge an answer that is not the text of a reply, but was taken out of one."""
    return RewardRequest(
        prompt=prompt,
        response=answer,
        stop_reason=StopReason.STOP,
        query=prompt.text + answer + codec.end_of_turn,
        step=step,
    )


async def judged(rewards: RewardSource | None, request: RewardRequest) -> Reward:
    """The reward that the run's source gives an episode that brings none.

    Raises:
        ConfigurationError: there is no source.
        RewardError: it gave no reward.
    """
    if rewards is None:
        raise ConfigurationError(NO_REWARD)
    (reward,) = await rewards.score([request])
    return reward


def _continuation(codec: ChatCodec, tokens: tuple[int, ...], start: int) -> str:
    """Text of the tokens from `start` on, with special tokens.

    It is cut out of the text of all of them, as some tokenizers drop a space at the beginning of what they decode.
    """
    whole = codec.decode(tokens, special_tokens=True)
    before = codec.decode(tokens[:start], special_tokens=True)
    if whole.startswith(before):
        return whole[len(before) :]
    return codec.decode(tokens[start:], special_tokens=True)
