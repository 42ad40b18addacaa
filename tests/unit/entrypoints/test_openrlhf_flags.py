"""Flags of OpenRLHF for data, lengths, batches, logs and checkpoints are translated."""

from typing import Any

import pytest
from attrs import evolve

from rollgrad.application.settings.correction import correction_level
from rollgrad.application.settings.run import RLConfig
from tests.openrlhf_commands import GROUP, config_of, notes_of


@pytest.mark.parametrize(
    ("flags", "together", "prompt", "reply", "noted"),
    [
        (("--prompt_max_len", "512", "--generate_max_len", "2048"), None, 512, 2048, 1),
        (("--generate_max_len", "8192"), None, 1024, 8192, 0),
        (("--rollout.max_new_tokens", "3000", "--data.max_len", "4096"), 4096, None, 3000, 1),
        (("--data.max_len", "4096"), 4096, None, 4096, 1),
        (("--max_len", "512"), 512, None, 512, 1),
        (("--max_len", "4096", "--prompt_max_len", "1000"), 4096, 1000, 4096, 2),
        (("--max_len", "4096", "--prompt_max_len", "1000", "--generate_max_len", "10"), 4096, 1000, 10, 2),
        (("--max_len", "512", "--prompt_max_len", "1000"), 512, None, 512, 2),
    ],
)
def test_flags_of_lengths_translate_and_note_what_is_dropped(
    flags: tuple[str, ...], together: int | None, prompt: int | None, reply: int, noted: int
) -> None:
    config = config_of(*flags)
    assert (config.data.max_len, config.data.max_prompt_tokens) == (together, prompt)
    assert config.rollout.max_new_tokens == reply
    assert len(notes_of(*flags)) == noted
    assert all("dropped before the first step" in note for note in notes_of(*flags))


def test_a_chat_template_is_kept_where_it_is_used() -> None:
    flags = ("--tokenizer_chat_template", "{{ messages[0].content }}")
    assert config_of(*flags, "--apply_chat_template").data.chat_template == "{{ messages[0].content }}"
    assert config_of(*flags).data.chat_template is None
    assert "--apply_chat_template" in notes_of(*flags)[0]


def test_flags_of_batch_sizes_translate() -> None:
    config = config_of("--rollout_batch_size", "128", *GROUP, "--train_batch_size", "1024", "--max_epochs", "2")
    assert (config.rollout.batch_size, config.rollout.n_samples_per_prompt) == (128, 8)
    assert (config.train.batch_size, config.train.max_epochs) == (1024, 2)
    assert config_of("--rollout_batch_size", "16").train.batch_size == 16
    assert "--train_batch_size 64: 16" in notes_of("--rollout_batch_size", "16", "--train_batch_size", "64")[0]
    assert config_of("--use_dynamic_batch").train.max_tokens_per_micro_batch == 16192
    tokens = ("--train_max_tokens_per_gpu", "8192")
    assert config_of("--use_dynamic_batch", *tokens).train.max_tokens_per_micro_batch == 8192
    assert config_of(*tokens).train.max_tokens_per_micro_batch == RLConfig().train.max_tokens_per_micro_batch
    assert len(notes_of(*tokens)) == 1


def test_flags_of_dynamic_filtering_translate() -> None:
    algo = config_of("--dynamic_filtering", "--dynamic_filtering_reward_range", "0.1", "0.9", *GROUP).algo
    assert (algo.dynamic_filtering_enable, algo.dynamic_filtering_range) == (True, (0.1, 0.9))
    assert not config_of("--dynamic_filtering_reward_range", "0.1", "0.9").algo.dynamic_filtering_enable
    assert len(notes_of("--dynamic_filtering_reward_range", "0.1", "0.9")) == 1


