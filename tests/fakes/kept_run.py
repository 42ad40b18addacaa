"""A run's directory, written without training: sums, with everything that a page of a run must show."""

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy
import yaml

PROMPT, SAMPLED, ENVIRONMENT = range(3)
STEPS = 6
SUMS = ((17, 26), (48, 35), (9, 64), (81, 57))
SAMPLES = 4

HOSTILE = (
    "<script>document.title = 'taken'</script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "\x1b[31mred\x1b[0m and \x00 NUL",
    "\u202eright to left\u202c \u200f\ufeff",
    "&lt;b&gt; ${document.title} {{7*7}} </script></style>-->",
)
"""Texts that a page must show as they are."""
LONG_LINE = "x" * 2**20


def words(text: str) -> list[str]:
    """Returns the tokens of a text: words with the space before them, single digits and signs."""
    return re.findall(r" ?[A-Za-z]+| ?\d| ?[^\sA-Za-z\d]|\s", text)


class Vocabulary:
    """Ids of tokens, dealt as they come."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __getitem__(self, token: str) -> int:
        return self._ids.setdefault(token, len(self._ids) + 100)


def row(
    vocabulary: Vocabulary,
    *,
    kind: str = "update",
    step: int = 1,
    group: int = 0,
    sample: int = 0,
    parts: list[tuple[int, list[str]]],
    seed: int = 0,
    **given: Any,
) -> dict[str, Any]:
    """Returns a row of a file of trajectories, of `parts`: the kind of a stretch of tokens, and their texts."""
    chance = random.Random(f"{seed} {kind} {step} {group} {sample}")
    kinds = [part for part, tokens in parts for _ in tokens]
    texts = [token for _, tokens in parts for token in tokens]
    turns, turn = [], -1
    for index, part in enumerate(kinds):
        if part == SAMPLED and (index == 0 or kinds[index - 1] != SAMPLED):
            turn += 1
        turns.append(turn if part == SAMPLED else -1)
    sampled = numpy.array([part == SAMPLED for part in kinds])
    logprobs = [-chance.expovariate(3.0) if part == SAMPLED else 0.0 for part in kinds]
    reward = given.get("reward", 1.0)
    rewards = [0.0] * len(kinds)
    if sampled.any():
        rewards[int(sampled.nonzero()[0][-1])] = reward
    return {
        "kind": kind, "step": step, "group_id": group, "sample_id": sample, "branch": 0, "datasource": "sums",
        "prompt": "".join(token for part, tokens in parts[:1] for token in tokens if part == PROMPT),
        "response": "".join(token for part, tokens in parts for token in tokens if part != PROMPT),
        "reward": reward, "score": reward, "reward_parts": [], "metrics": [], "stop_reason": "stop", "seconds": 0.4,
        "turns": turn + 1, "prompt_tokens": kinds.count(PROMPT), "action_tokens": int(sampled.sum()),
        "version_first": step - 1, "version_last": step - 1,
        "token": [vocabulary[text] for text in texts], "token_text": texts, "token_kind": kinds, "token_turn": turns,
        "token_version": [step - 1 if part == SAMPLED else -1 for part in kinds],
        "token_logprob": logprobs, "token_reward": rewards,
        **given,
    }  # fmt: skip


def learned(rows: list[dict[str, Any]]) -> float:
    """Gives rows of an update the advantages of their groups and equal weights; returns the step's policy loss."""
    groups: dict[int, list[float]] = {}
    for one in rows:
        groups.setdefault(one["group_id"], []).append(one["reward"])
    total = sum(one["action_tokens"] for one in rows)
    loss = 0.0
    for one in rows:
        others = groups[one["group_id"]]
        advantage = one["reward"] - sum(others) / len(others)
        mask = numpy.array(one["token_kind"]) == SAMPLED
        weights = numpy.where(mask, 1 / total, 0.0).astype(numpy.float32)
        if one["stop_reason"] == "length":  # a mask of replies that were cut off
            weights[:] = 0.0
        advantages = numpy.where(mask, advantage, 0.0).astype(numpy.float32)
        one |= {"advantage": advantage, "token_weight": weights.tolist(), "token_advantage": advantages.tolist()}
        one |= {"token_entropy": [-value for value in one["token_logprob"]]}
        one |= {"token_clipped": [place == mask.argmax() for place in range(len(mask))]}
        loss -= float((weights.astype(float) * advantages.astype(float)).sum())
    return loss


def reply(first: int, second: int, chance: random.Random, skill: float) -> tuple[str, bool]:
    """Returns a reply to a sum and whether it is right, more often with more `skill` (0 to 1)."""
    right = chance.random() < skill
    answer = first + second if right else first + second + chance.choice((-10, -1, 1, 10))
    begin = chance.choice(("To add them, ", "Let us add: ", ""))
    tens = f"{first // 10 * 10} + {second // 10 * 10} = {first // 10 * 10 + second // 10 * 10}, "
    ones = f"{first % 10} + {second % 10} = {first % 10 + second % 10}.\n"
    return f"{begin}{tens if begin else ''}{ones if begin else ''}{first} + {second} = {answer}.", right


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes a file of trajectories."""
    import pyarrow as pa
    from pyarrow import parquet

    from rollgrad.adapters.tracking.trajectory_schema import SHOWN, schema

    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"response_start": (one.get("response") or "")[:SHOWN] or None, **one} for one in rows]
    table = {name: [one.get(name) for one in rows] for name in schema().names}
    parquet.write_table(pa.table(table, schema=schema()), path, compression="zstd", row_group_size=64)


def write_run(
    directory: Path, *, steps: int = STEPS, seed: int = 0, extra: list[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Writes a finished run with `steps` updates of 4 groups of 4, an evaluation after every second, and one agent's
    rollout of two turns; `extra` rows join the last update. Returns the lines of its metrics.jsonl."""
    vocabulary, lines = Vocabulary(), []
    for step in range(steps + 1):
        skill = 0.25 + 0.5 * step / steps
        line: dict[str, Any] = {"step": step}
        if step:
            rows = [one for index in range(len(SUMS)) for one in _group(vocabulary, step, index, skill, seed)]
            if step == steps:
                rows += [_agent(vocabulary, step), *(extra or [])]
            played = [one for one in rows if one.get("failure") is None]
            loss = learned(played)
            write_rows(directory / f"trajectories/step-{step:06d}.parquet", rows)
            rewards = [one["reward"] for one in played]
            line |= {
                "reward/mean": sum(rewards) / len(rewards),
                "rollout/response_length_mean": sum(one["action_tokens"] for one in played) / len(played),
                "rollout/truncated_share": sum(one["stop_reason"] == "length" for one in played) / len(played),
                "rollout/entropy": 0.9 * math.exp(-step / 4),
                "rollout/zero_spread_share": 0.25,
                "policy/policy_loss": loss,
                "policy/grad_norm": 1.5 / step,
                "time/generate_s": 2.0 + step / 10,
                "time/update_s": 1.5,
                "time/step_s": 4.0 + step / 10,
            }
        if step % 2 == 0:
            rows = [
                one for index in range(len(SUMS)) for one in _group(vocabulary, step, index, skill, seed, "evaluation")
            ]
            write_rows(directory / f"trajectories/eval-{step:06d}.parquet", rows)
            line["eval/pass@1"] = sum(one["score"] for one in rows) / len(rows)
        lines.append(line)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text, encoding="utf-8")
    settings = {
        "actor": {"model_name_or_path": ".models/SmolLM2-135M-Instruct", "adam": {"lr": 1e-5 * (seed + 1)}},
        "data": {"prompt_dataset": "examples/data/sums_train.jsonl"},
        "rollout": {"n_samples_per_prompt": SAMPLES},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    record = {
        "status": "finished", "started": "2026-08-01T10:00:00+00:00", "ended": "2026-08-01T10:03:20+00:00",
        "heartbeat": "2026-08-01T10:03:20+00:00", "steps": steps, "host": "laptop", "versions": {"rollgrad": "0.1.0"},
    }  # fmt: skip
    (directory / "run.json").write_text(json.dumps(record), encoding="utf-8")
    return lines


def _group(
    vocabulary: Vocabulary, step: int, index: int, skill: float, seed: int, kind: str = "update"
) -> list[dict[str, Any]]:
    first, second = SUMS[index]
    question = f"What is {first} + {second}?"
    rows = []
    for sample in range(SAMPLES if kind == "update" else 1):
        chance = random.Random(f"{seed} {kind} {step} {index} {sample}")
        text, right = reply(first, second, chance, 1.0 if index == 2 else skill)
        number = step * 100 + index + (50_000 if kind == "evaluation" else 0)
        cut = kind == "update" and step <= 2 and sample == 3 and index != 2
        reward = float(right and not cut)
        tokens = words(text)[:9] if cut else [*words(text), "<|im_end|>"]
        rows.append(
            row(
                vocabulary, kind=kind, step=step, group=number, sample=sample, seed=seed,
                parts=[(PROMPT, words(f"user\n{question}\nassistant\n")), (SAMPLED, tokens)],
                messages=json.dumps([{"role": "user", "content": question}]), label=str(first + second),
                reward=reward, score=reward, stop_reason="length" if cut else "stop",
                response=text[: sum(map(len, tokens))],
            )
        )  # fmt: skip
    return rows


def _agent(vocabulary: Vocabulary, step: int) -> dict[str, Any]:
    parts = [
        (PROMPT, words("user\nUse the tool: what is 123 * 45?\nassistant\n")),
        (SAMPLED, words("<tool>123 * 45</tool>")),
        (ENVIRONMENT, words("\ntool\n5535\nassistant\n")),
        (SAMPLED, words("The product is 5535.")),
    ]
    made = row(
        vocabulary, step=step, group=step * 100 + 50, sample=0, parts=parts, label="5535", reward=1.0, seconds=2.5
    )
    shifted = [value - 0.1 * (index % 3 - 1) if value else 0.0 for index, value in enumerate(made["token_logprob"])]
    return made | {"token_trainer_logprob": shifted, "reward_parts": [("correct", 1.0), ("format", 0.5)]}


def hostile_rows(step: int = STEPS) -> list[dict[str, Any]]:
    """Returns rows with `HOSTILE` texts and a line of a megabyte, and a failed episode whose message is hostile."""
    vocabulary = Vocabulary()
    rows = [
        row(
            vocabulary, step=step, group=900 + index, sample=0, label=text, datasource="hostile",
            answer=text[:200], feedback=HOSTILE[1],
            parts=[(PROMPT, [text, "\n"]), (SAMPLED, [text, " ", text])],
        )
        for index, text in enumerate((*HOSTILE, LONG_LINE))
    ]  # fmt: skip
    failed = {
        "kind": "update", "step": step, "group_id": 950, "sample_id": 0, "branch": 0, "datasource": "hostile",
        "prompt": HOSTILE[0], "failure": "environment", "failure_message": HOSTILE[1],
    }  # fmt: skip
    return [*rows, failed]
