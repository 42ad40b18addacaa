"""Hydra's grammar of overrides is read, and its errors are sentences."""

from pathlib import Path

import pytest

from rollgrad.entrypoints.cli.main import main
from rollgrad.entrypoints.verl.command import translate_command
from tests.translated_settings import holds, settings_of
from tests.verl_overrides import ACTOR, LEAST, ROLLOUT, TAUGHT, TEACHER, TEACHING, notes, settings


def test_the_grammar_of_hydra() -> None:
    """A later override counts, null and ~ take a value away, and + adds one."""
    assert settings("trainer.total_epochs=2", "trainer.total_epochs=3")["train.num_episodes"] == 3
    assert settings("data.val_files=null", "trainer.test_freq=-1")["eval.dataset"] is None
    assert settings(f"~{ACTOR}.clip_ratio_c")["actor.dual_clip"] is None
    assert settings("++trainer.total_epochs=4")["train.num_episodes"] == 4
    mapping = "+data.apply_chat_template_kwargs={enable_thinking:False,effort:'low'}"
    assert settings(mapping)["data.chat_template_kwargs"] == {"enable_thinking": False, "effort": "low"}
    assert settings("data.train_files=['~/a.parquet','b.parquet']")["data.prompt_dataset"] == (
        f"{Path.home()}/a.parquet,b.parquet"
    )
    assert "+my.own=1: rollgrad knows no setting of verl's" in notes("+my.own=1")


def test_a_file_of_settings_is_read_and_overrides_win(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: [here]}\ndefaults: [ppo_trainer, _self_, other]\n"
        "data: {train_batch_size: 64, max_response_length: 32}\nalgorithm: {gamma: '${data.x}'}\n"
    )
    result = translate_command(
        ["python3", "-m", "verl.trainer.main_ppo", f"--config-path={tmp_path}", "--config-name", "mine", *LEAST,
         "data.max_response_length=16", "--cfg=job"]
    )  # fmt: skip
    assert holds(settings_of(result), {"rollout.batch_size": 64, "rollout.max_new_tokens": 16})
    text = "\n".join(result.notes)
    assert "mine.yaml: other: of files" in text
    assert "algorithm.gamma=${data.x}: Hydra would fill it in" in text
    assert "--cfg=job: it is a flag of Hydra" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.trian_files=x"], "did you mean data.train_files?"),
        (["dta.train_files=x"], "did you mean data.train_files?"),
        ([f"{ACTOR}.clip_ratio_hihg=0.28"], f"did you mean {ACTOR}.clip_ratio_high?"),
        ([f"{ROLLOUT}.zzz=1"], "remove it."),
        (["data.train_files=$HOME/x.parquet"], "a value is not filled in from '$H' on"),
        (["data.train_batch_size=", "data.max_prompt_length="], "data.max_prompt_length= has no value"),
        (["data.train_batch_size=many"], "it takes one integer"),
        (["data.train_batch_size=0"], "data.train_batch_size is 0, but it must be at least 1"),
        (["data.apply_chat_template_kwargs=[a]"], "is no mapping: write data.apply_chat_template_kwargs.NAME=VALUE."),
        (["data.train_files=['a',", "'b']"], "close brackets, and quote what has spaces"),
        (["algorithm.adv_estimator=mine"], "algorithm.adv_estimator is mine, but there are gae"),
        ([f"{ACTOR}.policy_loss.loss_mode=mine"], "loss_mode is mine"),
        (["algorithm.rollout_correction.rollout_rs=token_k1,seq_max_k3"], "has no counterpart: write algo.correction"),
        ([f"{ACTOR}.loss_agg_mode=mine"], "loss_agg_mode is mine"),
        ([f"{ACTOR}.router_replay.mode=R4"], "router_replay.mode is R4, but there are disabled, R2, R3: change it."),
        (["trainer.resume_mode=never"], "trainer.resume_mode is never, but there are auto, disable, resume_path"),
        (["trainer.v1.trainer_mode=async"], "trainer_mode is async, but there are sync, colocate_async"),
        (
            ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=mine"],
            "kl_ctrl.type is mine, but there are fixed",
        ),
        (["reward_model.overlong_buffer.enable=True"], "add reward_model.overlong_buffer.len=4096, say"),
        (["distillation.enabled=True"], f"there is no teacher: add {TEACHER.removesuffix('large')}MODEL"),
        ([*TAUGHT, f"{TEACHING}.loss_mode=k1"], "whose gradient does not depend on the teacher, in verl neither"),
        ([*TAUGHT, f"{TEACHING}.loss_mode=mine"], "loss_mode is mine, but there are k1"),
        (["distillation.enabled=True", "+distillation.teacher_models.a.key=x"], "--ref.urls KEY http://host:8000"),
        ([f"{ROLLOUT}.tensor_model_parallel_size=3"], "which do not divide the 8 that engines have"),
        (["python3", "-m", "verl.trainer.main_eval", "data.path=x"], "write rollgrad score"),
        (["python3", "-m", "verl.trainer.main_generation", "data.path=x"], "write rollgrad generate"),
        (["python3", "-m", "recipe.mine.main_ppo", "a.b=1"], "the programs that are translated are"),
        (["python3", "-m", "recipe.mine.main_mine"], "the programs that are translated are main_ppo"),
        (["python3", "train.py"], "The command names no program of verl"),
        (["data.train_batch_size=8", "--run"], "No model is set"),
        (["bash -c 'x"], "cannot be split into words"),
    ],
)
def test_each_error_is_a_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verl", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
