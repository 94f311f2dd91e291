"""Puts an instance's spot trainer together: its engine records features, its own threads train the head."""

from __future__ import annotations

from functools import partial

from ...engine.admission import MB
from ...engine.drafters.head.head_weights import HeadWeights
from ...engine.engine import Engine
from ...engine.numerics import use_threads
from ...learning.drafts.features import FeatureBuffer, record_features
from ...learning.drafts.head import TargetParts
from ...learning.drafts.head_trainer import HeadTrainer
from ...learning.drafts.stoppable import fastest_dtype
from ..actor_messages import GenerationSpec, SpotSpec
from ..remote import run_metrics
from .spot_trainer import SpotTrainer

RECORDED_SHARE = 0.5
"Of the buffer's bytes: what samples that run may give, and as much that has finished and is not in it yet."


def begin_training(spec: GenerationSpec, spot: SpotSpec, engine: Engine, head: HeadWeights) -> SpotTrainer:
    """Record what the engine computes from now on, and train on it in idle time.

    The target is of Llama's kin: see `learning.drafts.head.require_kin`.
    """
    training = spot.training
    max_bytes = int(training.buffer_mb * MB)
    recorder = record_features(engine, head.config.tapped_layers, max_bytes=int(RECORDED_SHARE * max_bytes))
    runner = engine.runner
    learner = HeadTrainer(
        head,
        TargetParts.of(runner.model, head.config.tapped_layers),
        learning_rate=training.head_learning_rate,
        temperature=spot.temperature,
        compute_dtype=fastest_dtype(),
    )
    return SpotTrainer(
        learner,
        FeatureBuffer(max_bytes, max_passes=training.max_passes),
        head.trained,
        name=f"spot trainer of {spec.instance}",
        training=training,
        seed=spot.seed,
        finished=recorder.take,
        read_target=lambda: learner.take_target(TargetParts.of(runner.model, head.config.tapped_layers)),
        begin=partial(use_threads, spec.engine.num_threads),
        count=partial(_count, spec.instance),
    )


def _count(instance: str, seconds: float, tokens: int) -> None:
    run_metrics.add("spot_seconds", seconds, actor=instance)
    run_metrics.add("spot_steps", float(tokens > 0), actor=instance)
    run_metrics.add("spot_tokens", tokens, actor=instance)
