"""The target's first layers draft what they would, run alone."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from core.config import EngineConfig, SpeculationConfig
from core.decode_records import Budget
from core.errors import ConfigError, ModelError
from core.records import SamplingParams
from engine.build import build_engine
from engine.decoding.noise import gumbel_noise
from engine.drafters.exit_norm import ExitNorm, load_exit_norm, save_exit_norm
from engine.engine import Engine
from engine.numerics import on_threads


def engine_of(target, num_layers: int, *, norm: ExitNorm | None = None, **engine) -> Engine:
    settings = {"device": "cpu", "max_running_samples": 4, "probe": False, "numerics": "fast"}
    return build_engine(
        target,
        norm,
        engine=EngineConfig(**(settings | engine)),
        speculation=SpeculationConfig(
            policy="fixed", drafter="early_exit", exit_layers=num_layers, num_nodes=4, branching=1
        ),
        max_total_tokens=128,
    )


def shortened_chain(target, num_layers: int, ids: list[int], key_words, depth: int) -> list[int]:
    """Draft by a module that has the first layers only."""
    layers = target.base_model.layers
    drafted: list[int] = []
    try:
        target.base_model.layers = layers[:num_layers]
        for level in range(depth):
            with torch.inference_mode():
                logits = target(torch.tensor([[*ids, *drafted]]), use_cache=False).logits[0, -1].float()
            noise = gumbel_noise(key_words, np.array([[len(ids) + level]]), len(logits))[0, 0]
            drafted.append(int((logits + noise).argmax()))
    finally:
        target.base_model.layers = layers
    return drafted


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("dtype", "num_layers"), [("float32", 2), ("float32", 0), ("bfloat16", 3)])
def test_chains_are_those_of_the_first_layers(
    new_model: Callable, make_requests, dtype: str, num_layers: int, num_threads: int
) -> None:
    target = new_model(7, dtype, num_layers=4)
    # a norm of ones would hide a gain that is taken twice
    target.base_model.norm.weight.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(2))
    with on_threads(num_threads):
        engine = engine_of(target, num_layers, num_threads=num_threads)
        for request in make_requests((9, 21), SamplingParams(max_new_tokens=60)):
            engine.submit(request)
        alike = []
        for _ in range(6):
            engine.step()
            batch = engine._batch
            chain = Budget(num_nodes=4, depth=4, branching=1, width=1, reason="test")
            tree = engine.drafter.draft(batch, chain, batch.noise(5, 64))
            for slot in range(len(batch)):
                ids = batch.tokens[slot, : batch.lengths[slot]].tolist()
                expected = shortened_chain(target, num_layers or 1, ids, batch.words[slot : slot + 1], 4)
                alike.append(tree.token_ids[slot].tolist() == expected)
    # the module computes bfloat16 with other roundings: near ties differ
    assert sum(alike) >= (len(alike) if dtype == "float32" else 0.7 * len(alike))


def test_a_trained_norm_takes_the_last_ones_place(new_model: Callable, make_requests, tmp_path) -> None:
    target = new_model(7, "float32", num_layers=4)
    gain = torch.rand(64, generator=torch.Generator().manual_seed(4)) + 0.5
    save_exit_norm(tmp_path, ExitNorm(num_layers=2, num_target_layers=4, gain=gain))
    norm = load_exit_norm(tmp_path)
    assert norm.gain.equal(gain)
    own = new_model(7, "float32", num_layers=4)
    own.base_model.norm.weight.data.copy_(gain)
    drafted = []
    for engine in (engine_of(target, 0, norm=norm), engine_of(own, 2), engine_of(target, 2)):
        for request in make_requests((9, 21), SamplingParams(max_new_tokens=60)):
            engine.submit(request)
        engine.step()
        batch = engine._batch
        batch.tokens[:2, 9:30], batch.lengths[:2] = 5, 24
        budget = Budget(num_nodes=4, depth=4, branching=1, width=1, reason="test")
        drafted.append(engine.drafter.draft(batch, budget, batch.noise(5, 64)).token_ids.tolist())
    assert drafted[0] == drafted[1] != drafted[2]


def test_a_norm_of_another_target_or_exit_is_refused(new_model: Callable, tmp_path) -> None:
    target, gain = new_model(7, "float32", num_layers=4), torch.ones(64)
    with pytest.raises(ModelError, match="of a target of 3 layers of 64, expected 4 of 64"):
        engine_of(target, 0, norm=ExitNorm(num_layers=2, num_target_layers=3, gain=gain))
    with pytest.raises(ConfigError, match="set it to 2 or 0"):
        engine_of(target, 3, norm=ExitNorm(num_layers=2, num_target_layers=4, gain=gain))
    with pytest.raises(ModelError, match="drafter make --early-exit"):
        load_exit_norm(tmp_path)
    save_exit_norm(tmp_path, ExitNorm(num_layers=2, num_target_layers=4, gain=gain.log()[:5] * torch.nan))
    with pytest.raises(ModelError, match="not 5 finite numbers"):
        load_exit_norm(tmp_path)


def test_all_layers_are_no_early_exit(new_model: Callable) -> None:
    with pytest.raises(ConfigError, match="exit_layers from 1 to 3"):
        engine_of(new_model(7, "float32", num_layers=4), 4)


def test_a_module_that_runs_as_a_whole_is_refused(new_model: Callable, make_requests) -> None:
    engine = engine_of(new_model(7, "float32", num_layers=4), 2, forward="stock")
    with pytest.raises(ModelError, match="early exit needs our own forward"):
        engine.generate(make_requests((5,), SamplingParams(max_new_tokens=8)))
