"""A running generation pool that a test steers, and what one process makes of the same samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray.util.placement_group import placement_group_table

from rlhfspec.actors.actor_messages import Taken
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.plan.run_check import check_run
from rlhfspec.cluster.ray_start.ray_session import RaySession
from rlhfspec.cluster.run.stream import RolloutStream
from rlhfspec.cluster.system.system import GeneratingSystem, running_generation
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.records import Rollout, SampleRequest
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.weights.loading import load_causal_lm
from rlhfspec.learning.data.cursor import PromptCursor
from rlhfspec.learning.data.prompts import sampling_params
from rlhfspec.policies.scaling.scaling_records import Resize
from rlhfspec.policies.scheduling.members import InstanceState

LIMIT_S = 180.0


def tiny_config(target: object, draft: object, **generation: Any) -> Config:
    """A pair of models, `generation` of the section cluster."""
    return config_from_dict(
        {
            "run": {"seed": 5},
            "models": {"target": str(target), "draft": str(draft)},
            "data": {"task": "chain", "limit": 64},
            "reward": {"kind": "sample_rewards:vowel_share", "batch_size": 4},
            "sampling": {"max_new_tokens": 100},
            "speculation": {"policy": "fixed", "num_nodes": 2, "depth": 2, "branching": 1},
            "engine": {"max_running_samples": 4},
            "cluster": {"generation": generation},
            "reallocation": {"interval_s": 0.02},
        }
    )


class SteeredPool(Reporter):
    """The loop's report and the pool; `at` is told the number of finished samples."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.notes: list[str] = []
        self.at: Callable[[int], None] = lambda done: None

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, phase: str, done: int, total: int) -> None:
        self.at(done)

    @contextmanager
    def running(self) -> Iterator[SteeredPool]:
        """On the Ray that this process is connected to."""
        plan = check_run(self.config, output_dir=Path.cwd())
        session = RaySession(namespace="test-elastic", is_local=False, dashboard_url=None)
        self.cursor = PromptCursor(plan.inputs.dataset, run_seed=self.config.run.seed, shuffle=True)
        with running_generation(plan, session, note=self.notes.append) as system:
            self.system: GeneratingSystem = system
            self.stream = RolloutStream(system, self)  # pyright: ignore[reportArgumentType]
            yield self

    def resize(self, target: int) -> None:
        """As if the scheduler's policy had decided so."""
        self.system.generation.look(Taken(resized=Resize(target=target, reason="the test says so")))

    def requests(self, count: int) -> list[SampleRequest]:
        return self.cursor.next_requests(
            count, 1, sampling_params(self.config.sampling, self.system.tokenizer)
        )

    def collect(
        self, asked: list[SampleRequest], at: Callable[[int], None] = lambda done: None
    ) -> list[Rollout]:
        self.at = at
        try:
            return self.stream.collect(asked).rollouts
        finally:
            self.at = lambda done: None

    def wait_for(self, ready: Callable[[], object]) -> None:
        """Let the loop look after the pool, without a sample."""
        ends_s = time.monotonic() + LIMIT_S
        while not ready():
            assert time.monotonic() < ends_s, self.notes
            self.stream.poll_pool()
            time.sleep(0.02)

    @property
    def serving(self) -> list[str]:
        rows = self.system.generation._instances
        return sorted(name for name, row in rows.items() if row.state is InstanceState.SERVING)

    def has_said(self, text: str) -> bool:
        return any(text in note for note in self.notes)


def own_bundles() -> int:
    """Placement groups of one bundle that are reserved now."""
    return sum(
        group["state"] == "CREATED" and len(group["bundles"]) == 1
        for group in placement_group_table().values()
    )


def bits(rollouts: list[Rollout]) -> dict[int, tuple[bytes, bytes]]:
    """What must not depend on the pool."""
    return {c.key.sample_index: (c.token_ids.tobytes(), c.policy_logprobs.tobytes())
            for c in (rollout.completion for rollout in rollouts)}  # fmt: skip


def bits_alone(config: Config, asked: list[SampleRequest]) -> dict[int, tuple[bytes, bytes]]:
    """The same samples in this process, plainly."""
    engine = build_engine(
        load_causal_lm(config.models.target, "float32"),
        None,
        engine=config.engine.model_copy(update={"max_running_samples": 7}),
        speculation=config.speculation.model_copy(update={"policy": "off"}),
        max_total_tokens=128,
    )
    done = engine.generate(asked)
    return {c.key.sample_index: (c.token_ids.tobytes(), c.policy_logprobs.tobytes()) for c in done}
