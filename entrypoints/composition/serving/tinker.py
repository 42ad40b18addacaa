"""Makes the models of `rollgrad serve tinker`: adapters on one base model, in training and to sample from."""

from functools import partial
from pathlib import Path

from rollgrad.adapters.engines.embedded.decoding import check_decoding
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.models.torch.loading.compatibility import usable_positions
from rollgrad.adapters.models.torch.loading.loading import default_device, load_causal_lm, load_tokenizer, resolve_dtype
from rollgrad.adapters.models.torch.loading.lora import load_adapter, save_adapter
from rollgrad.adapters.models.torch.models import copied_weights
from rollgrad.adapters.models.torch.optimizers.stored_state import opened
from rollgrad.adapters.models.torch.references import TorchReference
from rollgrad.adapters.models.torch.stepwise import TorchStepwisePolicy, with_own_adapters
from rollgrad.adapters.servers.tinker.samplers import Sampler, Weights
from rollgrad.adapters.servers.tinker.service import Models
from rollgrad.application.settings.sections.actor import DType, LoraConfig
from rollgrad.domain.ports.checkpoint_store import STORED_IN
from rollgrad.domain.ports.models import StepwisePolicy
from rollgrad.entrypoints.composition.engines import eos_token_ids

FLAG = "--model"
MEMORY_SHARE = 0.2
"""Share of the free memory for the keys and values of each of the samplers, of which a few may be in use."""


class TinkerModels(Models):
    """Adapters on the model `name`, a directory or hub name.

    Raises:
        CheckpointError, ConfigurationError: it cannot be trained or sampled from exactly.
    """

    def __init__(self, name: str, dtype: DType, pass_tokens: int) -> None:
        device = default_device()
        self._base = load_causal_lm(name, dtype=resolve_dtype(dtype, device), device=device, flag=FLAG)
        check_decoding(self._base, FLAG)
        self._tokenizer = load_tokenizer(name, flag=FLAG)
        self.name = name
        self.architecture = str(self._base.config.model_type)
        self.vocabulary = int(self._base.get_input_embeddings().num_embeddings)
        self.max_tokens = usable_positions(self._base.config)
        self.pass_tokens = pass_tokens

    def create(self, rank: int, seed: int) -> TorchStepwisePolicy:
        """Implements `Models.create`."""
        return TorchStepwisePolicy(with_own_adapters(self._base, LoraConfig(rank=rank), seed=seed), self._tokenizer)

    def save_state(self, policy: StepwisePolicy, directory: Path) -> None:
        """Implements `Models.save_state`."""
        (directory / "state").mkdir()
        _own(policy).write_state(directory / "state")

    def load_state(self, policy: StepwisePolicy, directory: Path, *, optimizer: bool) -> None:
        """Implements `Models.load_state`."""
        state = opened({STORED_IN: str(directory / "state")})
        policy.load_state_dict(state if optimizer else {**state, "moments": {}, "steps": 0})

    def save_adapter(self, policy: StepwisePolicy, directory: Path) -> None:
        """Implements `Models.save_adapter`."""
        model = _own(policy)
        save_adapter(model.module, copied_weights(model.adapter(), keep=True), directory)

    def sampler(self, weights: Weights) -> Sampler:
        """Implements `Models.sampler`."""
        model = self._base
        if weights.directory is not None:
            model = with_own_adapters(self._base, LoraConfig(rank=weights.rank), seed=0)
            load_adapter(model, weights.directory)
        engine = EmbeddedEngine(
            model,
            eos_token_ids=eos_token_ids(self._base.generation_config, self._tokenizer),
            decode=partial(self._tokenizer.decode, skip_special_tokens=False),
            memory_share=MEMORY_SHARE,
        )
        return Sampler(engine=engine, model=TorchReference(model))


def _own(policy: StepwisePolicy) -> TorchStepwisePolicy:
    """Returns a policy that `TinkerModels.create` has made."""
    assert isinstance(policy, TorchStepwisePolicy)
    return policy
