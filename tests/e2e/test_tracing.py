"""A run whose environment names a collector of OpenTelemetry sends it the spans of its episodes, by HTTP."""

import json
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

GROUPS, SAMPLES, TURNS = 2, 2, 2
AGENT = """
import httpx2

async def run_agent(task):
    async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {task.api_key}"}, timeout=300) as client:
        messages = list(task.prompt.messages)
        for turn in range(2):
            asked = {"model": task.model, "messages": messages}
            reply = await client.post(f"{task.base_url}/chat/completions", json=asked)
            messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "and then?"}]
    return 1.0
"""
PLAIN = """
def reward_func(queries, prompts, labels):
    return [len(query) % 5 for query in queries]
"""
KINDS: dict[str, dict[str, Any]] = {
    "replies": {"reward": {"function_path": "reward.py"}},
    "an_agent": {"train": {"agent_func_path": "agent.py"}},
}


class Collector:
    """A server of OTLP, which keeps what it is sent."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def resources(self) -> list[Any]:
        """Resources with their spans."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        return [each for body in self.bodies for each in ExportTraceServiceRequest.FromString(body).resource_spans]

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_spans_of_each_episode_are_one_trace(
    kind: str, tiny_model_dir: Path, tmp_path: Path, rollgrad_command: list[str], collector: Collector
) -> None:
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"input": f"Say marmalade {n}."}) for n in range(4)))
    (tmp_path / "reward.py").write_text(PLAIN)
    (tmp_path / "agent.py").write_text(AGENT)
    settings: dict[str, Any] = {
        "actor": {"model_name_or_path": str(tiny_model_dir), "dtype": "float32"},
        "algo": {"advantage": {"estimator": "rloo"}},
        "data": {"prompt_dataset": "prompts.jsonl"},
        "rollout": {"batch_size": GROUPS, "n_samples_per_prompt": SAMPLES, "max_new_tokens": 8},
        "logger": {"console": False},
        "ckpt": {"output_dir": "out"},
    }
    settings |= KINDS[kind]
    settings["train"] = {"max_steps": 1, **settings.get("train", {})}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    outer = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    done = subprocess.run(
        [*rollgrad_command, "train", "rl", "--config", "run.yaml"],
        cwd=tmp_path,
        env=outer | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    resources = collector.resources()
    services = {a.value.string_value for r in resources for a in r.resource.attributes if a.key == "service.name"}
    assert services == {"rollgrad"}
    spans = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    episodes = {span.span_id: span for span in spans if span.name == "episode"}
    assert len({span.trace_id for span in episodes.values()}) == len(episodes) == GROUPS * SAMPLES
    replies = [span for span in spans if span.name == f"text_completion {tiny_model_dir.name}"]
    below = Counter(span.parent_span_id for span in replies)
    turns = TURNS if kind == "an_agent" else 1
    assert below == dict.fromkeys(episodes, turns), "each reply is below its own episode"
    assert all(span.trace_id == episodes[span.parent_span_id].trace_id for span in replies)
    if kind == "replies":
        assert Counter(span.parent_span_id for span in spans if span.name == "reward") == dict.fromkeys(episodes, 1)
    assert not [body for body in collector.bodies if b"marmalade" in body]
