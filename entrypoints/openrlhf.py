"""From an OpenRLHF command line to rollgrad's settings: `translate(argv)`.

Flags with a counterpart of the same meaning, and those without one, stand in `entrypoints.openrlhf_flags`; here are the
ones that depend on each other. OpenRLHF's defaults are applied, for they differ from ours. Importable without torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from attrs import Factory, define, frozen

from rollgrad.application.config import RLConfig
from rollgrad.application.validation import validate
from rollgrad.domain.catalogue import ESTIMATORS, EstimatorTraits
from rollgrad.domain.errors import ConfigurationError
from rollgrad.entrypoints.config_io import dump_config, structure_config
from rollgrad.entrypoints.openrlhf_flags import FLAGS, REWARD_MODEL
from rollgrad.entrypoints.openrlhf_words import Given, command_flags, options, parse, read_values

USAGE = """usage: rollgrad openrlhf [--run] COMMAND...

Translates an OpenRLHF command (python3 -m openrlhf.cli.train_ppo_ray --flag value ..., flat or dotted flags, ray job
submit and deepspeed included) to settings, and prints those that differ from the defaults as YAML for
rollgrad train rl --config. What has no counterpart, or not the same one, is listed on stderr.

  --run   train instead of printing
"""

SCHEDULERS = {
    "constant": ("constant", False, None),
    "constant_with_warmup": ("constant", True, None),
    "linear": ("linear", True, 0.0),
    "cosine": ("cosine_with_min_lr", True, 0.0),
}
"""Hugging Face's name: ours, whether it warms up, and its floor if it is fixed. Others are cosine_with_min_lr."""

CORRECTIONS = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("geometric", "mask")}
"""OpenRLHF's type: level and mode here."""

PROMPT_TOKENS = 1024
"""OpenRLHF's limit of prompts and of replies, where none is set."""

HTTP_TIMEOUT = 180.0
"""Seconds that OpenRLHF waits for a reward server."""


@frozen
class Translation:
    """`settings`: nested, for `structure_config`. `notes`: one line for each flag that has no counterpart, or one that
    is not identical."""

    settings: dict[str, Any]
    notes: list[str]


def translate(argv: Sequence[str]) -> Translation:
    """Translates an OpenRLHF command.

    Raises:
        ConfigurationError: it is not a `train_ppo_ray` command, or a flag or a value is none of OpenRLHF's.
    """
    return _Translator(options(parse(command_flags(argv)))).translate()


def changed_settings(config: RLConfig) -> str:
    """The settings that differ from the defaults, as YAML."""
    changed = _difference(yaml.safe_load(dump_config(config)), yaml.safe_load(dump_config(RLConfig())))
    text: str = yaml.safe_dump(changed, sort_keys=False)
    return text


def check(config: RLConfig) -> str | None:
    """Why `rollgrad train rl` would refuse the configuration, if it would."""
    try:
        validate(config)
    except ConfigurationError as error:
        return str(error)
    return None


