"""Tool episodes through `rollgrad.train`, with a model that says what a script tells it to."""

import json
from pathlib import Path
from typing import Any

import rollgrad
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.domain.episodes.generation import GenerationRequest
from rollgrad.testing.weight_channel import FakeWeightChannel
from tests.example_runs import logged
from tests.fakes.recording_engine import RecordingEngine

TOOLS = '''
import rollgrad


@rollgrad.tool
def double(number: int) -> str:
    """Doubles a number."""
    return f"{2 * number}" + 200 * "!"
'''


def test_calls_attempts_and_rewards(tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Every second sample calls the tool and answers right; the others answer wrong, and wrong again."""
    settings = json.loads((tiny_model_dir / "config.json").read_text())
    long = tmp_path / "model"
    long.mkdir()
    for file in tiny_model_dir.iterdir():
        (long / file.name).write_bytes(file.read_bytes())
    (long / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 4096}))
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "tasks.jsonl").write_text('{"input": "Double 21.", "label": "42"}\n')
    codec = TemplateCodec(tiny_tokenizer)
    openings = 0

    def reply(request: GenerationRequest, number: int) -> tuple[int, ...]:
        nonlocal openings
        asked = codec.decode(request.prompt_token_ids)
        if "Try again" in asked:
            return codec.encode("41<|im_end|>")
        if f"<tool_response>\n42{48 * '!'}\n[102 characters are left out here]\n" in asked:
            return codec.encode("It is 42.<|im_end|>")
        openings += 1
        call = '<tool_call>\n{"name": "double", "arguments": {"number": 21}}\n</tool_call><|im_end|>'
        return codec.encode(call if openings % 2 else "40<|im_end|>")

    judged: list[str] = []

    def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
        judged.extend(queries)
        return [float(label in query) for query, label in zip(queries, labels, strict=True)]

    config = rollgrad.RLConfig()
    config.actor.model_name_or_path = str(long)
    config.algo.advantage.estimator = "group_norm"
    config.agent.tools, config.agent.attempts = str(tmp_path / "tools.py"), 2
    config.agent.max_result_chars = 100
    config.data.prompt_dataset, config.data.label_key = str(tmp_path / "tasks.jsonl"), "label"
    config.rollout.batch_size, config.rollout.n_samples_per_prompt = 1, 4
    config.rollout.max_new_tokens = 100
    config.train.max_steps = 1
    config.ckpt.output_dir = str(tmp_path / "run")
    config.logger.console = False
    engine = RecordingEngine(reply)
    rollgrad.train(config, reward=reward_func, engine=engine, channel=FakeWeightChannel())
    (line,) = logged(tmp_path / "run")
    assert line["reward/mean"] == 0.5
    assert line["reward/tool_calls"] == 0.5
    assert line["reward/cut_results"] == 0.5
    assert line["reward/attempts"] == 1.5
    assert line["reward/turns"] == 2.0
    assert line["reward/branches"] == 1.0
    assert len(engine.exchanges) == 8
    assert {query.rpartition("assistant\n")[2] for query in judged} == {
        f"{a}<|im_end|>" for a in ("It is 42.", "40", "41")
    }
