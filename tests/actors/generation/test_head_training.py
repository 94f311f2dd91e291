"""A real head is trained by a real instance while it has no samples, and no token is another for it. No Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rlhfspec.actors.actor_messages import GenerationSpec, HeadProgress, SpotSpec
from rlhfspec.actors.generation.decode_loop import DecodeLoop
from rlhfspec.actors.generation.engine_host import ManifestHost
from rlhfspec.actors.generation.loop_orders import CallOrder, LoadOrder, StopOrder, SubmitOrder
from rlhfspec.core.config import DrafterTrainingConfig, EngineConfig, SpeculationConfig
from rlhfspec.core.records import Completion, SampleKey, SamplingParams
from rlhfspec.engine.drafters.head.head_weights import HeadWeights
from rlhfspec.engine.drafters.head.published_head import pack_head
from rlhfspec.engine.weights.chunks import pack_weights
from tests.helpers import tiny_pool
from tests.helpers.hand_learner import LIMIT_S
from tests.helpers.random_heads import random_head

NUM_SAMPLES = 24
PASSES = 4


@pytest.fixture(scope="module")
def head() -> HeadWeights:
    return random_head(tiny_pool.target(), draft_vocab_size=48)


class Instance:
    """A decode loop on its thread, with a host that builds everything from manifests."""

    def __init__(self, head: HeadWeights, *, trains: bool, cache_dir: str | None = None) -> None:
        training = DrafterTrainingConfig(
            max_tokens_per_step=256, max_passes=PASSES, head_learning_rate=3e-3, buffer_mb=8.0
        )
        spec = GenerationSpec(
            instance="gen-0",
            engine=EngineConfig(device="cpu", max_running_samples=4, probe=False),
            speculation=SpeculationConfig(policy="fixed", drafter="head", num_nodes=4, depth=2, branching=2),
            dtype="float32",
            max_total_tokens=96,
            vocab_size=tiny_pool.VOCAB_SIZE,
            report_interval_s=0.0,
            cache_dir=cache_dir,
            spot=SpotSpec(training=training, temperature=1.0, seed=5) if trains else None,
        )
        self.host = ManifestHost(spec)
        self.loop = DecodeLoop("gen-0", self.host, report_interval_s=0.0)
        self.done: dict[SampleKey, Completion] = {}
        self._acknowledged = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.load(*pack_weights(tiny_pool.target(), name="target", weight_version=0))
        self.load(*pack_head(head, weight_version=0))

    def _run(self) -> None:
        torch.set_num_threads(1)
        self.loop.run()

    def order(self, order: Any) -> Any:
        return self.loop.order(order).result(timeout=LIMIT_S)

    def load(self, manifest, chunks) -> None:
        self.order(LoadOrder(manifest=manifest, chunks=tuple(chunks)))

    def generate(self, first: int, count: int) -> None:
        asked = tiny_pool.requests(NUM_SAMPLES, sampling=SamplingParams(max_new_tokens=40))
        self.order(SubmitOrder(requests=tuple(asked[first : first + count])))
        wanted = len(self.done) + count
        while len(self.done) < wanted:
            reply = self.loop.poll(acknowledged=self._acknowledged, wait_s=LIMIT_S)
            self._acknowledged = reply.sequence
            self.done |= {one.key: one for one in reply.completions}

    def until_idle(self) -> None:
        """Wait until it has learned what there is."""
        assert self.host.spot_trainer is not None
        idle = self.host.spot_trainer._idle
        with idle._changed:
            assert idle._changed.wait_for(lambda: idle._allowed and not idle.is_active, timeout=LIMIT_S)

    def progress(self) -> tuple[HeadProgress, dict[str, np.ndarray]]:
        return self.order(CallOrder(what="hand over", call=self.host.head_progress))

    def stop(self) -> None:
        self.order(StopOrder())
        self.thread.join(LIMIT_S)
        self.host.close()


@pytest.fixture
def instance(head: HeadWeights) -> Iterator[Callable[..., Instance]]:
    made: list[Instance] = []

    def make(**settings: Any) -> Instance:
        made.append(Instance(head, **settings))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def test_what_an_instance_learned_in_idle_time_makes_a_better_head(instance, head: HeadWeights) -> None:
    one = instance(trains=True)
    one.generate(0, NUM_SAMPLES)
    one.until_idle()
    told, tensors = one.progress()
    assert told.failure == "" and told.num_steps >= 2 and told.train_s > 0.0
    # as often as it may, over what it learns from, up to a step
    assert told.num_tokens > told.num_steps and told.held_out_tokens > 0
    learned = head.with_trained({name: torch.from_numpy(array) for name, array in tensors.items()})
    manifest, chunks = pack_head(learned, weight_version=1)
    found = one.order(CallOrder(what="compare", call=lambda: one.host.compare_head(manifest, chunks)))
    assert found.tried < found.present, "on sequences that it has not learned from"
    one.load(manifest, chunks)
    told, tensors = one.progress()
    assert (told.num_steps, tensors) == (0, {}), "it begins again from what is published"
    drafter: Any = one.host.engine and one.host.engine.drafter
    assert drafter.checksum() == manifest.checksum


def test_no_token_depends_on_training(instance) -> None:
    trained, plain = instance(trains=True), instance(trains=False)
    assert plain.host.spot_trainer is None and plain.progress()[1] == {}
    for one in (trained, plain):
        one.generate(0, 12)
    # work arrives while it trains
    trained.until_idle()
    manifest, chunks = pack_weights(tiny_pool.target(), name="target", weight_version=1)
    for one in (trained, plain):
        one.load(manifest, chunks)
        one.generate(12, 12)
    assert tiny_pool.mismatches(trained.done, plain.done) == []
    assert trained.progress()[0].failure == ""