def test_flags_of_rewards_and_penalties_translate() -> None:
    http = config_of("--remote_rm_url", "http://a:5000/get_reward,http://b:5000/get_reward").reward
    assert (http.function_path, http.timeout) == (None, 180)
    assert http.remote_url == "http://a:5000/get_reward,http://b:5000/get_reward"
    assert "not identical" in notes_of("--remote_rm_url", "http://a")[0]
    reward = config_of(
        *("--reward_clip_range", "-1", "1", "--overlong_buffer_len", "128", "--overlong_penalty_factor", "0.5"),
        *("--stop_properly_penalty_coef", "0.5"),
    ).reward
    assert reward.clip_range == (-1, 1)
    assert (reward.overlong_buffer_len, reward.overlong_penalty_factor) == (128, 0.5)
    assert reward.stop_properly_penalty_coef == 0.5
    agent = ("--agent_func_path", "agent.py", "--overlong_buffer_len", "128")
    assert config_of(*agent).rollout.max_episode_tokens == 2048
    assert config_of(*agent, "--max_len", "4096").data.max_len == 4096
    assert any("against the 2048 of an episode" in note for note in notes_of(*agent))
    assert config_of("--overlong_penalty_factor", "2").reward.overlong_penalty_factor == 1
    assert len(notes_of("--overlong_penalty_factor", "2")) == 1
    assert notes_of("--reward_pretrain", "r") == [
        "not honoured: --reward_pretrain r: --remote_rm_url or --agent_func_path replaces it"
    ]
    clip = ("--reward_clip_range", "-1", "1")
    assert notes_of(*clip) == []
    assert "before the group" in notes_of(*clip, *GROUP, "--advantage_estimator", "rloo")[0]
    assert "--normalize_reward" in notes_of("--normalize_reward")[0]


def test_flags_of_data_translate() -> None:
    data = config_of(
        *("--prompt_data", "a.jsonl,b.jsonl", "--prompt_data_probs", "0.25,0.75", "--prompt_split", "x"),
        *("--input_key", "q", "--label_key", "a", "--input_template", "Q: {}", "--max_samples", "100"),
    ).data
    assert (data.prompt_dataset, data.prompt_probs, data.prompt_split) == ("a.jsonl,b.jsonl", (0.25, 0.75), "x")
    assert (data.input_key, data.label_key, data.input_template, data.max_samples) == ("q", "a", "Q: {}", 100)
    for extra in (("--apply_chat_template", "--input_template", "Q: {}"), ("--input_template", "Q:")):
        assert config_of(*extra).data.input_template is None
        assert len(notes_of(*extra)) == 1


@pytest.mark.parametrize(
    ("flags", "dtype", "noted"),
    [
        ((), "auto", 0),
        (("--bf16",), "bfloat16", 0),
        (("--param_dtype", "bf16"), "bfloat16", 0),
        (("--param_dtype", "fp16"), "float16", 0),
        (("--param_dtype", "fp32"), "float32", 0),
        (("--param_dtype", "fp8"), "auto", 1),
    ],
)
def test_number_formats_translate(flags: tuple[str, ...], dtype: str, noted: int) -> None:
    assert config_of(*flags).actor.dtype == dtype
    assert len(notes_of(*flags)) == noted


def test_passes_are_as_large_as_micro_batches() -> None:
    lengths = ("--prompt_max_len", "100", "--generate_max_len", "28")
    train = config_of(*lengths, "--micro_train_batch_size", "4", "--micro_rollout_batch_size", "8").train
    assert (train.max_tokens_per_micro_batch, train.max_tokens_per_scoring_pass) == (4 * 128, 8 * 128)
    dynamic = ("--use_dynamic_batch", "--train_max_tokens_per_gpu", "500", "--rollout_max_tokens_per_gpu", "900")
    train = config_of(*lengths, *dynamic, "--micro_train_batch_size", "4").train
    assert (train.max_tokens_per_micro_batch, train.max_tokens_per_scoring_pass) == (500, 900)
    engines = ("--vllm_num_engines", "2", "--vllm_tensor_parallel_size", "2")
    assert config_of(*engines, "--rollout_tasks_per_gpu", "16").rollout.max_concurrent == 64


