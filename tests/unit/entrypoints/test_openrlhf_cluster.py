"""Flags of OpenRLHF that say where models and engines run are translated."""

import pytest

from rollgrad.adapters.engines.vllm.arguments import argument_problems
from rollgrad.adapters.models.deepspeed.extra import config_problems
from rollgrad.application.settings.derived import ranks
from rollgrad.application.settings.rules import validate
from rollgrad.application.settings.run import RLConfig
from rollgrad.entrypoints.config_io import structure_config
from rollgrad.entrypoints.openrlhf.command import translate, translated_config
from tests.openrlhf_commands import GROUP, LEAST, MODULE, config_of, notes_of


def test_settings_of_deepspeed_and_vllm_by_their_own_names() -> None:
    zero = ("--zpg", "8", "--overlap_comm", "--grad_accum_dtype", "bf16")
    config = config_of(*EIGHT, "--zero_stage", "3", *zero, "--enforce_eager")
    assert config.ds.extra == {
        "zero_optimization": {"zero_hpz_partition_size": 8, "overlap_comm": True},
        "data_types": {"grad_accum_dtype": "bf16"},
    }
    assert config.vllm.extra == {"enforce_eager": True}
    assert list(config_problems(config.ds.extra)) == list(argument_problems(config.vllm.extra)) == []
    assert notes_of(*EIGHT, "--zero_stage", "3", *zero, "--enforce_eager") == []
    assert notes_of(*EIGHT, "--zero_stage", "2", "--zpg", "8") == [
        "not honoured: --zpg 8: ZeRO copies parameters within a machine at stage 3 alone, in OpenRLHF too"
    ]
    assert len(notes_of(*zero, "--enforce_eager")) == 4, "without a cluster"
    assert config_of(*zero, "--enforce_eager") == config_of()
    assert config_of(*EIGHT, "--zpg", "1", "--grad_accum_dtype", "fp32").ds.extra is None


EIGHT = ("--actor_num_gpus_per_node", "8")


@pytest.mark.parametrize(
    "flags",
    [
        *((f"--{model}_num_nodes", "1") for model in ("actor", "critic", "ref")),
        *((f"--{model}_num_gpus_per_node", "8") for model in ("actor", "critic", "ref")),
        *(("--colocate_all_models", "--vllm_enable_sleep"), ("--colocate_actor_ref",)),
        *(("--vllm_num_engines", "1"), ("--vllm_tensor_parallel_size", "1"), ("--vllm_gpu_memory_utilization", "0.95")),
        *(("--zero_stage", "2"), ("--adam_offload",)),
    ],
)
def test_what_names_a_cluster_turns_it_on_as_openrlhf_would(flags: tuple[str, ...]) -> None:
    config = config_of(*flags)
    assert (config.cluster.enable, config.rollout.engine) == (True, "vllm")
    assert (config.actor.num_nodes, config.actor.num_gpus_per_node) == (1, 8)
    assert [ranks(config, model) for model in ("actor", "critic", "ref")] == [8, 8, 8]
    assert (config.vllm.num_engines, config.vllm.tensor_parallel_size) == (1, 1)
    assert config.vllm.gpu_memory_utilization == 0.95
    assert config.ds.zero_stage == 2
    assert config.ds.adam_offload is (flags == ("--adam_offload",))
    assert config.train.colocate_all is ("--colocate_all_models" in flags)
    assert config.train.colocate_actor_ref is ("--colocate_actor_ref" in flags)
    assert notes_of(*flags) == []


def test_a_reference_rests_in_the_memory_of_the_cpu() -> None:
    config = config_of(*EIGHT, "--ref_reward_offload")
    assert (config.ref.offload, config.reward.offload) == (True, False)
    assert notes_of(*EIGHT, "--ref_reward_offload") == []
    both, notes = translated_config([*WITH_MODEL, "--actor_num_gpus_per_node", "8", "--ref_reward_offload"])
    validate(both)
    assert (both.ref.offload, both.reward.offload, notes) == (True, True, [])
    config = config_of(*EIGHT, "--ref.offload")
    assert (config.cluster.enable, config.ref.offload) == (True, True)
    assert notes_of(*EIGHT, "--ref.offload") == []
    assert not config_of(*EIGHT, "--ref.offload", "--init_kl_coef", "0").ref.offload


WITH_MODEL = (*MODULE, "--pretrain", "m", "--prompt_data", "d.jsonl", "--reward_pretrain", "r")


