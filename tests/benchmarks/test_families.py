"""Which families run: the trial sees what is wrong, the committed page says what is found."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import rlhfspec.engine.model.stock_forward
from rlhfspec.benchmarks.models import trial
from rlhfspec.benchmarks.models.bench import GOOD, page, row, rows_of
from rlhfspec.benchmarks.models.configs import TABLES, Family, all_families, build_model, quick_families
from rlhfspec.benchmarks.models.trial import (
    CorruptionError,
    Finding,
    GuardedMemory,
    Guards,
    try_families,
    try_family,
)
from rlhfspec.engine.cache.kv_memory import PoolShape
from rlhfspec.engine.cache.kv_pool import KVPool
from rlhfspec.engine.engine import Engine

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"
ALL = "RLHFSPEC_ALL_FAMILIES"
LLAMA = Family(model_type="llama")


def require_page(findings: list[Finding]) -> None:
    written = rows_of(PAGE.read_text())
    found = {finding.name: row(finding) for finding in findings}
    assert found == {name: written.get(name) for name in found}, (
        "docs/reference/models.md is not what is found: rlhfspec bench models --out DIR, then copy DIR/models.md there"
    )


def test_a_dozen_families_become_what_the_page_says() -> None:
    families = quick_families()
    assert len(families) == len(TABLES["quick"])
    findings = try_families(families)
    require_page(findings)
    assert {"exact", "fast only", "refused"} == {finding.outcome for finding in findings}
    assert sum(finding.accepted for finding in findings) > 50, "drafts are accepted, so trees are judged"


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get(ALL), reason=f"minutes: set {ALL}=1 to try all families")
def test_every_family_becomes_what_the_page_says() -> None:
    findings = try_families(all_families())
    require_page(findings)
    assert {finding.outcome for finding in findings} <= set(GOOD)


def test_the_page_has_every_family_and_no_fault() -> None:
    text = PAGE.read_text()
    rows = rows_of(text)
    assert {outcome for _, outcome, _ in rows.values()} <= set(GOOD)
    if f"transformers {transformers.__version__} " not in text:
        pytest.skip("the page is of another version of transformers")
    assert set(rows) == {family.name for family in all_families()} >= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_a_page_is_read_as_it_was_written() -> None:
    findings = [
        Finding(name="llama", outcome="exact"),
        Finding(
            name="lfm2, with a note", outcome="refused", reason="ModelError: Lfm2 is not supported: it | that"
        ),
    ]
    rows = rows_of(page(findings, version="1.2.3", tolerance=1e-3))
    assert rows == {finding.name: row(finding) for finding in findings}
    assert rows["lfm2, with a note"][2] == "it / that"


def test_every_run_builds_the_same_model() -> None:
    one, other = build_model(LLAMA).state_dict(), build_model(LLAMA).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Engine], None]], None]:
    """Let something happen to every engine that the trial builds."""

    def change(damage: Callable[[Engine], None]) -> None:
        built = trial.build_engine

        def build(*arguments: object, **options: object) -> Engine:
            made = built(*arguments, **options)  # type: ignore[arg-type]
            damage(made)
            return made

        monkeypatch.setattr(trial, "build_engine", build)

    return change


def test_an_engine_with_other_weights_is_found_wrong(engines) -> None:
    def damage(made: Engine) -> None:
        generator = torch.Generator().manual_seed(1)
        shapes = made.runner.model.shapes
        made.runner.load({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})

    engines(damage)
    finding = try_family(LLAMA)
    assert finding.outcome == "wrong", finding
    assert "off the rule" in finding.reason


def test_a_log_probability_that_is_off_is_found_wrong(engines, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = Engine.generate

    def shifted(self: Engine, requests: object) -> list:
        done = generate(self, requests)  # type: ignore[arg-type]
        for completion in done:
            completion.policy_logprobs[-1] += 0.01
        return done

    monkeypatch.setattr(Engine, "generate", shifted)
    assert try_family(LLAMA).outcome == "wrong"


def test_an_error_that_is_not_ours_is_found(engines) -> None:
    def damage(made: Engine) -> None:
        made.runner._forward = None  # type: ignore[assignment]

    engines(damage)
    finding = try_family(LLAMA)
    assert finding.outcome == "raw exception"
    assert "Error" in finding.trace


def test_a_family_that_cannot_be_built_says_why() -> None:
    finding = try_family(Family(model_type="llama", settings={"hidden_act": "no such thing"}))
    assert finding.outcome == "not built"
    assert "no such thing" in finding.reason


def test_a_write_beside_a_buffer_is_found() -> None:
    with Guards() as guards:
        buffer = _engine_allocates(torch.ones(3), 4)
        guards.require_intact()
        buffer = _engine_allocates(torch.ones(3), 4)
        ctypes.memset(buffer.data_ptr() + buffer.nbytes, 0, 1)
        with pytest.raises(CorruptionError, match="beside a buffer"):
            guards.require_intact()
    assert torch.ones(3).new_zeros(4).storage_offset() == 0, "what was replaced is put back"


def _engine_allocates(like: torch.Tensor, size: int) -> torch.Tensor:
    """As a module of the engine does."""
    names = {"__name__": "rlhfspec.engine.cpu.segments", "like": like, "size": size}
    exec("made = like.new_zeros(size)", names)
    return names["made"]  # type: ignore[return-value]


def try_without_shape_checks(family: Family) -> Finding:
    """What the engine did before it compared keys with the pool; in a process that ends with it."""
    rlhfspec.engine.model.stock_forward._require_shape = lambda *arguments: None
    KVPool.require_cells = lambda *arguments: None  # type: ignore[method-assign]
    return try_family(family)


def test_a_layer_of_another_shape_than_the_pool_would_be_seen_to_corrupt_memory() -> None:
    family = Family(model_type="gpt_bigcode", settings={"multi_query": False, "num_key_value_heads": 1})
    (finding,) = try_families([family], attempt=try_without_shape_checks)
    assert finding.outcome == "corruption", finding


def touch_behind_the_pool(family: Family) -> Finding:
    return _touch(family, behind=True)


def touch_before_the_pool(family: Family) -> Finding:
    return _touch(family, behind=False)


def _touch(family: Family, *, behind: bool) -> Finding:
    shape = PoolShape(
        num_layers=1, num_slots=1, num_kv_heads=1, capacity=32, head_size=8, dtype=torch.float32
    )
    memory = GuardedMemory(shape, torch.device("cpu"))
    memory.cells.fill_(1.0)
    end = memory.cells.data_ptr() + memory.cells.nbytes
    ctypes.memset(end if behind else end - 17 * 4096, 0, 1)
    return Finding(name=family.name, outcome="exact")


@pytest.mark.parametrize("attempt", [touch_behind_the_pool, touch_before_the_pool])
def test_a_touch_outside_the_pool_ends_one_process_and_is_corruption(
    attempt: Callable[[Family], Finding],
) -> None:
    (finding,) = try_families([LLAMA], attempt=attempt)
    assert finding.outcome == "corruption"
    assert signal.Signals.SIGSEGV.name in finding.reason
