"""The reference of runs over examples: its processes, its log-probs before training, and the end of it after that."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from attrs import frozen

from rollgrad.adapters.checkpoints.fingerprint import Fingerprint, model_fingerprint
from rollgrad.adapters.checkpoints.score_files import ScoreFiles
from rollgrad.adapters.data.examples.prepared import PreparedExamples
from rollgrad.adapters.models.torch.loading.loading import default_device, refuse_classifier, resolve_dtype
from rollgrad.application.learning.moving import MovingReference
from rollgrad.application.learning.reference import Judged, LiveReference, check_start, with_reference
from rollgrad.application.settings.derived import shares_of_pass, tokens_per_pass
from rollgrad.application.settings.offline import OfflineRun, ReferencedRun
from rollgrad.application.settings.sections.ckpt import Resume
from rollgrad.domain.ports.example_source import ExampleSource
from rollgrad.domain.ports.models import PolicyModel, ReferenceModel
from rollgrad.domain.ports.score_store import ScoreStore
from rollgrad.entrypoints.composition.cluster import Cluster, Role
from rollgrad.entrypoints.composition.injection import providers
from rollgrad.entrypoints.composition.offline.container import OfflineContainer, make_roles
from rollgrad.entrypoints.composition.offline.preparation import check_positions, reference_directory
from rollgrad.entrypoints.composition.vocabulary import check_tokens
from rollgrad.entrypoints.run_directory import continues

CHECKED = 8
"""Examples by which a policy is compared with its reference."""
START_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Mean difference in nats of a token's log-prob that rounding makes between two passes of one model, at most: the same
example in another micro-batch goes through other kernels."""


def make_referenced_roles(run: ReferencedRun, *, compared: bool = True) -> dict[str, Role]:
    """Returns the processes of the models in a cluster: the reference has its own only if the loss is `compared` with
    one, and the actor cannot stand for it, as it does before it is trained."""
    roles = make_roles(run)
    apart = run.ref.model_name_or_path is not None or run.ckpt.resume is not Resume.NEVER or run.data.stream
    return roles | ({"reference": roles["actor"]} if apart and compared else {})


def reference_fingerprint(run: ReferencedRun) -> Fingerprint:
    """Returns the fingerprint of the reference, of all its weights."""
    return model_fingerprint(run.ref.model_name_or_path or run.actor.model_name_or_path, whole=True)


def reference_key(run: OfflineRun, model: Fingerprint, fingerprint: str | None, **more: Any) -> str | None:
    """Returns what the log-probs of the reference `model` of the data with this fingerprint are kept under; None if the
    reference is no file of this machine, or the data have no fingerprint. `more` is what else they depend on."""
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
        **more,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def unload_reference(
    run: ReferencedRun,
    local: providers.Singleton[Any],
    remote: providers.Singleton[Any],
    cluster: Callable[[], Cluster],
) -> None:
    """Frees the memory of the reference, in this process or in those of a cluster; it is loaded again when needed."""
    local.reset()
    if run.cluster.enable:
        remote.reset()
        cluster().end("reference")


def make_moving_reference(run: ReferencedRun, policy: Callable[[], PolicyModel], section: str) -> MovingReference:
    """Returns the reference that follows the policy, as `section` of the settings says."""
    return MovingReference(model=policy, max_tokens=tokens_per_pass(run), shares=shares_of_pass(run), section=section)


def check_reference(run: ReferencedRun, tokenizer: Any) -> None:
    """Checks that a reference of its own writes texts, and has positions for the longest example, and the tokens of
    `tokenizer`, the actor's.

    Raises:
        CheckpointError: it judges texts.
        ConfigurationError: it has fewer positions, or another vocabulary.
    """
    name = run.ref.model_name_or_path
    if name is not None:
        refuse_classifier(name, "--ref.model_name_or_path")
        check_positions("reference", name, run)
        check_tokens("ref", name, tokenizer)


class Pass(Protocol):
    """Another computation with the reference while it is loaded."""

    def __call__(
        self, make_reference: Callable[[], ReferenceModel], store: ScoreStore, *, key: str, max_tokens: int, shares: int
    ) -> None:
        """Computes with the reference what `store` does not keep under `key`."""
        ...