def _difference(values: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        if value != default[key]:
            section = isinstance(value, dict) and isinstance(default[key], dict)
            result[key] = _difference(value, default[key]) if section else value
    return result


@define
class _Translator:
    options: dict[str, Given]
    settings: dict[str, Any] = Factory(dict)
    lost: list[str] = Factory(list)
    changed: list[str] = Factory(list)

    def translate(self) -> Translation:
        for name, given in self.options.items():
            flag = FLAGS[name]
            value = read_values(flag, given)
            if flag.reason is not None and value is not False and given.values not in [(idle,) for idle in flag.idle]:
                self.lose(name, flag.reason)
        for name, flag in FLAGS.items():
            if flag.to is not None and name in self.options and not name.startswith("critic."):
                self.set(flag.to, self.value(name))
        self.set("ckpt.output_dir", self.value("ckpt.output_dir", "./ckpt"))
        self.advantages()
        self.kl()
        self.policy_loss()
        self.critic()
        self.schedule("actor")
        self.correction()
        self.batches()
        self.lengths()
        self.reward()
        self.data()
        self.evaluation()
        lost = [f"not honoured: {line}" for line in dict.fromkeys(self.lost)]
        return Translation(self.settings, [*lost, *(f"not identical: {line}" for line in dict.fromkeys(self.changed))])

    # What was given, and what becomes of it.

    def value(self, name: str, default: Any = None) -> Any:
        given = self.options.get(name)
        return default if given is None else read_values(FLAGS[name], given)

    def set(self, name: str, value: Any) -> None:
        *sections, key = name.split(".")
        branch = self.settings
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[key] = value

    def lose(self, name: str, reason: str) -> None:
        """Notes that a flag has no effect, if it was given."""
        if name in self.options:
            self.lost.append(f"{self.options[name]}: {reason}")

    def change(self, name: str, difference: str) -> None:
        """Notes that a flag means something else here, if it was given."""
        if name in self.options:
            self.changed.append(f"{self.options[name]}: {difference}")

    @property
    def estimator(self) -> str:
        return str(self.value("algo.advantage.estimator", "gae"))

    @property
    def traits(self) -> EstimatorTraits:
        return ESTIMATORS.get(self.estimator, EstimatorTraits())

    # The algorithm.

    def advantages(self) -> None:
        for key in ("gamma", "lambd"):
            value = self.value(f"algo.advantage.{key}", 1.0)
            if key in self.traits.uses:
                self.set(f"algo.advantage.{key}", value)
            elif value != 1:
                self.lose(f"algo.advantage.{key}", f"{self.estimator} does not use it, in OpenRLHF neither")
        if self.value("algo.advantage.no_std_norm", False):
            if self.traits.whiten == "none":
                self.lose("algo.advantage.no_std_norm", f"{self.estimator} does not whiten, in OpenRLHF neither")
            else:
                self.set("algo.advantage.no_std_norm", True)
        self.filtering()

    def filtering(self) -> None:
        if self.value("algo.dynamic_filtering_enable", False):
            self.set("algo.dynamic_filtering_enable", True)
            self.set("algo.dynamic_filtering_range", self.value("algo.dynamic_filtering_range", [0.0, 1.0]))
        else:
            self.lose("algo.dynamic_filtering_range", "no group is filtered without --dynamic_filtering")

    def kl(self) -> None:
        coef = self.value("algo.kl.init_coef", 0.01)
        self.set("algo.kl.init_coef", coef)
        if coef == 0:
            for key in ("estimator", "use_loss", "target", "horizon"):
                self.lose(f"algo.kl.{key}", "a KL weight of 0 turns KL off")
            return
        use_loss = self.value("algo.kl.use_loss", False)
        estimator = self.value("algo.kl.estimator", "k1")
        if use_loss and estimator == "k1":
            estimator = "k2"
            self.change("algo.kl.use_loss", "the estimator becomes k2, for the gradient of k1 is zero on average")
        self.set("algo.kl.use_loss", use_loss)
        self.set("algo.kl.estimator", estimator)
        target = self.value("algo.kl.target")
        if target is None:
            self.lose("algo.kl.horizon", "the KL weight is fixed without --kl_target")
            return
        self.set("algo.kl.target", target)
        self.set("algo.kl.horizon", self.value("algo.kl.horizon", 10000.0))

    def policy_loss(self) -> None:
        loss = self.value("actor.policy_loss_type", "ppo")
        self.set("actor.policy_loss_type", loss)
        eps, eps_low_high = self.value("actor.eps_clip", 0.2), self.value("actor.eps_clip_low_high")
        if eps_low_high is not None:
            self.set("actor.eps_clip_low_high", eps_low_high)
            self.lose("actor.eps_clip", "--eps_clip_low_high replaces it")
        elif loss != "ppo" or eps != 0.2:  # OpenRLHF has one default for all losses
            self.set("actor.eps_clip", eps)
        if loss == "ppo":
            self.set("actor.dual_clip", self.value("actor.dual_clip"))
        else:
            self.lose("actor.dual_clip", f"the {loss} loss has no bound for negative advantages")

    def critic(self) -> None:
        if "critic" not in self.traits.needs:
            for name in self.options:
                shared = self.options.get(name.replace("critic.", "actor.", 1)) is self.options[name]
                if name.startswith("critic.") and FLAGS[name].reason is None and not shared:
                    self.lose(name, f"{self.estimator} has no critic, in OpenRLHF neither")
            return
        for name, flag in FLAGS.items():
            if flag.to is not None and name in self.options and name.startswith("critic."):
                self.set(flag.to, self.value(name))
        outside = {"reward.remote_url", "train.agent_func_path"} & set(self.options)
        start = None if outside else self.value("reward.model_name_or_path")
        self.set("critic.model_name_or_path", self.value("critic.model_name_or_path", start and start.split(",")[0]))
        frozen_steps = self.value("critic.freezing_steps", -1)
        if frozen_steps >= 0:
            self.set("critic.freezing_steps", frozen_steps + 1)
            self.change("critic.freezing_steps", f"{frozen_steps + 1} rollouts, since OpenRLHF counts from 0")
        self.schedule("critic")

    def schedule(self, model: str) -> None:
        kind = self.value(f"{model}.lr_scheduler", "cosine_with_min_lr")
        if kind != "cosine_with_min_lr" and kind not in SCHEDULERS:
            self.change(f"{model}.lr_scheduler", "cosine_with_min_lr takes its place")
        ours, warms_up, floor = SCHEDULERS.get(kind, ("cosine_with_min_lr", True, None))
        self.set(f"{model}.lr_scheduler", ours)
        if warms_up:
            self.set(f"{model}.lr_warmup_ratio", self.value(f"{model}.lr_warmup_ratio", 0.03))
        else:
            self.lose(f"{model}.lr_warmup_ratio", f"the {kind} schedule does not warm up, in OpenRLHF neither")
        if kind in SCHEDULERS:
            self.lose(f"{model}.min_lr_ratio", f"the {kind} schedule has no such floor, in OpenRLHF neither")
        if ours != "constant":
            self.set(f"{model}.min_lr_ratio", self.value(f"{model}.min_lr_ratio", 0.1) if floor is None else floor)

    def correction(self) -> None:
        prefix = "algo.advantage.is_correction"
        if not self.value(f"{prefix}_enable", False):
            for key in ("threshold", "type"):
                self.lose(f"{prefix}_{key}", "no correction is made without --enable_vllm_is_correction")
            return
        if self.value("actor.policy_loss_type", "ppo") != "ppo":  # the ratio itself is against the rollout's log-probs
            self.set("algo.old_logprobs", "rollout")
            for key in ("threshold", "type"):
                self.lose(f"{prefix}_{key}", "gspo takes its ratio against the rollout instead, as in OpenRLHF")
            return
        kind = self.value(f"{prefix}_type", "tis")
        if kind not in CORRECTIONS:
            given = self.options[f"{prefix}_type"]
            raise ConfigurationError(f"{given} is none of {', '.join(CORRECTIONS)}: change {given.flag}.")
        bounds = self.value(f"{prefix}_threshold", [0.5, 5.0])
        level, mode = CORRECTIONS[kind]
        if len(bounds) == 1:
            mode = "truncate" if mode == "clip" else mode
            bounds = [0.0, *bounds]
        self.set("algo.correction.level", level)
        self.set("algo.correction.mode", mode)
        if mode != "truncate":
            self.set("algo.correction.low", bounds[0])
        self.set("algo.correction.high", bounds[1])

    # Batches and lengths.

    def batches(self) -> None:
        prompts, samples = self.value("rollout.batch_size", 1024), self.value("rollout.n_samples_per_prompt", 1)
        self.set("rollout.batch_size", prompts)
        self.set("rollout.n_samples_per_prompt", samples)
        batch = self.value("train.batch_size", 128)
        if batch > prompts * samples:
            self.change("train.batch_size", f"{prompts * samples}, for a rollout has no more samples")
            batch = prompts * samples
        self.set("train.batch_size", batch)
        if self.value("train.dynamic_batch_enable", False):
            self.set("train.max_tokens_per_micro_batch", self.value("train.max_tokens_per_gpu", 16192))
        else:
            self.lose("train.max_tokens_per_gpu", "OpenRLHF reads it with --use_dynamic_batch only")
        self.overlap(prompts)

    def overlap(self, prompts: int) -> None:
        """How rollouts overlap with each other and with training."""
        in_flight = self.value("rollout.vllm_generate_batch_size", prompts)
        corrects = self.value("algo.advantage.is_correction_enable", False)
        overlaps = self.value("train.async_enable", False)
        if overlaps:
            ahead = self.value("train.async_queue_size", 1)
            self.set("train.async_enable", True)
            self.set("train.max_staleness", ahead)
            if self.value("train.partial_rollout_enable", False):
                self.set("train.partial_rollout", "keep")
            self.change("train.async_enable", "an update waits for its own groups only, not for a whole batch")
            most = prompts * (ahead + 1)
            if in_flight > most:
                self.change("rollout.vllm_generate_batch_size", f"{most}, for no more can be trained on in time")
                in_flight = most
        else:
            for key in ("async_queue_size", "partial_rollout_enable"):
                self.lose(f"train.{key}", "OpenRLHF reads it with --async_train only")
        if in_flight > prompts and overlaps:
            self.set("rollout.generate_batch_size", in_flight)
        elif in_flight > prompts and corrects:
            self.set("rollout.generate_batch_size", in_flight)
            self.change("rollout.vllm_generate_batch_size", "a rollout does not wait for the groups that it can spare")
        elif in_flight != prompts:
            needs = "over-sampling needs --enable_vllm_is_correction" if in_flight > prompts else "a rollout needs more"
            self.lose("rollout.vllm_generate_batch_size", needs)

    def lengths(self) -> None:
        total = self.value("data.max_len")
        prompt, reply = self.value("data.prompt_max_len"), self.value("rollout.max_new_tokens")
        if total is not None and (prompt is None or reply is None):
            if prompt is None:
                prompt = min(PROMPT_TOKENS, max(1, total // 2)) if reply is None else max(1, total - reply)
            reply = max(1, total - prompt) if reply is None else reply
            self.change(
                "data.max_len",
                f"the budget that prompt and reply share is split: {prompt} tokens for the prompt, {reply} for the "
                "reply",
            )
        elif total is not None:
            self.lose("data.max_len", "prompt and reply have their own limits")
        self.set("data.max_prompt_tokens", PROMPT_TOKENS if prompt is None else prompt)
        self.set("rollout.max_new_tokens", PROMPT_TOKENS if reply is None else reply)
        self.change("data.prompt_max_len", "a longer prompt is an error here, while OpenRLHF cuts it")

    # Rewards, data and evaluation.

    def reward(self) -> None:
        url = self.value("reward.remote_url")
        if url is not None and url.endswith(".py"):
            self.set("reward.function_path", url)
        elif url is not None:
            self.set("reward.remote_url", url)
            self.set("reward.timeout", HTTP_TIMEOUT)
            self.change(
                "reward.remote_url", "replies are sent in batches of reward.remote_batch_size, in OpenRLHF one by one"
            )
        self.lose("reward.model_name_or_path", REWARD_MODEL if url is None else "--remote_rm_url replaces it")
        if self.value("reward.normalize_enable", False):
            self.lose(
                "reward.normalize_enable",
                "it means the moments that a reward model keeps: for a function set reward.normalize"
                if url is None
                else "OpenRLHF too does so for reward models only",
            )
        self.set("reward.clip_range", self.value("reward.clip_range", [-10.0, 10.0]))
        if "group" in self.traits.needs:
            self.change("reward.clip_range", "rewards are clipped before the group's baseline, in OpenRLHF after it")
        if self.value("reward.overlong_buffer_len") is None:
            self.lose("reward.overlong_penalty_factor", "there is no length penalty without --overlong_buffer_len")
        else:
            self.set("reward.overlong_penalty_factor", self.value("reward.overlong_penalty_factor", 1.0))

    def data(self) -> None:
        chat, template = self.value("data.apply_chat_template", False), self.value("data.input_template")
        self.set("data.apply_chat_template", chat)
        if template is not None:
            if chat:
                self.lose("data.input_template", "the chat template is on, which counts more, in OpenRLHF too")
            elif "{}" not in template:
                self.lose("data.input_template", "it has no {} where the prompt goes; OpenRLHF ignores it too")
            else:
                self.set("data.input_template", template)
        if "data.max_samples" in self.options:
            self.set("data.max_samples", self.value("data.max_samples"))
        dtype = self.value("ds.param_dtype")
        if dtype == "bf16":
            self.set("actor.dtype", "bfloat16")
        else:
            self.change("ds.param_dtype", "bfloat16 where the hardware multiplies it natively, else float32")

    def evaluation(self) -> None:
        dataset = self.value("eval.dataset")
        if not dataset:
            for key in ("split", "temperature", "n_samples_per_prompt", "steps"):
                if key != "steps" or self.value("eval.steps", -1) != -1:
                    self.lose(f"eval.{key}", "there is nothing to evaluate on without --eval_dataset")
            return
        steps, temperature = self.value("eval.steps", -1), self.value("eval.temperature", 0.6)
        samples = self.value("eval.n_samples_per_prompt", 4)
        if temperature == 0 and samples > 1:
            self.change("eval.temperature", "one sample of each prompt, for greedy samples are all alike")
            samples = 1
        if steps == -1:
            self.change("eval.dataset", "evaluates before and after training, in OpenRLHF never without --eval_steps")
        else:
            self.change("eval.steps", "evaluates before and after training as well")
        for key, value in {
            "dataset": dataset,
            "split": self.value("eval.split", "train"),
            "steps": steps,
            "temperature": temperature,
            "n_samples_per_prompt": samples,
            "max_samples": self.value("data.max_samples"),
        }.items():
            self.set(f"eval.{key}", value)


def translated_config(argv: Sequence[str]) -> tuple[RLConfig, list[str]]:
    """The configuration of an OpenRLHF command, and what to tell about it.

    Raises:
        ConfigurationError: see `translate`.
    """
    translation = translate(argv)
    return structure_config(translation.settings), translation.notes
