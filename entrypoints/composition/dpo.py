"""The composition root of `rollgrad train dpo`."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch
from dependency_injector import providers

from rollgrad.adapters.checkpoints.fingerprint import Fingerprint, model_fingerprint
from rollgrad.adapters.checkpoints.score_files import ScoreFiles
from rollgrad.adapters.data.examples.preparation import PreparedExamples, PreparedPairs
from rollgrad.adapters.models.torch.loading import default_device, resolve_dtype
from rollgrad.application.learning.reference import check_start, with_reference
from rollgrad.application.settings.dpo import DPORun, has_reference
from rollgrad.application.settings.sections.ckpt import Resume
from rollgrad.domain.algorithms.losses.preference import PreferenceObjective
from rollgrad.domain.batches.examples import pack_preferences
from rollgrad.domain.episodes.examples import Preference
from rollgrad.domain.ports.example_source import ExampleSource
from rollgrad.domain.ports.models import PolicyModel, ReferenceModel
from rollgrad.entrypoints.composition.cluster import Cluster, Role
from rollgrad.entrypoints.composition.examples import (
    make_total_steps,
    reference_directory,
)
from rollgrad.entrypoints.composition.offline import OfflineContainer, make_roles, shares_of_pass, tokens_per_pass
from rollgrad.entrypoints.run_directory import continues

START_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Mean difference in nats of a token's log-prob that rounding makes between two passes of one model, at most: the same
pair in another micro-batch goes through other kernels."""


def make_dpo_roles(run: DPORun) -> dict[str, Role]:
    """Returns the processes of the models in a cluster: the reference has its own only if the actor cannot stand for
    it, as it does before it is trained."""
    roles = make_roles(run)
    apart = run.ref.model_name_or_path is not None or run.ckpt.resume is not Resume.NEVER
    return roles | ({"reference": roles["actor"]} if apart and has_reference(run.dpo) else {})


def reference_fingerprint(run: DPORun) -> Fingerprint:
    """Returns the fingerprint of the reference, of all its weights."""
    return model_fingerprint(run.ref.model_name_or_path or run.actor.model_name_or_path, whole=True)


def reference_key(run: DPORun, model: Fingerprint, fingerprint: str | None) -> str | None:
    """Returns what the log-probs of the reference `model` of the data with this fingerprint are kept under; None if the
    reference is no file of this machine, or the data have no fingerprint."""
    if model["weights"] is None or fingerprint is None:
        return None
    device = default_device()
    parts = {
        "model": model,
        "data": fingerprint,
        "dtype": str(resolve_dtype(run.actor.dtype, device)),
        "device": device.type,
        "float32_head": run.actor.float32_head,
        "load_in_4bit": run.actor.lora.load_in_4bit,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def make_pairs(
    run: DPORun,
    examples: PreparedExamples | ExampleSource[Preference],
    fingerprint: Callable[[], Fingerprint],
    policy: Callable[[], PolicyModel],
    reference: Callable[[], ReferenceModel],
    unload: Callable[[], object],
    setting: str,
) -> ExampleSource[Preference]:
    """Returns the pairs of prepared examples, with the reference's log-probs if a loss reads them.

    Args:
        run: the settings.
        examples: chosen and rejected replies.
        fingerprint: of the reference; asked for when its files are here.
        policy: gives the actor, which is its own reference until it is trained.
        reference: loads the reference.
        unload: forgets what `reference` loaded.
        setting: names the data.

    Raises:
        ConfigurationError: the actor does not begin as its reference.
    """
    pairs = PreparedPairs(examples) if isinstance(examples, PreparedExamples) else examples
    if not has_reference(run.dpo):
        return pairs
    begins = run.ref.model_name_or_path is None and not continues(run.ckpt)
    actor = policy() if begins else None  # loaded before its files are looked at: a hub's are here then
    key = reference_key(run, fingerprint(), examples.fingerprint if isinstance(examples, PreparedExamples) else None)
    store = ScoreFiles(None if key is None else reference_directory(run.data))
    budget, shares = tokens_per_pass(run), shares_of_pass(run)
    made = with_reference(
        pairs,
        reference if actor is None else lambda: actor,
        store,
        key=str(key),
        max_tokens=budget,
        shares=shares,
        name=setting,
    )
    unload()
    if actor is not None:
        tolerance = START_TOLERANCE[resolve_dtype(run.actor.dtype, default_device())]
        check_start(actor, made, max_tokens=budget, shares=shares, tolerance=tolerance)
    return made


def unload_reference(
    run: DPORun, local: providers.Singleton[Any], remote: providers.Singleton[Any], cluster: Callable[[], Cluster]
) -> None:
    """Frees the memory of the reference, in this process or in those of a cluster; it is loaded again when needed."""
    local.reset()
    if run.cluster.enable:
        remote.reset()
        cluster().end("reference")


class DPOContainer(OfflineContainer):
    """All objects of a run over preference pairs; `config` is the validated `DPORun`. `dpo_container` makes it."""

    unload = providers.Callable(
        unload_reference,
        OfflineContainer.config,
        OfflineContainer.local_reference.provider,
        OfflineContainer.remote_reference.provider,
        OfflineContainer.cluster.provider,
    )
    fingerprint = providers.Singleton(reference_fingerprint, OfflineContainer.config)
    pairs = providers.Singleton(
        make_pairs,
        OfflineContainer.config,
        OfflineContainer.examples,
        fingerprint.provider,
        OfflineContainer.policy.provider,
        OfflineContainer.loaded_reference.provider,
        unload.provider,
        "data.dataset",
    )
    eval_pairs = providers.Singleton(
        make_pairs,
        OfflineContainer.config,
        OfflineContainer.eval_examples,
        fingerprint.provider,
        OfflineContainer.policy.provider,
        OfflineContainer.loaded_reference.provider,
        unload.provider,
        "eval.dataset",
    )


def dpo_container(config: DPORun) -> DPOContainer:
    """Returns the container of a run with these settings."""
    container = DPOContainer(config=config, make=providers.Object(dpo_container))
    container.override_providers(
        pack=providers.Object(pack_preferences),
        objective=providers.Singleton(PreferenceObjective, settings=config.dpo),
        learned=container.pairs,
        held_out=container.eval_pairs,
        total_steps=providers.Singleton(make_total_steps, config.train, container.examples, config.ckpt),
        actor_steps=container.total_steps,  # a process of a cluster is told the number, and prepares no data
        roles=providers.Callable(make_dpo_roles, config),
        colocated=providers.Object([set(make_dpo_roles(config))]),  # the reference rests while the actor trains
    )
    return container
