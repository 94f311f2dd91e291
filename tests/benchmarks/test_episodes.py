"""Episodes over two instances, drafted and moved, are those of one instance without speculation, bit for bit."""

import pytest
import ray

from rlhfspec.benchmarks.episodes import (
    ENGINE,
    Played,
    calculator_config,
    calculator_workload,
    play_alone,
    play_over,
    tool_conversations,
)
from rlhfspec.benchmarks.moving.exact import SPECULATION
from rlhfspec.benchmarks.moving.forced import ForcedMoves
from rlhfspec.benchmarks.support.actor_pool import ActorPool
from rlhfspec.benchmarks.support.reference import same_bits
from rlhfspec.core.config import ReallocationConfig, SpeculationConfig
from rlhfspec.engine.build import build_engine

pytestmark = [pytest.mark.ray, pytest.mark.slow]
EPISODES = 16


@pytest.mark.long
def test_episodes_over_two_instances_change_no_bit_by_moves_or_by_a_death(local_ray, tmp_path):
    workload = calculator_workload(tmp_path, EPISODES, max_new_tokens=200)
    config, requests = calculator_config(workload), workload.requests()
    alone = build_engine(
        workload.target("float32"),
        None,
        engine=ENGINE.model_copy(update={"turn_cache_mb": 0.0}),
        speculation=SpeculationConfig(policy="off"),
        max_total_tokens=workload.max_total_tokens,
        vocab_size=workload.vocab_size,
    )
    expected = play_alone(alone, requests, config, workload.tokenizer)
    assert alone.stats.num_kept_tokens == 0
    pool = ActorPool(
        workload, engine=ENGINE, speculation=SPECULATION, migration=ReallocationConfig(transfer_share=1.0)
    )
    try:

        def check(played: Played) -> None:
            assert played.completions.keys() == expected.keys()
            wrong = [
                key.sample_index
                for key, one in played.completions.items()
                if not same_bits(one, expected[key])
            ]
            assert wrong == [] and played.alarms == []

        policy = ForcedMoves(rate=0.3, seed=0, recompute_share=0.1)
        moved = play_over(pool, workload, config, requests, reallocation=policy)
        check(moved)
        assert moved.num_kept_tokens > 0 and any(move.outcome == "moved" for move in moved.moves)
        assert moved.figures["environment/turns_mean"] > 2

        def kill(played: Played) -> bool:
            if not played.completions and not played.num_kept_tokens:
                return False
            ray.kill(pool.handles["gen-1"])
            return True

        survived = play_over(pool, workload, config, requests, reallocation=policy, strike=kill)
        check(survived)
        assert survived.lost == ["gen-1"]
    finally:
        pool.close()


@pytest.mark.long
def test_conversations_with_tools_change_no_bit_by_moves_or_by_what_dies(local_ray, tmp_path):
    figures = tool_conversations(tmp_path, 24)
    assert figures["conversations_of_2_to_6_turns"] > 8 and figures["moves"] > 0
    assert figures["instances_killed"] == figures["environments_killed"] == 1.0
    assert figures["moved_differ"] == figures["killed_differ"] == figures["missing"] == 0.0
