"""The real model learns in every arrangement of processes.

`python benchmarks/cluster_learns.py [NAME ...] [--steps 8] [--smoke]`: each run trains SmolLM2 on
`examples/sums_cluster.yaml` (Ray, two training processes under DeepSpeed's ZeRO-3, vLLM) with the changes named below.
The table has its held-out accuracy before and after, the mean reward of each rollout, and how long the weights of an
update were on their way to the engine (median). Not a race: times are of this machine with whatever else runs on it.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

import rollgrad
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.train import PartialRollout
from rollgrad.domain.algorithms.settings import CorrectionLevel

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
from smollm2 import unpack_smollm2  # noqa: E402

from benchmarks.smoke import HELP, REPLY_TOKENS, shrink, smoke_model  # noqa: E402
from benchmarks.sums_reward_model import train_reward_model  # noqa: E402


def colocated(config: RLConfig) -> None:
    """Synchronous; actor and engine share what there is, and take turns."""
    config.train.colocate_all = True


def asynchronous(config: RLConfig) -> None:
    """Rollouts while models train, one update old."""
    config.train.async_enable = True


def partial_rollout(config: RLConfig) -> None:
    """Asynchronous, with replies that go on under new weights, up to two updates old, corrected."""
    asynchronous(config)
    config.train.max_staleness, config.train.partial_rollout = 2, PartialRollout.KEEP
    config.algo.correction.level = CorrectionLevel.TOKEN


def ppo(config: RLConfig) -> None:
    """A critic and a reference in processes of their own."""
    config.algo.advantage.estimator = "gae"
    config.algo.kl.init_coef = 0.001
    config.critic.adam.lr = 1e-4
    config.critic.num_gpus_per_node = config.ref.num_gpus_per_node = 1


def ppo_reward_model(config: RLConfig) -> None:
    """PPO, judged by a reward model that learnt sums from right and wrong replies, and that the critic starts
    from. The table has what replies are really worth; no rule of the task has a part in the training."""
    ppo(config)
    model = ROOT / "runs" / "sums_reward_model"
    if not model.exists():
        train_reward_model(config.actor.model_name_or_path, model)
    config.critic.model_name_or_path = config.reward.model_name_or_path = str(model)
    config.reward.num_gpus_per_node = 1
    config.reward.verifier, config.eval.dataset = None, None
    config.reward.timeout, config.reward.pass_threshold = 300.0, 0.0
    config.train.colocate_critic_reward = True
    config.train.max_tokens_per_micro_batch = 1024  # six processes with models share one machine's memory


def accuracy(model: Path | str) -> float:
    """Accuracy of greedy replies to the held-out sums, by the task's own rule."""
    config = rollgrad.load_config(ROOT / "examples" / "sums.yaml")
    config.actor.model_name_or_path = str(model)
    config.rollout.max_new_tokens = REPLY_TOKENS
    return rollgrad.evaluate(config)["eval/pass@1"]


def held_out(config: RLConfig, result: rollgrad.TrainResult) -> tuple[float, float]:
    """Accuracy before and after, always by the task's own rule."""
    if result.after:
        return result.before["eval/pass@1"], result.after["eval/pass@1"]
    return accuracy(config.actor.model_name_or_path), accuracy(result.model)


def lora(config: RLConfig) -> None:
    """Adapters of rank 32 in place of the weights."""
    config.actor.lora.rank = 32
    config.actor.adam.lr = 5e-4


def qlora(config: RLConfig) -> None:
    """Adapters beside weights in 4 bits, and a reference that has them too; ZeRO-2."""
    lora(config)
    config.actor.lora.load_in_4bit, config.ds.zero_stage = True, 2
    config.algo.kl.init_coef = 0.001


RUNS: dict[str, Callable[[RLConfig], None]] = {
    run.__name__: run for run in (colocated, asynchronous, partial_rollout, ppo, ppo_reward_model, lora, qlora)
}


def compare(names: list[str], steps: int, tiny: Path | None) -> None:
    """Trains all runs and prints the table; small runs if there is a tiny model."""
    table = Table("run", "before", "after", "mean reward of each rollout", "weights' way", "minutes")
    for name in names:
        config = rollgrad.load_config(ROOT / "examples" / "sums_cluster.yaml")
        config.eval.steps, config.rollout.max_new_tokens = -1, REPLY_TOKENS
        config.train.max_steps, config.logger.console = steps, False
        if tiny is not None:
            shrink(config, tiny)
        RUNS[name](config)
        started = time.monotonic()
        with TemporaryDirectory() as output:
            config.ckpt.output_dir = output
            result = rollgrad.train(config)
            lines = map(json.loads, (Path(output) / "metrics.jsonl").read_text().splitlines())
            trained = [line for line in lines if "reward/mean" in line]
            before, after = (f"{share:.0%}" for share in held_out(config, result))
        rewards = " ".join(f"{line['reward/mean']:.2f}" for line in trained)
        pushed = statistics.median(line["sync/bytes"] / 1e9 / line["sync/gb_per_s"] for line in trained)
        way = f"{trained[-1]['sync/bytes'] / 1e6:.0f} MB, {pushed:.1f} s"
        table.add_row(name, before, after, rewards, way, f"{(time.monotonic() - started) / 60:.1f}")
        print(name, before, after, rewards, way, sep=", ", file=sys.stderr)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RUNS)}; default: all")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--smoke", action="store_true", help=f"{HELP}; default: the first of them")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.steps, arguments.names = 1, arguments.names or list(RUNS)[:1]
    else:
        unpack_smollm2()
    with smoke_model() if arguments.smoke else nullcontext() as tiny:
        compare(arguments.names or list(RUNS), arguments.steps, tiny)


if __name__ == "__main__":
    main()