def test_images_are_read_in_one_process_and_in_several() -> None:
    images = ("--data.image_key", "pictures", "--data.max_images_per_prompt", "2", "--actor.freeze_visual_encoder")
    for more in ((), ("--colocate_all_models", "--vllm_num_engines", "2")):
        config = config_of("--apply_chat_template", *more, *images)
        assert (config.data.image_key, config.data.max_images_per_prompt) == ("pictures", 2)
        assert config.actor.freeze_visual_encoder
    assert len([note for note in notes_of(*images) if "--apply_chat_template" in note]) == 3


@pytest.mark.parametrize(
    ("key", "ours"),
    [("eval_math_pass1", "eval/pass@1"), ("pass4", "eval/pass@4"), ("pass3", None), ("none", None), ("reward", None)],
)
def test_the_metric_of_the_best_model(key: str, ours: str | None) -> None:
    flags = ("--eval_dataset", "e.jsonl", "--best_metric_key", key)
    assert config_of(*flags).ckpt.best_metric == ours
    told = [note for note in notes_of(*flags) if "--best_metric_key" in note]
    assert len(told) == (key != "none")


def test_flags_of_evaluation_translate() -> None:
    evaluation = config_of("--eval_dataset", "e.jsonl", "--eval_steps", "5", "--max_samples", "10").eval
    assert (evaluation.dataset, evaluation.split, evaluation.steps) == ("e.jsonl", "train", 5)
    assert (evaluation.temperature, evaluation.n_samples_per_prompt, evaluation.max_samples) == (0.6, 4, 10)
    assert config_of("--eval_dataset", "e.jsonl", "--eval_temperature", "0").eval.n_samples_per_prompt == 1
    assert config_of("--eval_dataset", "e.jsonl", "--top_p", "0.9").eval.top_p == 0.9
    assert config_of("--eval_split", "test", "--eval_steps", "5").eval == RLConfig().eval
    assert len(notes_of("--eval_split", "test", "--eval_steps", "5")) == 2
    assert notes_of("--eval_steps", "-1") == []


@pytest.mark.parametrize(
    "flags",
    [
        ("--async_queue_size", "4"),
        ("--partial_rollout",),
        ("--vllm_enable_sleep",),
        ("--vllm_sync_backend", "nccl"),
        ("--deepspeed_enable_sleep",),
        ("--reward_num_nodes", "2"),
        ("--lora_alpha", "8"),
        ("--lora_dropout", "0.1"),  # all weights are trained
        ("--load_in_4bit",),  # all weights are trained
        ("--wandb_group", "prm"),  # no key
        ("--ema_beta", "0.9"),
        ("--data.max_images_per_prompt", "2"),
        ("--ref_reward_offload",),
        ("--flash_attn",),
    ],
)
def test_what_has_no_counterpart_is_one_line_that_says_why(flags: tuple[str, ...]) -> None:
    (note,) = notes_of(*flags)
    assert note.startswith(f"not honoured: {' '.join(flags)}: ")
    assert config_of(*flags) == config_of()


def test_kernels_are_deterministic_when_asked() -> None:
    for flag in ("--full_determinism", "--train.full_determinism_enable"):
        assert config_of(flag).actor.deterministic
        assert notes_of(flag) == []


def test_trackers_are_told_of_some_steps() -> None:
    for reported in (("--use_tensorboard", "logs"), ("--logger.tensorboard_dir", "logs"), ("--use_wandb", "True")):
        assert config_of(*reported, "--logging_steps", "5").logger.logging_steps == 5
        assert not any("logging_steps" in note for note in notes_of(*reported, "--logging_steps", "5"))
    (note,) = notes_of("--logging_steps", "5")
    assert note.startswith("not honoured: --logging_steps 5: nothing is reported")


