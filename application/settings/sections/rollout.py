"""The section `rollout`: how episodes are sampled."""

from enum import StrEnum

from attrs import define

from rollgrad.domain.settings import COUNT, NOT_NEGATIVE, POSITIVE, SOME_SHARE, Condition, Range, setting


class Engine(StrEnum):
    """Engine that samples."""

    EMBEDDED = "embedded"
    """In this process, from the trained model itself where nothing samples during an update."""
    VLLM = "vllm"
    """vLLM, in processes of its own: pip install rollgrad[vllm]."""
    SERVER = "server"
    """Servers that are there already (`vllm serve`), by their URLs."""


class ServerSync(StrEnum):
    """Way of weights from the trainer to servers."""

    SHARED_MEMORY = "shared_memory"
    """Through the memory of the machine, which is the trainer's."""
    DISK = "disk"
    """Through files below ckpt.output_dir, on a file system that all machines share."""


OF_SERVERS = Condition(
    lambda here, run: here.engine is Engine.SERVER, "rollout.engine is {here.engine}", "set --rollout.engine server"
)


OF_VLLM = Condition(
    lambda here, run: here.engine is Engine.VLLM, "rollout.engine is {here.engine}", "set --rollout.engine vllm"
)


@define(kw_only=True)
class RolloutConfig:
    """Sampling of episodes."""

    batch_size: int = setting(128, "Prompts per rollout.", COUNT)
    n_samples_per_prompt: int = setting(1, "Samples of each prompt: one group.", COUNT)
    generate_batch_size: int | None = setting(
        None,
        "Groups in flight at once; default: batch_size. With more (over-sampling) a rollout keeps what it does not "
        "need for the next one, where it is one update old, which algo.correction corrects. With train.async_enable "
        "the default, and the most, is all that the bound on staleness lets through.",
        COUNT,
    )
    temperature: float = setting(
        1.0,
        "Sampling temperature, also used in training log-probs.",
        Range(lambda value: value > 0, "greater than 0, for greedy samples carry no probability to learn from"),
    )
    top_p: float = setting(1.0, "Nucleus mass; 1 is the full distribution.", SOME_SHARE)
    top_k: int = setting(0, "Most likely tokens kept; 0 keeps all.", NOT_NEGATIVE)
    max_new_tokens: int = setting(1024, "Sampled tokens per reply.", COUNT)
    max_turns: int = setting(8, "Turns after which an episode in an environment counts as truncated.", COUNT)
    max_episode_tokens: int | None = setting(
        None,
        "Tokens of an episode in an environment, prompt and observations included; default: the model's positions.",
        COUNT,
    )
    max_episode_seconds: float | None = setting(
        None,
        "Wall clock of an episode in an environment, after which it counts as truncated; none sets no limit.",
        POSITIVE,
    )
    stop_strings: tuple[str, ...] = setting(
        (), "Texts that end a reply, besides the model's own end token.", Range(all, "texts that are not empty")
    )
    max_concurrent: int = setting(4096, "Episodes in flight at once.", COUNT)
    adaptive_concurrency: bool = setting(
        False,
        "Adapt the episodes in flight to the memory of vLLM's engines: fewer while engines give up keys and values of "
        "earlier turns, which later turns then compute again; more, up to rollout.max_concurrent, while they keep "
        "them.",
        only_if=OF_VLLM,
    )
    max_failures: int | None = setting(
        None,
        "Failed episodes tolerated per rollout (with train.async_enable from update to update), each named on the "
        "console; one more ends the run. Default: 5 % of a rollout's episodes.",
        NOT_NEGATIVE,
    )
    engine: Engine = setting(
        Engine.EMBEDDED,
        "What samples: this process, vllm in processes of its own (pip install rollgrad[vllm]), or a server that is "
        "there already.",
    )
    server_urls: tuple[str, ...] = setting(
        (),
        "Addresses of rollout.engine server, which share the prompts: http://host:port each, as `vllm serve` "
        "listens. The environment variable ROLLGRAD_ENGINE_TOKEN is sent as a bearer token.",
        only_if=OF_SERVERS,
    )
    server_sync: ServerSync = setting(
        ServerSync.SHARED_MEMORY,
        "How weights reach the servers: shared_memory to those on this machine, or disk, through files below "
        "ckpt.output_dir, which their machines have at the same path.",
        only_if=OF_SERVERS,
    )
    server_sync_delta: bool = setting(
        False,
        "Send the servers what changed in the weights since the last transfer; as vllm.sync_delta.",
        only_if=OF_SERVERS,
    )
    max_batch_size: int | None = setting(
        None,
        "Sequences decoded together by the engine; requests in flight at each server. Default: 128, but vLLM decodes "
        "as many on a GPU as it finds best there (1024 on an H100).",
        COUNT,
    )