def test_a_reward_model_is_loaded() -> None:
    translation = translate([*WITH_MODEL, "--reward_clip_range", "-5", "5"])
    config = structure_config(translation.settings)
    validate(config)
    assert (config.reward.model_name_or_path, config.reward.timeout) == ("r", 180)
    assert (config.cluster.enable, translation.notes) == (False, [])
    first = translate([*WITH_MODEL[:-1], "r1,r2", "--normalize_reward"])
    assert first.settings["reward"]["model_name_or_path"] == "r1"
    alone, normalised = first.notes
    assert first.settings["reward"]["normalize"] == "model"
    assert normalised.endswith("--normalize_reward: rewards alone are scaled, in OpenRLHF the critic's values too")
    without_critic = translate([*WITH_MODEL, "--normalize_reward", *GROUP, "--advantage_estimator", "rloo"])
    assert without_critic.settings["reward"]["normalize"] == "model"
    assert not any("normalize_reward" in note for note in without_critic.notes)
    assert alone == "not identical: --reward_pretrain r1,r2: r1 alone, for a run has one reward model"


@pytest.mark.parametrize("flag", ["--reward_num_nodes 1", "--reward_num_gpus_per_node 4", "--colocate_critic_reward"])
def test_the_processes_of_a_reward_model(flag: str) -> None:
    config, notes = translated_config([*WITH_MODEL, *flag.split()])
    validate(config)
    assert config.cluster.enable
    assert ranks(config, "reward") == (4 if "4" in flag else 8)
    assert config.train.colocate_critic_reward is (flag == "--colocate_critic_reward")
    assert notes == []
    without = translate([*MODULE, *LEAST, *flag.split()])
    assert without.notes == [f"not honoured: {flag}: no reward model is loaded, in OpenRLHF neither"]


def test_without_a_critic_the_reward_model_shares_with_none() -> None:
    config, notes = translated_config([*WITH_MODEL, "--colocate_critic_reward", "--advantage_estimator", "reinforce"])
    validate(config)
    assert (config.cluster.enable, config.train.colocate_critic_reward) == (True, False)
    assert notes == ["not honoured: --colocate_critic_reward: reinforce has no critic, in OpenRLHF neither"]


def test_without_such_a_flag_everything_is_in_one_process() -> None:
    for flags in ((), ("--reward_num_nodes", "2"), ("--colocate_all_models", "false"), ("--packing_samples",)):
        config = config_of(*flags)
        assert (config.cluster.enable, config.rollout.engine) == (False, "embedded")


def test_processes_of_each_model() -> None:
    flags = ("--actor_num_nodes", "2", "--ref_num_gpus_per_node", "2", "--critic_num_gpus_per_node", "4")
    config = config_of(*flags, "--vllm_num_engines", "2", "--vllm_tensor_parallel_size", "4", "--zero_stage", "3")
    assert [ranks(config, model) for model in ("actor", "critic", "ref")] == [16, 4, 2]
    assert (config.vllm.num_engines, config.vllm.tensor_parallel_size, config.ds.zero_stage) == (2, 4, 3)
    assert notes_of(*flags) == []
    config = config_of(*flags, "--init_kl_coef", "0", "--advantage_estimator", "reinforce")
    assert (config.critic, config.ref) == (config_of("--advantage_estimator", "reinforce").critic, RLConfig().ref)
    notes = notes_of(*flags, "--init_kl_coef", "0", "--advantage_estimator", "reinforce")
    assert [note.split(": ")[1] for note in notes] == ["--critic_num_gpus_per_node 4", "--ref_num_gpus_per_node 2"]


def test_models_and_engines_on_the_same_gpus() -> None:
    flags = (*EIGHT, "--colocate_all_models", "--vllm_num_engines", "4", "--vllm_tensor_parallel_size", "2")
    config = config_of(*flags)
    assert config.train.colocate_all
    assert (config.vllm.num_engines, config.vllm.tensor_parallel_size) == (4, 2)
    validate(config)
    (sleeping,) = notes_of(*flags)
    assert sleeping.startswith("not identical: --colocate_all_models: engines sleep")
    assert notes_of(*flags, "--vllm_enable_sleep") == []
    assert notes_of(*flags, "--vllm_gpu_memory_utilization", "0.5") == [sleeping]  # of the whole GPU, as there
    assert config_of(*flags, "--vllm_gpu_memory_utilization", "0.5").vllm.gpu_memory_utilization == 0.5


def test_optimizers_sleep_where_models_and_engines_share_gpus() -> None:
    together = (*EIGHT, "--colocate_all_models", "--vllm_enable_sleep")
    assert not config_of(*together).train.optimizer_sleeps
    assert config_of(*together, "--deepspeed_enable_sleep").train.optimizer_sleeps
    assert notes_of(*together, "--deepspeed_enable_sleep") == []
    validate(config_of(*together, "--deepspeed_enable_sleep"))
    for flags in ((*EIGHT, "--ds.enable_sleep"), (*together, "--ds.enable_sleep", "--adam_offload")):
        assert not config_of(*flags).train.optimizer_sleeps
        (note,) = notes_of(*flags)
        assert note.startswith("not honoured: --ds.enable_sleep: ")


