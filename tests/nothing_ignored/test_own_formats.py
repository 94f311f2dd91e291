"""Our own files and configs: a key that this version does not know is said by its name, in every section."""

from __future__ import annotations

import asyncio
import importlib
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from rlhfspec.actors import reward_server as actors_serving
from rlhfspec.actors.reward_server.reward_deployment import build, wrong_body
from rlhfspec.actors.reward_server.score_schema import ScoreBody
from rlhfspec.benchmarks.pages.reference import _sections
from rlhfspec.cluster import serving as cluster_serving
from rlhfspec.core import settings
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import load_config_of
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.settings.section import Section
from rlhfspec.core.settings.simulated_cluster import SimulatedClusterConfig
from rlhfspec.core.settings.supervised import DpoConfig, SftConfig, TrainRewardConfig

ROOTS: tuple[type[Section], ...] = (Config, SftConfig, TrainRewardConfig, DpoConfig, SimulatedClusterConfig)
PLACES = [(root, place) for root in ROOTS for place, _ in _sections(root, "")]
READ_BY_SURFACES = {
    "rlhfspec.actors.reward_server.score_schema.ScoreAnswer",
    "rlhfspec.actors.reward_server.score_schema.ScoredSample",
    "rlhfspec.cluster.serving.request_bodies.*",
}
"Models whose keys the tables of `core/surfaces` name; the first two are answers, which we write too."


@pytest.mark.parametrize(
    ("root", "place"), PLACES, ids=[f"{root.__name__}-{place}" for root, place in PLACES]
)
def test_every_section_of_a_config_refuses_a_key_that_it_does_not_have(
    root: type[Section], place: str, tmp_path: Path
) -> None:
    tree: Any = {"zzz_new_ability": 1}
    for name in reversed(place.split(".") if place else []):
        tree = {name.removesuffix("[]"): [tree] if name.endswith("[]") else tree}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match="zzz_new_ability"):
        load_config_of(root, file)


def models() -> Iterator[type[BaseModel]]:
    waiting: list[type[BaseModel]] = [BaseModel]
    while waiting:
        for one in waiting.pop().__subclasses__():
            waiting.append(one)
            if one.__module__.startswith("rlhfspec."):
                yield one


def test_every_model_of_pydantics_refuses_unknown_keys_or_has_a_table() -> None:
    for package in (settings, actors_serving, cluster_serving):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    found = {f"{one.__module__}.{one.__qualname__}": one for one in models()}
    assert len(found) > 40
    silent = {
        name
        for name, one in found.items()
        if one.model_config.get("extra") != "forbid"
        if name not in READ_BY_SURFACES and f"{one.__module__}.*" not in READ_BY_SURFACES
    }
    assert silent == set()


def test_arguments_of_a_served_reward_are_refused_by_name() -> None:
    for tree in ({"zzz_new_ability": 1}, {"reward": {"kind": "chain", "zzz_new_ability": 1}}):
        with pytest.raises(ConfigError, match="zzz_new_ability"):
            build(tree)


@pytest.mark.parametrize("place", ["", "samples.0", "samples.0.messages.0", "samples.0.turns.0"])
def test_a_body_of_the_reward_server_is_refused_by_the_name_of_the_key(place: str) -> None:
    turn = {"role": "user", "content": "a"}
    facts = {"sample_index": 0, "num_tokens": 1, "finish_reason": "stop"}
    body: Any = {"samples": [{"response": "a", "messages": [turn], "turns": [dict(turn)], **facts}]}
    ScoreBody.model_validate(body)
    below: Any = body
    for name in place.split(".") if place else []:
        below = below[int(name) if name.isdigit() else name]
    below["zzz_new_ability"] = 1
    with pytest.raises(ValidationError) as refused:
        ScoreBody.model_validate(body)
    answer = asyncio.run(wrong_body(cast(Any, None), RequestValidationError(refused.value.errors())))
    assert answer.status_code == 422 and b"zzz_new_ability" in answer.body
