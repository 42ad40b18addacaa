"""A worker of vLLM in which a matrix stays what it was when new weights come. vLLM imports its class."""

from typing import Any

from rollgrad.adapters.engines.vllm.profile import ProfiledWorker

STALE_WORKER = f"{__name__}.StaleWorker"


class StaleWorker(ProfiledWorker):
    """A worker whose latent attention may keep the matrices by which replies, and no prompts, are computed."""

    model_runner: Any

    def keep_matrices(self) -> None:
        """Keeps them from now on; vLLM has views of the weights there, as long as these are not quantised."""
        from torch.nn import Parameter
        from vllm.model_executor.layers.attention import MLAAttention

        layers = [layer for layer in self.model_runner.model.modules() if isinstance(layer, MLAAttention)]
        kept = {layer: layer.W_UK_T.detach().clone() for layer in layers}
        make = MLAAttention.process_weights_after_loading

        def made(layer: Any, dtype: Any) -> None:
            make(layer, dtype)
            layer.W_UK_T = Parameter(kept[layer], requires_grad=False)

        MLAAttention.process_weights_after_loading = made
