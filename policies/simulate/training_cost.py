"""What a step takes beside decoding: seconds of the update and of publication, bytes of memory.

The update is operations over what of the sheet is reached, and FSDP's traffic; publication is bytes over links.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...core.errors import ConfigError
from ...core.settings.simulated_cluster import SimulatedLearnerConfig
from ...profiles.gpu_sheets import GPUSheet
from .model_dimensions import ModelDimensions
from .roofline import Roofline

TRAINING_BYTES = 2.0
"Of a parameter or a gradient that travels: bfloat16."
STATE_BYTES = 16.0
"Of a parameter in training: bfloat16 weight and gradient, float32 master copy and two moments."


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCost:
    """Seconds of one step's training."""

    log_probability_s: float
    update_s: float
    compute_s: float
    "of the update"
    traffic_s: float
    "of the update; hidden behind the computation or not, as configured"

    @property
    def total_s(self) -> float:
        """Both passes."""
        return self.log_probability_s + self.update_s


def gather_s(num_bytes: float, gpus: int, sheet: GPUSheet, link_share: float) -> float:
    """Seconds in which every one of the GPUs gets so many bytes that are spread evenly over them.

    Across domains each domain receives the bytes once, over all its ports at once, and spreads them over its links.
    """
    if gpus == 1:
        return 0.0
    num_bytes *= (gpus - 1) / gpus
    inside_s = num_bytes / (sheet.link_bytes_per_s * link_share)
    if gpus <= sheet.domain_gpus:
        return inside_s
    return inside_s + num_bytes / (sheet.network_bytes_per_s * sheet.domain_gpus * link_share)


def training_cost(
    model: ModelDimensions,
    sheet: GPUSheet,
    learner: SimulatedLearnerConfig,
    *,
    gpus: int,
    tokens: float,
    mean_tokens: float,
    link_share: float,
) -> TrainingCost:
    """Cost of one step on so many GPUs.

    Args:
        model: of the policy.
        sheet: of the trainer's GPUs.
        learner: what is assumed of it.
        gpus: of the trainer.
        tokens: of all samples, prompts included.
        mean_tokens: of a sample: attention looks back over half of them.
        link_share: of the links, that is reached.
    """
    # a token's forward: two operations a parameter, and its attention
    forward = 2.0 * model.active + 2.0 * model.layers * model.heads * model.head_size * mean_tokens
    passes = 4.0 if learner.recompute else 3.0
    flops = gpus * sheet.bf16_flops
    compute_s = learner.epochs * tokens * passes * forward / (flops * learner.mfu)
    log_compute_s = learner.log_probability_passes * tokens * forward / (flops * learner.forward_mfu)
    traffic_s = log_traffic_s = 0.0
    if learner.sharded:
        rounds = math.ceil(tokens / gpus / learner.tokens_per_gpu)
        once_s = gather_s(model.total * TRAINING_BYTES, gpus, sheet, link_share)
        # gathered forward and backward, gradients scattered
        traffic_s = 3.0 * once_s * rounds * learner.epochs
        log_traffic_s = once_s * rounds * learner.log_probability_passes
    elif gpus > 1:
        # one all-reduce of the gradients an epoch, a scatter and a gather
        traffic_s = 2.0 * gather_s(model.total * TRAINING_BYTES, gpus, sheet, link_share) * learner.epochs
    joined = max if learner.overlap else (lambda a, b: a + b)
    return TrainingCost(
        log_probability_s=joined(log_compute_s, log_traffic_s),
        update_s=joined(compute_s, traffic_s),
        compute_s=compute_s,
        traffic_s=traffic_s,
    )


def publication_s(bytes_per_gpu: float, *, sheet: GPUSheet, link_share: float, colocated: bool) -> float:
    """Seconds until every instance has new weights: each of its GPUs receives its part, all instances at once.

    Over the network, as a pipelined broadcast; over the link where trainer and instance share their GPUs.
    """
    bandwidth = sheet.link_bytes_per_s if colocated else sheet.network_bytes_per_s
    return bytes_per_gpu / (bandwidth * link_share)


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
