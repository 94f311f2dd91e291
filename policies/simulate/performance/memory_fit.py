"""Whether weights, caches and training state fit on the devices, and how many samples an instance holds."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import ConfigError
from policies.simulate.performance.model_dimensions import ModelDimensions
from policies.simulate.performance.roofline import Roofline
from policies.simulate.performance.training_cost import STATE_BYTES, TRAINING_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Bytes of one GPU."""

    capacity: float
    "what weights and caches may take"
    weights: float
    "of an instance's GPU, the drafter's included"
    caches: float
    "with all slots taken by samples of the mean length"
    training: float
    "of a trainer's GPU: parameters, gradients, optimiser; activations are not counted"

    @property
    def instance_fits(self) -> bool:
        """Whether an instance's weights and caches do."""
        return self.weights + self.caches <= self.capacity

    @property
    def trainer_fits(self) -> bool:
        """Whether the training state does."""
        return self.training <= self.capacity


def most_slots(
    target: Roofline, draft: Roofline | None, *, context_tokens: float, spare_memory: float
) -> int:
    """Samples of so many tokens whose caches fit beside the weights, on an instance.

    Raises ConfigError where there is no room for one.
    """
    capacity = target.sheet.memory_bytes * (1.0 - spare_memory)
    room = capacity - _weights(target, draft)
    slots = int(room / (context_tokens * _cache(target, draft)))
    if slots < 1:
        raise ConfigError(
            f"an instance of {target.gpus} {target.sheet.name} holds no sample: its weights take "
            f"{_weights(target, draft) / 1e9:.1f} GB of each GPU's {capacity / 1e9:.1f} GB, a sample of "
            f"{context_tokens:.0f} tokens {context_tokens * _cache(target, draft) / 1e9:.2f} GB; raise "
            "pools.tensor_parallel or lower model.precision"
        )
    return slots


def memory_fit(
    target: Roofline,
    draft: Roofline | None,
    *,
    slots: int,
    context_tokens: float,
    spare_memory: float,
    trainer_gpus: int,
    sharded: bool,
) -> MemoryFit:
    """Return what is taken with so many slots of so many tokens."""
    return MemoryFit(
        capacity=target.sheet.memory_bytes * (1.0 - spare_memory),
        weights=_weights(target, draft),
        caches=slots * context_tokens * _cache(target, draft),
        training=_training(target.model, trainer_gpus if sharded else 1),
    )


def _weights(target: Roofline, draft: Roofline | None) -> float:
    return target.weight_bytes_per_gpu + (0.0 if draft is None else draft.weight_bytes_per_gpu)


def _cache(target: Roofline, draft: Roofline | None) -> float:
    """Bytes of a token on one GPU."""
    drafts = 0.0 if draft is None else draft.kv_bytes_per_token * draft.cache_share
    return target.kv_bytes_per_token * target.cache_share + drafts


def _training(model: ModelDimensions, gpus: int) -> float:
    # the layer at work is gathered on every GPU
    layer = (model.total / model.layers) * TRAINING_BYTES if gpus > 1 else 0.0
    return model.total * STATE_BYTES / gpus + layer