def test_what_wandb_is_told() -> None:
    flags = ("--use_wandb", "a-key", "--wandb_org", "us", "--wandb_project", "p", "--wandb_run_name", "n")
    logger = config_of(*flags).logger
    assert (logger.report_to, logger.organization) == (("wandb",), "us")
    assert (logger.project, logger.run_name, logger.group) == ("p", "n", None)
    (note,) = notes_of(*flags)
    assert note.startswith("not identical: --use_wandb: the key is read from WANDB_API_KEY"), "without the key"
    assert config_of("--use_wandb", "True").logger == evolve(RLConfig().logger, report_to=("wandb",))


@pytest.mark.parametrize(
    "flags",
    [
        *(("--lora_rank", "0"), ("--zpg", "1"), ("--ring_attn_size", "1"), ("--logging_steps", "1")),
        ("--ckpt.best_metric_key", "none"),
        ("--enable_prefix_caching",),
    ],
)
def test_flags_that_ask_for_nothing_are_passed_over(flags: tuple[str, ...]) -> None:
    assert notes_of(*flags) == []


@pytest.mark.parametrize(
    ("flags", "staleness", "partial"),
    [
        ((), 1, "none"),
        (("--train.async_queue_size", "3", "--enable_vllm_is_correction"), 3, "none"),
        (("--partial_rollout",), 1, "keep"),
        (("--train.partial_rollout_enable", "--async_queue_size", "2", "--enable_vllm_is_correction"), 2, "keep"),
    ],
)
def test_flags_of_asynchronous_training_translate(flags: tuple[str, ...], staleness: int, partial: str) -> None:
    train = config_of("--async_train", *flags).train
    assert (train.async_enable, train.max_staleness, train.partial_rollout) == (True, staleness, partial)
    (note,) = notes_of("--async_train", *flags)
    assert note.startswith(
        "not identical: --async_train: an update waits for its own groups only, not for a whole batch"
    )
    asked = "--enable_vllm_is_correction" in flags
    assert ("stale samples are corrected (algo.correction.level auto), there only if asked" in note) is not asked
    assert correction_level(config_of("--async_train", *flags)) == "token"


@pytest.mark.parametrize(("given", "groups", "notes"), [("2048", None, 1), ("1536", 1536, 1), ("4096", 2048, 2)])
def test_groups_in_flight_of_an_asynchronous_run(given: str, groups: int | None, notes: int) -> None:
    flags = ("--async_train", "--vllm_generate_batch_size", given)
    assert config_of(*flags).rollout.generate_batch_size == (groups or 2048)
    assert len(notes_of(*flags)) == notes


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), {"save_steps": -1, "state_steps": -1, "state_minutes": 30.0, "state_dir": None, "resume": "never"}),
        (("--save_steps", "20"), {"save_steps": -1, "state_steps": 20}),
        (("--save_steps", "20", "--save_hf_ckpt"), {"save_steps": 20, "state_steps": 20}),
        (
            ("--save_steps", "20", "--save_hf_ckpt", "--disable_ds_ckpt"),
            {"save_steps": 20, "state_steps": -1, "state_minutes": None},
        ),
        (("--load_checkpoint",), {"resume": "auto"}),
        (("--save_path", "out", "--ckpt_path", "scratch"), {"output_dir": "out", "state_dir": "scratch"}),
    ],
)
def test_checkpoints_go_where_they_went_and_runs_continue(flags: tuple[str, ...], expected: dict[str, Any]) -> None:
    ckpt = config_of(*flags).ckpt
    assert {name: getattr(ckpt, name) for name in expected} == expected
    assert not [note for note in notes_of(*flags) if note.startswith("not honoured")]


def test_the_critic_is_saved_as_asked() -> None:
    (note,) = notes_of("--advantage_estimator", "gae", "--save_value_network")
    assert note.startswith("not identical: --save_value_network: the critic is saved below the model")
