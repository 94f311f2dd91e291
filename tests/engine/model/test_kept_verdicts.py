"""The probe's verdict is kept for what it depends on, and for nothing else."""

from pathlib import Path

import pytest

from rlhfspec.core.config import EngineConfig, SpeculationConfig
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.model.invariance_probe import KeptVerdicts, facts_of

SETTINGS = {"device": "cpu", "numerics": "invariant", "max_running_samples": 2}


def built(new_model, folder: Path, *, seed: int = 1, slots: int = 2) -> Engine:
    return build_engine(
        new_model(seed, "float32"),
        None,
        engine=EngineConfig(**SETTINGS | {"max_running_samples": slots}),
        speculation=SpeculationConfig(policy="off"),
        max_total_tokens=100,
        verdicts=KeptVerdicts(folder),
    )


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_a_verdict_is_kept_once_for_a_models_shapes_and_sizes(new_model, tmp_path: Path) -> None:
    folder = tmp_path / "probes"
    facts = facts_of(built(new_model, folder).runner, max_nodes=0)
    (kept,) = files(folder)
    written = kept.stat().st_mtime_ns
    assert KeptVerdicts(folder).read(facts) == "holds"
    built(new_model, folder, seed=2)
    assert files(folder) == [kept] and kept.stat().st_mtime_ns == written, "other weights, equal shapes"
    built(new_model, folder, slots=3)
    assert len(files(folder)) == 2
    for part in ("device", "code", "threads", "packages", "backend", "attention"):
        assert KeptVerdicts(folder).read(facts | {part: "other"}) is None


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b"[" * 200_000, b'{"verdict": "holds"}', "flip", "exchange"]
)
def test_a_damaged_verdict_is_none_and_is_written_anew(
    new_model, tmp_path: Path, damage: bytes | str
) -> None:
    facts = facts_of(built(new_model, tmp_path).runner, max_nodes=0)
    (kept,) = files(tmp_path)
    whole = kept.read_bytes()
    if isinstance(damage, bytes):
        kept.write_bytes(damage)
    else:
        new = b'"holds_unpacked"' if damage == "exchange" else b'"hold3"'
        kept.write_bytes(whole.replace(b'"holds"', new, 1))
    assert KeptVerdicts(tmp_path).read(facts) is None
    built(new_model, tmp_path)
    assert kept.read_bytes() == whole


def test_where_nothing_can_be_written_the_probe_runs_each_time(new_model, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert built(new_model, tmp_path / "file" / "probes").numerics == "invariant"
