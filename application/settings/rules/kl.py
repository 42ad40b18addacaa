"""Rules of the KL term and of the reference that it is measured from. See `validation`."""

from collections.abc import Iterator

from rollgrad.application.settings.moving_reference import moving_problems
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.ref import served_problems
from rollgrad.domain.algorithms.catalogue import check_kl_estimator
from rollgrad.domain.algorithms.settings import KLAgainst, KLEstimator, KLSettings


def kl_problems(config: RLConfig) -> Iterator[str]:
    """Yields the problems of the KL term."""
    kl = config.algo.kl
    if kl.init_coef == 0 and config.ref.model_name_or_path is not None:
        yield (
            f"ref.model_name_or_path is {config.ref.model_name_or_path!r}, but algo.kl.init_coef is 0, which turns KL "
            "off: set --algo.kl.init_coef above 0, or leave --ref.model_name_or_path out."
        )
    if config.ref.offload and config.cluster.enable and (kl.init_coef == 0 or kl.against is KLAgainst.ROLLOUT):
        yield (
            f"ref.offload is on, but with algo.kl.init_coef {kl.init_coef:g} and algo.kl.against {kl.against} there is "
            "no reference: leave --ref.offload out, or set --algo.kl.init_coef above 0 and --algo.kl.against to "
            "reference."
        )
    if config.ref.served:
        yield from _served_problems(config)
    if kl.init_coef > 0 and kl.ref_sync_steps is not None:
        yield from moving_problems(config, "algo.kl", kl.ref_sync_steps)
        yield from _moving_problems(config)
    if kl.use_loss and kl.estimator == KLEstimator.K1:
        yield (
            "algo.kl.use_loss is on with algo.kl.estimator k1, whose gradient is zero on average: set "
            "--algo.kl.estimator to k2, k3, k3_unbiased, abs or full."
        )
    if kl.estimator == KLEstimator.FULL:
        yield from _whole_kl_problems(config)
    if kl.estimator == KLEstimator.K3_UNBIASED and not kl.use_loss:
        yield (
            "algo.kl.estimator is k3_unbiased, which weighs a loss by the importance ratio, but KL is in the reward: "
            "turn on --algo.kl.use_loss, or set --algo.kl.estimator to k1, k2, k3 or abs."
        )
    if kl.against is KLAgainst.ROLLOUT:
        if not kl.use_loss:
            yield (
                "algo.kl.against is rollout, but KL is in the reward, where the policy that sampled is the policy "
                "itself: turn on --algo.kl.use_loss."
            )
        if config.ref.model_name_or_path is not None:
            yield (
                f"ref.model_name_or_path is {config.ref.model_name_or_path!r}, but algo.kl.against is rollout, which "
                "needs no reference: leave --ref.model_name_or_path out, or set --algo.kl.against to reference."
            )
    check_kl_estimator(kl.estimator)  # last, as it raises


def teacher_problems(config: RLConfig, *, has_environment: bool) -> Iterator[str]:
    """Yields the problems of a reference that reads another prompt than the policy."""
    kl = config.algo.kl
    if kl.teacher_template is None:
        return
    if has_environment or config.agent.plays:
        yield (
            "algo.kl.teacher_template replaces the prompt of single replies, but episodes have several turns here: "
            "leave --algo.kl.teacher_template out."
        )
    if config.data.image_key is not None:
        yield (
            f"algo.kl.teacher_template is a text, but prompts have images (data.image_key is "
            f"{config.data.image_key!r}): leave --algo.kl.teacher_template or --data.image_key out."
        )
    if kl.against is KLAgainst.ROLLOUT:
        yield (
            "algo.kl.teacher_template is what a reference reads, but algo.kl.against is rollout, which has none: set "
            "--algo.kl.against to reference, or leave --algo.kl.teacher_template out."
        )
    if _compares(kl) and config.cluster.enable and config.ds.sequence_parallel_size > 1:
        yield (
            f"algo.kl.teacher_template with algo.kl.estimator full and ds.sequence_parallel_size "
            f"{config.ds.sequence_parallel_size}: processes that share a sequence share it at other places where its "
            "prompt is another. Set --algo.kl.top_k (64, say), leave --ds.sequence_parallel_size out, or set "
            "--algo.kl.estimator to k1, k2 or k3."
        )


