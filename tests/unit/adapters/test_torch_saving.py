"""A model that cannot be written is one sentence, whichever library writes the file for which there is no room."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from rollgrad.adapters.checkpoints.local import LocalCheckpointStore
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_critic
from rollgrad.adapters.models.torch.loading.lora import add_lora
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.adapters.models.torch.rewards.trained_reward import TorchReward
from rollgrad.adapters.models.torch.rewards.value import TorchValue
from rollgrad.adapters.weights.disk import write
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.domain.errors import CheckpointError
from tests.full_disk import room_for_files_of
from tests.tiny_models import saved, tiny_model

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def policy(path: Path, tokenizer: Any, *, rank: int = 0, ema: bool = False) -> TorchPolicy:
    model = load_causal_lm(str(path), dtype=torch.float32, device=torch.device("cpu"), flag="path")
    if rank:
        add_lora(model, LoraConfig(rank=rank), seed=0)
    return TorchPolicy(model, tokenizer, OptimizerSettings(lr=0.1, ema_beta=0.9 if ema else None))


@pytest.mark.parametrize("settings", [{}, {"rank": 4}, {"ema": True}], ids=["plain", "lora", "ema"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.99])
def test_a_model_for_which_there_is_no_room(
    settings: dict[str, Any], share: float, tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """The older one is still there, and nothing of the newer one."""
    store = LocalCheckpointStore(tmp_path)
    trained = policy(tiny_model_dir, tiny_tokenizer, **settings)
    saved = store.save_model(trained, "model")
    before = {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
    size = (saved / "model.safetensors").stat().st_size
    with (
        room_for_files_of(int(share * size)),
        pytest.raises(CheckpointError, match=r"cannot be written .* let it be written") as caught,
    ):
        store.save_model(trained, "model")
    assert "\n" not in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in saved.rglob("*")} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    store.save_model(trained, "model")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
def test_who_may_read_the_other_files_may_read_the_weights(
    umask: int, mode: int, tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """A server often is another user's process."""
    before = os.umask(umask)
    try:
        trained = policy(tiny_model_dir, tiny_tokenizer, rank=4, ema=True)
        saved = LocalCheckpointStore(tmp_path / "run").save_model(trained, "model")
        TorchValue(trained.module, tiny_tokenizer, OptimizerSettings(lr=0.1)).save(saved / "critic")
        list(write(trained.weights(), str(tmp_path / "run" / "weights"), 20_000))
    finally:
        os.umask(before)
    files = list((tmp_path / "run").rglob("*.safetensors"))
    names = {"model.safetensors", "adapter_model.safetensors", "value_head.safetensors", "00000.safetensors"}
    assert names <= {file.name for file in files}
    assert {file.stat().st_mode & 0o777 for file in [*files, saved / "config.json"]} == {mode}


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_a_model_in_several_files_is_the_model(
    family: str, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixture's files have each expert's matrices, which transformers makes from all of a layer's."""
    from rollgrad.adapters.models.torch import models

    path = saved(
        tiny_model(family, tiny_tokenizer, **MIXTURE if "Moe" in family else {}), tiny_tokenizer, tmp_path / "m"
    )
    trained = policy(path, tiny_tokenizer, rank=4)
    trained.save(tmp_path / "one")
    monkeypatch.setattr(models, "FILE_BYTES", 20_000)
    trained.save(tmp_path / "several")
    assert len(list((tmp_path / "one").glob("model*.safetensors"))) == 1
    assert len(list((tmp_path / "several").glob("model*.safetensors"))) > 2
    one, several = (dict(policy(tmp_path / name, tiny_tokenizer).weights()) for name in ("one", "several"))
    assert one.keys() == several.keys()
    assert all(torch.equal(several[name], tensor) for name, tensor in one.items())
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(tmp_path / "one" / "model.safetensors", framework="pt") as tensors:
        assert set(tensors.keys()) == set(index)
    assert not list((tmp_path / "several").glob("part-*"))


def test_a_critic_and_a_reward_model_in_several_files_are_the_models(
    tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForSequenceClassification

    from rollgrad.adapters.models.torch import models

    monkeypatch.setattr(models, "FILE_BYTES", 20_000)
    for kind in (TorchValue, TorchReward):
        model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag="path")
        head = {"weight": torch.randn(1, model.config.hidden_size)}
        path = tmp_path / kind.__name__
        kind(model, tiny_tokenizer, OptimizerSettings(lr=0.1), head=head).save(path)
        assert len(list(path.glob("model-*.safetensors"))) > 2
        loaded, found = load_critic(str(path), dtype=torch.float32, device=torch.device("cpu"), flag="path")
        assert torch.equal(found["weight"], head["weight"])
        wholes = dict(model.model.named_parameters())
        assert all(torch.equal(tensor, wholes[name]) for name, tensor in loaded.model.named_parameters())
    _, report = AutoModelForSequenceClassification.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


def test_a_critics_head_for_which_there_is_no_room(
    tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written last, in a file of its own."""
    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag="path")
    critic = TorchValue(model, tiny_tokenizer, OptimizerSettings(lr=0.1))
    from rollgrad.adapters.models.torch.rewards import value

    monkeypatch.setattr(value, "save_in_files", lambda model, tokenizer, path, parts, writes: path.mkdir())
    with room_for_files_of(10), pytest.raises(CheckpointError, match="cannot be written"):
        critic.save(tmp_path / "critic")


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"text", None], ids=["empty", "zeros", "text", "no_weight"])
def test_a_critics_head_that_is_broken_is_one_sentence(
    content: bytes | None, tiny_model_dir: Path, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "critic"
    shutil.copytree(tiny_model_dir, path)
    save_file({"value_head.bias": torch.zeros(1)}, path / "value_head.safetensors")
    if content is not None:
        (path / "value_head.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"^--critic is .*, whose head cannot be read") as caught:
        load_critic(str(path), dtype=torch.float32, device=torch.device("cpu"), flag="--critic")
    assert "\n" not in str(caught.value)
