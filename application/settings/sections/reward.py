"""The section `reward`: what a reply is worth."""

from enum import StrEnum

from attrs import define

from rollgrad.application.settings.function_path import FunctionPath, several
from rollgrad.application.settings.sections.cluster import IN_CLUSTER
from rollgrad.domain.algorithms.shaping_settings import ShapingSettings
from rollgrad.domain.settings import COUNT, INTERVAL, POSITIVE, Condition, own_first, setting


class Verifier(StrEnum):
    """Built-in verifiable rewards."""

    LAST_NUMBER = "last_number"
    EXACT_MATCH = "exact_match"
    MATH = "math"
    FORMAT = "format"


class StepReward(StrEnum):
    """Ways from the probabilities that steps are right to one reward."""

    MIN = "min"
    PRODUCT = "product"
    LAST = "last"
    MEAN = "mean"


class JudgeIsolation(StrEnum):
    """Isolation of judges, if parsing a reply could run it."""

    SANDBOX = "sandbox"
    """No network, no file but installed packages, no environment; Linux namespaces, or else Landlock."""
    NONE = "none"
    """Limits on memory and time alone: a reply that runs as code may do what you may do."""


REWARD_TOKENS = 16384
"""Tokens of a reward model's forward pass, padding included: some GiB of activations in a model of eight billion."""


BY_MODEL = Condition(
    lambda here, run: here.model_name_or_path is not None,
    "there is no reward model",
    "set --reward.model_name_or_path",
)
BY_SERVER = Condition(
    lambda here, run: here.remote_url is not None, "there is no reward server", "set --reward.remote_url"
)
BY_JUDGE = Condition(lambda here, run: here.judge_url is not None, "no language model judges", "set --reward.judge_url")
BY_FORMAT = Condition(
    lambda here, run: here.verifier is Verifier.FORMAT,
    "only the format verifier reads it",
    "set --reward.verifier to format",
)


@define(kw_only=True, field_transformer=own_first)
class RewardConfig(ShapingSettings):
    """Rewards of replies."""

    function_path: str | None = setting(
        None,
        "Python file, or module (my_lib.rewards), with a function reward_func or compute_score, or FILE:NAME; several "
        "separated by commas are summed. It gets what its parameters are called: queries, prompts, completions, "
        "labels, messages, tokens, metadata, step, any column of the row: docs/rewards.md.",
    )
    model_name_or_path: str | None = setting(
        None,
        "Reward model that scores prompt and reply: Hugging Face name or directory of a sequence classifier with one "
        "label, or of a process reward model of `train prm`.",
    )
    step_reward: StepReward = setting(
        StepReward.MIN,
        "Reward of a reply from a process reward model's probabilities that its steps are right: their min, product or "
        "mean, or the last.",
        only_if=BY_MODEL,
    )
    step_separator: str = setting(
        "\n",
        "Text that ends a step, for a process reward model; as data.separator was when it was trained.",
        only_if=BY_MODEL,
    )
    num_nodes: int | None = setting(
        None,
        "Machines that hold the reward model, with cluster.enable; default: as many as the actor's.",
        COUNT,
        only_if=(IN_CLUSTER, BY_MODEL),
    )
    num_gpus_per_node: int | None = setting(
        None,
        "Processes on each of them, which divide the reward model as those of the reference do, or have it whole; "
        "default: as many as the actor's.",
        COUNT,
        only_if=(IN_CLUSTER, BY_MODEL),
    )
    offload: bool = setting(
        False,
        "Divide the reward model over its processes, in the CPU's memory: each layer is fetched when it computes.",
        only_if=(IN_CLUSTER, BY_MODEL),
    )
    remote_url: str | None = setting(
        None,
        "Reward server, POST {query, prompts, labels} -> {rewards, scores, extra_logs}; several separated by commas "
        "share the work. The environment variable ROLLGRAD_REWARD_TOKEN is sent as a bearer token.",
    )
    remote_batch_size: int = setting(64, "Replies sent to a reward server together, at most.", COUNT, only_if=BY_SERVER)
    failure_value: float | None = setting(
        None,
        "Reward of a reply that no reward server judged in time; none makes it a failed episode (see "
        "rollout.max_failures).",
        only_if=BY_SERVER,
    )
    judge_url: str | None = setting(
        None,
        "Language model that judges: base address of an OpenAI-compatible server, http://host:8000/v1; several "
        "separated by commas share the work. The environment variable ROLLGRAD_JUDGE_TOKEN is sent as a bearer "
        "token.",
    )
    judge_model: str | None = setting(None, "Name under which the judge's server knows the model.", only_if=BY_JUDGE)
    judge_prompt: str | None = setting(
        None,
        "Text file that asks the judge, with {prompt}, {response}, {query}, {label} and {column} of the row. The "
        "reward is the last number of the answer.",
        only_if=BY_JUDGE,
    )
    judge_range: tuple[float, float] | None = setting(
        None,
        "Lowest and highest number that counts as a judgement; another is a failed one. Default: any number counts.",
        INTERVAL,
        only_if=BY_JUDGE,
    )
    judge_rubric_key: str | None = setting(
        None,
        "Column with the criteria of a row: texts, or mappings with criterion and weight. The judge is asked about "
        "each by itself ({criterion} in the question). The reward is the sum of weight x judgement, which judge_range "
        "makes 0 to 1, over the sum of the positive weights.",
        only_if=BY_JUDGE,
    )
    verifier: Verifier | None = setting(
        None, "Built-in reward: last_number, exact_match, math (math-verify) or format."
    )
    majority_vote: bool = setting(
        False,
        "Give 1 to the replies whose answer most of a prompt's replies gave, and 0 to the others, in the place of the "
        "reward of training, so that it needs no labels (TTRL). A verifier finds the answers, or a reward function "
        "returns them.",
    )
    format_pattern: str | None = setting(
        None, "Regular expression that the whole reply must match, for the format verifier.", only_if=BY_FORMAT
    )
    isolation: JudgeIsolation = setting(
        JudgeIsolation.SANDBOX,
        "What the math and format verifiers and the scorers of reasoning_gym tasks run in: a sandbox without "
        "network, files or environment, or none, where a reply that a scorer runs as code may do all that you may "
        "do.",
    )
    timeout: float = setting(
        10.0,
        "Seconds one judgement may take: on a reward server all attempts together; of a reward model up to 64 "
        "replies that each of its processes scores together, their waiting not counted.",
        POSITIVE,
    )
    weights: dict[str, float] | None = setting(
        None,
        "Weight of each named reward, for functions that return several, for several functions, and for several kinds "
        "of rewards (which it takes): name weight name weight; default: 1 each.",
    )

    @property
    def sources(self) -> list[tuple[str, str]]:
        """The rewards that are set: for each the setting that sets it, and the name that its weight has."""
        verifier = [] if self.verifier is None else [("verifier", str(self.verifier))]
        functions = [("function_path", FunctionPath.parse(path).part) for path in several(self.function_path)]
        named = {"model_name_or_path": "model", "remote_url": "server", "judge_url": "judge"}
        others = [(key, name) for key, name in named.items() if getattr(self, key) is not None]
        return [*functions, *others, *verifier]
