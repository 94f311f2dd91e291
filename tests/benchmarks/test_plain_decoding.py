"""Plain decoding beside others: every engine's rate is taken, and shares follow from numbers counted by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from random_pair import save_random_pair
from rich.console import Console

from rlhfspec.benchmarks.speed import plain
from rlhfspec.benchmarks.support.timing import Figures, Rate
from rlhfspec.benchmarks.support.workload import Workload
from rlhfspec.core.records import Prompt, SamplingParams
from rlhfspec.learning.models.make import PairPaths
from rlhfspec.learning.models.tokenization import character_tokenizer
from rlhfspec.learning.tasks.chain_task import ALPHABET

TOKENIZER = character_tokenizer(ALPHABET)
V, H, INNER, LAYERS, NEW = len(TOKENIZER), 32, 64, 2, 6
RATES = {"ours": 30.0, "ours_bf16": 60.0, "hf": 10.0, "copy": 1e6}


def tiny(folder: Path, *, tied: bool) -> Workload:
    """Two prompts of 5 tokens; two heads of 16, over one of keys and values."""
    save_random_pair(folder, TOKENIZER, positions=32, target_layers=LAYERS, tied=tied)
    return Workload(
        name="tiny",
        paths=PairPaths(target=folder / "target", draft=folder / "draft"),
        known_tokenizer=TOKENIZER,
        prompts=[Prompt(prompt_id=number, token_ids=np.arange(1, 6) + number) for number in range(2)],
        sampling=SamplingParams(max_new_tokens=NEW, temperature=0.0),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "threads", "end"), [(True, 1, "_b2"), (False, 2, "_b2_t2")])
def test_a_share_is_what_steps_read_over_what_is_copied(
    tied: bool, threads: int, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(rates: Mapping[str, Rate], rounds: int) -> dict[str, list[float]]:
        assert all(rate() > 0 for rate in rates.values()) and rates.keys() == RATES.keys()
        return {name: [value] * rounds for name, value in RATES.items()}

    monkeypatch.setattr(plain, "interleaved", given)
    monkeypatch.setattr(plain, "available_peers", list)
    monkeypatch.setattr(plain, "COPIED_BYTES", 1 << 10)
    figures = Figures()
    rows = plain.plain_decoding({2: tiny(tmp_path, tied=tied)}, figures, 1, Console(), threads=threads)

    layer = 2 * H * H + 2 * 16 * H + 3 * H * INNER + 2 * H
    weights, cells, context = LAYERS * layer + H + V * H, 2 * LAYERS * 16, 5 + NEW / 2
    assert figures.values[f"share_ours{end}"] == pytest.approx(30e-6 * 4 * (weights / 2 + cells * context))
    bfloat16 = 60e-6 * (2 * weights / 2 + 4 * cells * context)
    assert figures.values[f"share_ours_bf16{end}"] == pytest.approx(bfloat16)
    assert figures.values[f"plain_over_hf{end}"] == 3.0 and figures.values[f"bf16_over_hf_fp32{end}"] == 6.0
    assert {row["contestant"] for row in rows} == {"ours", "ours_bf16", "hf"}
