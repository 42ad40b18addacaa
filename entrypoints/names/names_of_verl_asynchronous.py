"""The settings of verl's trainers whose rollouts overlap with updates: those that `main_ppo` has not."""

from attrs import evolve

from rollgrad.entrypoints.names.flags import Flag, Kind, Program
from rollgrad.entrypoints.names.names_of_verl_commands import PPO
from rollgrad.entrypoints.names.names_of_verl_seldom_set import ACTOR, ROLLOUT

_ENGINES = {"rollout.nnodes": Flag(Kind.INTEGER, default=1), "rollout.n_gpus_per_node": Flag(Kind.INTEGER, default=8)}


def _program(name: str, flags: dict[str, Flag], **same: str) -> Program:
    bypass = evolve(PPO.flags["algorithm.rollout_correction.bypass_mode"], default=True)
    hybrid = Flag(Kind.SWITCH, reason="engines have GPUs of their own")
    own = {
        **_ENGINES,
        "actor_rollout_ref.hybrid_engine": hybrid,
        "algorithm.rollout_correction.bypass_mode": bypass,
        **flags,
    }
    names = {**PPO.names, **{key: (key,) for key in own}, **{key: (target,) for key, target in same.items()}}
    return Program(name=name, flags={**PPO.flags, **own}, names=names)


ONE_STEP_OFF = _program("verl.experimental.one_step_off_policy.main_ppo", {})
"""One rollout ahead of the updates."""

FULLY_ASYNC = _program(
    "verl.experimental.fully_async_policy.fully_async_main",
    {
        "async_training.staleness_threshold": Flag(Kind.NUMBER, default=0.1),
        "async_training.trigger_parameter_sync_step": Flag(Kind.INTEGER, default=4),
        "async_training.require_batches": Flag(Kind.INTEGER, default=1),
        "async_training.partial_rollout": Flag(Kind.SWITCH, default=True),
        "rollout.total_rollout_steps": Flag(Kind.INTEGER, default=100),
        "async_training.concurrent_samples_per_replica": Flag(
            Kind.INTEGER, reason="rollout.max_concurrent and the memory of an engine bound what is in flight"
        ),
        "async_training.use_trainer_do_validate": Flag(Kind.SWITCH, reason="the engines that sample evaluate"),
        "async_training.compute_prox_log_prob": Flag(
            Kind.SWITCH, reason="algorithm.rollout_correction.bypass_mode says which log-probs the ratio starts from"
        ),
        **{
            f"async_training.{key}": Flag(Kind.WORDS, reason="GPUs of models and of engines stay what they are")
            for key in (
                *("use_dynamic_resource_scheduling", "dynamic_schedule_policy", "dynamic_schedule_deactivate_ratio"),
                "dynamic_schedule_enable_rebalance",
            )
        },
        f"{ROLLOUT}.standalone_gpu_memory_utilization": Flag(Kind.NUMBER),
        f"{ACTOR}.use_rollout_log_probs": Flag(
            Kind.SWITCH, reason="log-probs of the engine are always kept", idle=("True", "true")
        ),
        "rollout.test_freq": Flag(Kind.WORDS, reason="write trainer.test_freq"),
    },
    **{"rollout.n": f"{ROLLOUT}.n"},
)
"""Rollouts and updates that never wait for each other but for the bound on staleness."""