@frozen(kw_only=True)
class References:
    """Gives examples their log-probs under the reference.

    Attributes:
        run: the settings.
        fingerprint: gives that of the reference; asked for when its files are here.
        policy: gives the actor, which is its own reference until it is trained.
        reference: loads the reference.
        unload: forgets what `reference` loaded.
    """

    run: ReferencedRun
    fingerprint: Callable[[], Fingerprint]
    policy: Callable[[], PolicyModel]
    reference: Callable[[], ReferenceModel]
    unload: Callable[[], object]

    def of(
        self,
        examples: ExampleSource[Judged],
        prepared: object,
        *,
        setting: str,
        otherwise: str,
        also: Pass | None = None,
        **also_depends_on: Any,
    ) -> ExampleSource[Judged]:
        """Returns `examples` with their log-probs.

        Args:
            examples: what is scored.
            prepared: the prepared data that they are of; a caller's own, which have no fingerprint, are scored anew.
            setting: names the data.
            otherwise: what would be wrong if the actor did not begin as its reference.
            also: computes more, before the reference is forgotten.
            also_depends_on: what that depends on besides the reference and the data.

        Raises:
            ConfigurationError: the actor does not begin as its reference.
        """
        run = self.run
        # Loaded before its files are looked at: a hub's are here then.
        actor = self.policy() if self._begins else None
        data = prepared.fingerprint if isinstance(prepared, PreparedExamples) else None
        key = reference_key(run, self.fingerprint(), data)
        store = ScoreFiles(None if key is None else reference_directory(run.data))
        budget, shares = tokens_per_pass(run), shares_of_pass(run)
        make_reference = self.reference if actor is None else lambda: actor
        made = with_reference(
            examples, make_reference, store, key=str(key), max_tokens=budget, shares=shares, name=setting
        )
        if also is not None:
            its_key = reference_key(run, self.fingerprint(), data, **also_depends_on)
            also(make_reference, store, key=str(its_key), max_tokens=budget, shares=shares)
        if not run.data.stream:
            self.unload()
        if actor is not None:
            self._check_start([made[index] for index in range(min(CHECKED, len(made)))], otherwise)
        return made

    def live(self, first: ExampleSource[Judged], *, otherwise: str) -> LiveReference:
        """Returns the reference for examples that are streamed: it stays in memory while the actor is trained.

        Args:
            first: some of the examples, by which an actor that is not yet trained is compared with it.
            otherwise: as in `of`.

        Raises:
            ConfigurationError: as `of`.
        """
        live = LiveReference(
            model=self.reference, max_tokens=tokens_per_pass(self.run), shares=shares_of_pass(self.run)
        )
        if self._begins:
            self._check_start(live.of([first[index] for index in range(min(CHECKED, len(first)))]), otherwise)
        return live

    @property
    def _begins(self) -> bool:
        """Whether the actor is its own reference, because it is not yet trained."""
        return self.run.ref.model_name_or_path is None and not continues(self.run.ckpt)

    def _check_start(self, examples: Sequence[Judged], otherwise: str) -> None:
        check_start(
            self.policy(),
            examples,
            max_tokens=tokens_per_pass(self.run),
            shares=shares_of_pass(self.run),
            tolerance=START_TOLERANCE[resolve_dtype(self.run.actor.dtype, default_device())],
            otherwise=otherwise,
        )


class ReferencedContainer(OfflineContainer):
    """All objects of a run that compares the model with a reference; `config` is a `ReferencedRun`."""

    unload = providers.Callable(
        unload_reference,
        OfflineContainer.config,
        OfflineContainer.local_reference.provider,
        OfflineContainer.remote_reference.provider,
        OfflineContainer.cluster.provider,
    )
    suits = providers.Callable(check_reference, OfflineContainer.config, OfflineContainer.tokenizer)
    fingerprint = providers.Singleton(reference_fingerprint, OfflineContainer.config)
    references = providers.Singleton(
        References,
        run=OfflineContainer.config,
        fingerprint=fingerprint.provider,
        policy=OfflineContainer.policy.provider,
        reference=OfflineContainer.loaded_reference.provider,
        unload=unload.provider,
    )