@pytest.mark.parametrize(("flags", "backend"), [((), "auto"), (("nccl",), "auto"), (("gloo",), "shared_memory")])
def test_the_way_of_weights(flags: tuple[str, ...], backend: str) -> None:
    given = ("--vllm_sync_backend", *flags) if flags else ()
    assert config_of(*EIGHT, *given).vllm.sync_backend == backend
    assert len(notes_of(*EIGHT, *given)) == (flags == ("gloo",))
    (note,) = notes_of(*EIGHT, "--vllm_sync_with_ray")
    assert note.startswith("not honoured: --vllm_sync_with_ray: ")
    (note,) = notes_of(*EIGHT, "--vllm_sync_backend", "ucc")
    assert note.startswith("not honoured: --vllm_sync_backend ucc: ")


def test_engines_of_an_asynchronous_run_share_no_gpu() -> None:
    flags = (*EIGHT, "--colocate_all_models", "--async_train")
    train = config_of(*flags).train
    assert (train.colocate_all, train.colocate_actor_ref) == (False, True)
    assert any("with --async_train actor and reference share GPUs" in note for note in notes_of(*flags))


def test_flags_of_lora_translate() -> None:
    reinforce = ("--advantage_estimator", "reinforce")
    config = config_of("--lora_rank", "8", *reinforce)
    assert config.cluster.enable
    assert (config.actor.lora.rank, config.actor.lora.alpha) == (8, 16)  # OpenRLHF's default
    assert config.actor.lora.target_modules == RLConfig().actor.lora.target_modules
    chosen = ("--lora_rank", "8", "--lora_alpha", "32", "--target_modules", "q_proj", "v_proj")
    lora = config_of(*chosen).actor.lora
    assert (lora.rank, lora.alpha, lora.target_modules, lora.dropout) == (8, 32, ("q_proj", "v_proj"), 0.0)
    assert config_of("--lora_rank", "8", "--lora_dropout", "0.1").actor.lora.dropout == 0.1
    assert notes_of("--lora_rank", "8", "--lora_dropout", "0.1", *reinforce) == []
    assert notes_of(*chosen, *reinforce) == []
    assert not config_of(*chosen, *reinforce).critic.lora.rank
    critic = config_of(*chosen, "--lora_dropout", "0.1").critic.lora
    assert (critic.rank, critic.alpha, critic.target_modules, critic.dropout) == (8, 32, ("q_proj", "v_proj"), 0.1)
    assert notes_of(*chosen) == []


@pytest.mark.parametrize(
    ("models", "others"),
    [
        ((*MODULE, *LEAST, "--advantage_estimator", "reinforce"), ""),
        ((*MODULE, *LEAST), "critic"),
        (WITH_MODEL, "critic and reward model"),
    ],
)
def test_weights_in_four_bits(models: tuple[str, ...], others: str) -> None:
    command = [*models, "--lora_rank", "8"]
    assert not translated_config(command)[0].actor.lora.load_in_4bit
    command.append("--load_in_4bit")
    assert translated_config(command)[0].actor.lora.load_in_4bit
    notes = [note for note in translate(command).notes if "4bit" in note]
    assert notes == ([f"not identical: --load_in_4bit: of the actor, not of the {others}"] if others else [])


def test_sequences_over_several_processes() -> None:
    config = config_of("--ring_attn_size", "2")
    assert (config.cluster.enable, config.ds.sequence_parallel_size) == (True, 2)
    assert notes_of("--ring_attn_size", "2") == []
    assert notes_of("--ring_attn_size", "2", "--ring_head_stride", "2") == [
        "not honoured: --ring_head_stride 2: attention is divided by heads, without a ring"
    ]
    assert not config_of("--ring_attn_size", "1", "--lora_rank", "0").cluster.enable


def test_layers_over_several_processes() -> None:
    config = config_of("--ds_tensor_parallel_size", "2")
    assert (config.cluster.enable, config.ds.tensor_parallel_size) == (True, 2)
    assert notes_of("--ds_tensor_parallel_size", "2") == []
    assert not config_of("--ds_tensor_parallel_size", "1").cluster.enable


def test_a_submitted_job_joins_the_cluster_that_runs() -> None:
    submit = ("ray", "job", "submit", "--address=http://127.0.0.1:8265", "--", *MODULE)
    assert translated_config([*submit, *LEAST, *EIGHT])[0].cluster.address == "auto"
    assert translated_config([*submit, *LEAST])[0].cluster == RLConfig().cluster
    assert config_of(*EIGHT).cluster.address is None
