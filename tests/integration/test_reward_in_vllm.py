"""A trained reward model gives its scores in a real vLLM, too."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from rollgrad.adapters.models.torch.rewards.reward_model import RewardModel
from rollgrad.entrypoints.cli.main import main
from tests.scripts import ScriptHost

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

POOLING = """
import json, sys
from vllm import LLM, PoolingParams

if __name__ == "__main__":
    path, prompts = sys.argv[1], [{"prompt_token_ids": tokens} for tokens in json.loads(sys.argv[2])]
    llm = LLM(path, runner="pooling", dtype="float32", enforce_eager=True, max_num_seqs=8, kv_cache_memory_bytes=2**28)
    raw = PoolingParams(use_activation=False)  # else of one label vLLM gives the sigmoid
    outputs = llm.encode(prompts, raw, pooling_task="classify", use_tqdm=False)
    json.dump([output.outputs.data.item() for output in outputs], open(sys.argv[3], "w"))
"""
QUICK = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_USE_AOT_COMPILE": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TRITON_F32_DEFAULT": "ieee",
}
"""vLLM in one process, without compiling; on a GPU its kernels multiply float32 as it is."""


def test_vllm_pools_the_scores_that_were_trained(
    wide_headed_model_dir: Path, vllm_host: ScriptHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    pairs = [{"prompt": f"What is {a}?", "chosen": f"It is {a}. " * (1 + a), "rejected": "No."} for a in range(4)]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    model = ["--actor.model_name_or_path", str(wide_headed_model_dir), "--actor.dtype", "float32"]
    learned = ["--data.dataset", "pairs.jsonl", "--actor.adam.lr", "1e-2", "--train.batch_size", "4"]
    assert main(["train", "rm", *model, *learned, "--train.max_steps", "2", "--ckpt.output_dir", "out"]) == 0
    ours = RewardModel.load("out/model", dtype=torch.float32, device=torch.device("cpu"), flag="model")
    texts = [ours.encode(f"{pair['prompt']} {pair[key]}") for pair in pairs for key in ("chosen", "rejected")]
    tokens = json.dumps([text.tokens for text in texts])
    Path("pooling.py").write_text(POOLING)
    ended = subprocess.run(
        [*vllm_host.python(), "pooling.py", "out/model", tokens, "scores.json"],
        env={name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"} | QUICK,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    scores = ours.score_encoded(texts)
    assert max(scores) - min(scores) > 0.1
    assert json.loads(Path("scores.json").read_text()) == pytest.approx(scores, abs=1e-4)