def _served_problems(config: RLConfig) -> Iterator[str]:
    """Yields what references on servers do not go with."""
    kl, ref = config.algo.kl, config.ref
    flag = "ref.url" if ref.urls is None else "ref.urls"
    known = f"{flag} is {getattr(ref, flag.removeprefix('ref.'))!r}, but "
    yield from served_problems("ref", ref.url, ref.urls)
    if kl.init_coef == 0 or kl.against is KLAgainst.ROLLOUT:
        yield (
            f"{known}with algo.kl.init_coef {kl.init_coef:g} and algo.kl.against {kl.against} there is no reference: "
            f"leave --{flag} out, or set --algo.kl.init_coef above 0 and --algo.kl.against to reference."
        )
    if kl.ref_sync_steps is not None:
        yield (
            f"{known}algo.kl.ref_sync_steps is {kl.ref_sync_steps}, and a server's model does not move: leave "
            f"--{flag} out, or set --algo.kl.ref_sync_steps None."
        )
    if _compares(kl):
        yield (
            f"{known}algo.kl.estimator is full, and a server tells its most likely tokens alone: set --algo.kl.top_k "
            "(20, say, the most that vLLM gives unless started with --max-logprobs)."
        )
    if config.rollout.temperature != 1:
        yield (
            f"{known}rollout.temperature is {config.rollout.temperature:g}, and of a server's model only the "
            f"probabilities at temperature 1 are known: leave --rollout.temperature or --{flag} out."
        )
    if config.data.image_key is not None:
        yield (
            f"{known}data.image_key is {config.data.image_key!r}, and a server is sent no images: leave --{flag} or "
            "--data.image_key out."
        )
    if config.cluster.enable and (ref.num_nodes, ref.num_gpus_per_node, ref.offload) != (None, None, False):
        yield (
            f"{known}ref.num_nodes, ref.num_gpus_per_node or ref.offload is set, which are of processes of its own: "
            f"leave --{flag} out, or --ref.num_nodes, --ref.num_gpus_per_node and --ref.offload."
        )


def _moving_problems(config: RLConfig) -> Iterator[str]:
    """Yields the settings that exclude a reference that moves."""
    kl, ref = config.algo.kl, config.ref
    known = f"algo.kl.ref_sync_steps is {kl.ref_sync_steps}, but "
    if kl.against is KLAgainst.ROLLOUT:
        yield (
            f"{known}algo.kl.against is rollout, which needs no reference: set --algo.kl.against to reference, or "
            "leave --algo.kl.ref_sync_steps out."
        )
    if _compares(kl):
        yield (
            f"{known}algo.kl.estimator is full without algo.kl.top_k, which compares with a reference that stays: set "
            "--algo.kl.top_k (64, say), set --algo.kl.estimator to k1, k2 or k3, or leave --algo.kl.ref_sync_steps out."
        )
    if config.cluster.enable and (ref.num_nodes, ref.num_gpus_per_node, ref.offload) != (None, None, False):
        yield (
            f"{known}ref.num_nodes, ref.num_gpus_per_node or ref.offload is set, and a reference that moves is in the "
            "policy's processes: leave --ref.num_nodes, --ref.num_gpus_per_node and --ref.offload out."
        )


def _whole_kl_problems(config: RLConfig) -> Iterator[str]:
    kl = config.algo.kl
    if not kl.use_loss:
        yield (
            "algo.kl.estimator is full, whose gradient is that of the divergence, but KL is in the reward: turn on "
            "--algo.kl.use_loss, or set --algo.kl.estimator to k1, k2, k3 or abs."
        )
    if kl.against is KLAgainst.ROLLOUT:
        yield (
            "algo.kl.estimator is full, but of the policy that sampled (algo.kl.against rollout) only the sampled "
            "tokens' log-probs are kept: set --algo.kl.against to reference, or --algo.kl.estimator to k2 or k3."
        )
    if not _compares(kl) or not config.cluster.enable:
        return
    if (config.ref.num_nodes, config.ref.num_gpus_per_node) != (None, None):
        yield (
            "ref.num_nodes or ref.num_gpus_per_node is set, but with algo.kl.estimator full and without algo.kl.top_k "
            "the reference is in the policy's processes: set --algo.kl.top_k (64, say), or leave --ref.num_nodes and "
            "--ref.num_gpus_per_node out."
        )
    if config.ref.offload:
        yield (
            "ref.offload is on, but with algo.kl.estimator full and without algo.kl.top_k the reference is whole in "
            "the policy's processes: set --algo.kl.top_k (64, say), leave --ref.offload out, or set "
            "--algo.kl.estimator to k2 or k3."
        )


def _compares(kl: KLSettings) -> bool:
    """Returns whether updates compare the policy with the reference itself over the vocabulary, beside it."""
    return kl.estimator == KLEstimator.FULL and kl.top_k is None
