"""Rows of each format, written to files, opened and prepared."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from rollgrad.adapters.data.examples.preparation import prepare_examples
from rollgrad.adapters.data.examples.prepared import PreparedExamples
from rollgrad.adapters.data.examples.preparer import PreparationSettings
from rollgrad.adapters.data.examples.recognition import ReadingSettings
from rollgrad.adapters.data.examples.sources import Mixture, open_sources
from rollgrad.application.settings.sections.examples import ExampleFormat

CHAT = [{"role": "user", "content": "What is 3 plus 4?"}, {"role": "assistant", "content": "seven"}]
READING = ReadingSettings()
ROWS: Mapping[ExampleFormat, Mapping[str, Any]] = {
    ExampleFormat.TOKENS: {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
    ExampleFormat.MESSAGES: {"messages": CHAT},
    ExampleFormat.SHAREGPT: {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ExampleFormat.COMPLETION: {"prompt": "What is 3 plus 4?", "completion": "seven"},
    ExampleFormat.ALPACA: {"instruction": "Add.", "input": "3 4", "output": "seven"},
    ExampleFormat.TEXT: {"text": "The quick brown fox"},
}
PAIR = {"prompt": "What is 3 plus 4?", "chosen": "seven", "rejected": "eight"}
"""A row that its columns do not tell from others: who learns from pairs says so."""


def write(path: Path, *rows: Any) -> Path:
    path.write_bytes(b"\n".join(r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows) + b"\n")
    return path


def opened(path: Path | str, reading: ReadingSettings = READING, **more: Any) -> Mixture:
    values: dict[str, Any] = {"split": "train", "probs": None, "seed": 0, "max_samples": None, **more}
    return open_sources(str(path), settings=reading, **values)


def prepared(
    mixture: Mixture, tokenizer: Any, cache: Path | None = None, workers: int = 1, **more: Any
) -> PreparedExamples:
    return prepare_examples(
        mixture, tokenizer, PreparationSettings(**more), cache_dir=cache, num_workers=workers, setting="data.dataset"
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "tool_calls", "function", "x"]), inner)
    ),
    max_leaves=8,
)
