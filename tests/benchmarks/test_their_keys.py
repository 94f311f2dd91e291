"""The tables of others' keys: each key of ours exists, and those of TRL are its configs' fields, all of them."""

from __future__ import annotations

import ast
import dataclasses
import tomllib
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import pytest
from transformers import TrainingArguments

from rlhfspec.benchmarks.pages.reference import THEIR_KEYS, _sections
from rlhfspec.benchmarks.peers.build import TRL_RELEASES, trl_folder
from rlhfspec.core.config import Config
from rlhfspec.core.settings.supervised import DpoConfig, SftConfig, TrainRewardConfig

CONFIGS = {"train": Config, "sft": SftConfig, "train-reward": TrainRewardConfig, "dpo": DpoConfig}
TABLES = [
    (file.stem, name, table)
    for file in sorted(THEIR_KEYS.glob("*.toml"))
    for name, table in tomllib.loads(file.read_text()).items()
    if isinstance(table, dict)
]


@pytest.mark.parametrize(("trainer", "name", "table"), TABLES, ids=lambda part: str(part)[:20])
def test_every_key_of_ours_exists(trainer: str, name: str, table: dict[str, Any]) -> None:
    for command in table["config"]:
        known = {f"{at}.{key}" for at, one in _sections(CONFIGS[command], "") for key in one.model_fields}
        ours = {key for text in table["keys"].values() for key in text.split(" | ")[0].split(", ")}
        assert ours <= known, f"{trainer}.{name}: {sorted(ours - known)}"


def fields(config: str) -> set[str]:
    """Of a config of TRL, in any release that is here, by its source alone."""
    folders = [folder for folder in map(trl_folder, TRL_RELEASES) if folder is not None]
    if not folders:
        pytest.skip("no TRL: python -m rlhfspec.benchmarks.peers.build --only trl (make bench-peers)")
    found = {one.name for one in dataclasses.fields(TrainingArguments)}
    for folder, name in product(folders, ("base", config.removesuffix("Config").lower())):
        file = folder / "trl" / "trainer" / f"{name}_config.py"
        if not file.exists():  # in this release
            continue
        tree = ast.parse(file.read_text())
        lines = [line for one in tree.body if isinstance(one, ast.ClassDef) for line in one.body]
        found |= {ast.unparse(line.target) for line in lines if isinstance(line, ast.AnnAssign)}
    return found


def theirs(table: dict[str, Any]) -> list[str]:
    return [*table["keys"], *(name for names in table.get("without", {}).values() for name in names)]


@pytest.mark.parametrize("config", ["GRPOConfig", "SFTConfig", "RewardConfig", "DPOConfig", "KTOConfig"])
def test_every_key_of_trl_is_listed(config: str) -> None:
    named = [name for *_, table in TABLES if config in table.get("theirs", ()) for name in theirs(table)]
    assert {key for key in fields(config) if not any(fnmatchcase(key, name) for name in named)} == set()


@pytest.mark.parametrize(
    "table", [table for *_, table in TABLES if "theirs" in table], ids=lambda table: table["title"][:20]
)
def test_every_key_of_theirs_is_one_of_trl(table: dict[str, Any]) -> None:
    known = set[str]().union(*map(fields, table["theirs"]))
    assert {name for name in theirs(table) if not any(fnmatchcase(key, name) for key in known)} == set()
