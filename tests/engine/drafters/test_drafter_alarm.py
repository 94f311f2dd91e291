"""A drafter whose weights become zero: noticed, named, left out, and never a wrong token."""

import copy
from collections.abc import Callable

import pytest
import torch
from hand_profile import hand_cost, hand_profile

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.records import SampleRequest, SamplingParams
from rlhfspec.core.weight_records import WeightManifest
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.drafters.model_drafter import ModelDrafter
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.weights.chunks import model_checksum, pack_weights, unpack_weights

PROFILE = hand_profile(0.9, cost=hand_cost(forward_ms=10.0, token_ms=0.02, level_ms=0.5, draft_token_ms=0.01))
SAMPLING = SamplingParams(max_new_tokens=120)


@pytest.fixture
def adaptive(pairs, new_model) -> Callable[[], Engine]:
    """A draft equal to its target: nearly everything is accepted."""

    def make() -> Engine:
        return build_engine(
            pairs["float32"].target,
            new_model(1, "float32"),
            engine=EngineConfig(device="cpu", max_running_samples=4, probe=False),
            speculation=SpeculationConfig(policy="goodput", max_nodes=8, max_depth=8),
            max_total_tokens=192,
            profile=PROFILE,
        )

    return make


def zeroed(model) -> tuple[WeightManifest, dict[str, torch.Tensor]]:
    dead = copy.deepcopy(model)
    for weight in dead.parameters():
        weight.zero_()
    manifest, chunks = pack_weights(dead, name="draft", weight_version=3)
    return manifest, unpack_weights(manifest, chunks)


def test_a_dead_drafter_is_suspended_named_and_harmless(
    adaptive: Callable[[], Engine],
    make_engine: Callable[..., Engine],
    make_requests: Callable[..., list[SampleRequest]],
    new_model,
) -> None:
    requests = make_requests((9, 30, 5, 17), SAMPLING)
    plain = make_engine("off", batch=4).generate(requests)
    engine = adaptive()
    for request in requests:
        engine.submit(request)
    done = []
    for _ in range(4):
        done += engine.step()
    assert engine.drafter_alarm == ""
    assert engine.stats.acceptance_rate > 0.5
    assert isinstance(engine.drafter, ModelDrafter)
    assert engine.drafter_checksum == model_checksum(new_model(1, "float32"))
    manifest, tensors = zeroed(new_model(1, "float32"))
    engine.load_weights(manifest, tensors)
    died_at = engine.stats.num_decode_steps
    while engine.has_work:
        done += engine.step()
    suspended = [r.decode_step for r in engine.step_records if "suspended" in r.budget.reason]
    assert died_at < suspended[0] <= died_at + 10
    for part in (manifest.checksum, "version 3", "decode steps old", "plain decoding"):
        assert part in engine.drafter_alarm
    assert engine.load().drafter_alarm == engine.drafter_alarm
    tokens = {completion.key: completion.token_ids.tolist() for completion in done}
    assert tokens == {completion.key: completion.token_ids.tolist() for completion in plain}


def test_goodput_without_a_profile_says_how_to_get_one(pairs) -> None:
    with pytest.raises(ConfigError, match="rlhfspec profile"):
        build_engine(
            pairs["float32"].target,
            pairs["float32"].draft,
            engine=EngineConfig(device="cpu", max_running_samples=2, probe=False),
            speculation=SpeculationConfig(policy="goodput"),
            max_total_tokens=64,
        )
