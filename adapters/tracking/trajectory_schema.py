"""Columns of files of trajectories. Importable without torch."""

from typing import TYPE_CHECKING

from rollgrad.adapters.tracking.trajectory_files import VERSION, VERSION_KEY

if TYPE_CHECKING:
    import pyarrow

SHOWN = 300
"""Characters of prompts and responses in a list."""


def schema() -> "pyarrow.Schema":
    """Returns the columns of a file of trajectories, and their types."""
    import pyarrow as pa

    def tokens(kind: "pyarrow.DataType") -> "pyarrow.DataType":
        return pa.list_(kind)

    text, number, count = pa.string(), pa.float64(), pa.int32()
    named = pa.map_(text, number)
    columns = {
        "kind": text,
        "step": count,
        "group_id": pa.int64(),
        "sample_id": pa.int64(),
        "branch": count,
        "role": text,
        "datasource": text,
        "prompt": text,
        "messages": text,
        "label": text,
        "source": text,
        "response": text,
        "response_start": text,
        "reward": number,
        "score": number,
        "reward_parts": named,
        "metrics": named,
        "answer": text,
        "feedback": text,
        "baseline": number,
        "advantage": number,
        "stop_reason": text,
        "grammars": text,
        "failure": text,
        "failure_message": text,
        "seconds": number,
        "turns": count,
        "prompt_tokens": count,
        "action_tokens": count,
        "version_first": count,
        "version_last": count,
        "token": tokens(pa.int32()),
        "token_text": tokens(pa.dictionary(pa.int32(), text)),
        "token_kind": tokens(pa.int8()),
        "token_turn": tokens(pa.int16()),
        "token_version": tokens(pa.int32()),
        **{name: tokens(pa.float32()) for name in TOKEN_NUMBERS},
        "token_clipped": tokens(pa.bool_()),
    }
    return pa.schema(list(columns.items()), metadata={VERSION_KEY: VERSION})


TOKEN_NUMBERS = {
    "token_logprob": "rollout_logprobs_N",
    "token_trainer_logprob": "old_logprobs_N",
    "token_ref_logprob": "ref_logprobs_N",
    "token_reward": "rewards_N",
    "token_value": "values_N",
    "token_advantage": "advantages_N",
    "token_weight": "loss_weights_N",
    "token_entropy": "entropies_N",
}
"""Columns of numbers, by the columns of the batch; null where the batch has none."""
