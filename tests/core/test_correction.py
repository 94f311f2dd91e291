"""Corrections: what a kind sets, when the trainer's own log-probabilities are computed, what is biased and refused."""

import pytest
from pydantic import ValidationError

from rlhfspec.core.config import TrainerConfig
from rlhfspec.core.settings.algorithm import AlgorithmConfig
from rlhfspec.core.settings.correction import (
    CORRECTIONS,
    CorrectionConfig,
    correction_warning,
    require_correction,
)

WEIGHING = [kind for kind in CORRECTIONS if kind not in ("none", "geometric")]


def test_parts_replace_those_of_the_row():
    row = CorrectionConfig(kind="icepop")
    assert (row.weight, row.weight_cap, row.mask, row.band) == ("token", None, "token", (0.5, 5.0))
    assert CorrectionConfig(kind="icepop", mask_high=3.0).band == (0.5, 3.0)
    assert CorrectionConfig(kind="geometric").band == (1 / 1.01, 1.01)
    assert CorrectionConfig(**CorrectionConfig(kind="mis").model_dump()) == CorrectionConfig(kind="mis")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        # the proximal policy of decoupled PPO is what the trainer computes before its first step
        (
            {"kind": "decoupled", "old_logprobs": "sampler"},
            "kind decoupled compares .* every weight would be 1",
        ),
        ({"kind": "icepop", "old_logprobs": "sampler"}, "kind icepop compares"),
        ({"mask": "sequence", "old_logprobs": "sampler"}, "weight none, mask sequence compares"),
        ({"kind": "none", "weight": "token"}, "kind none corrects nothing, and weight token does"),
        ({"mask_low": 0.5}, "mask_low 0.5 is of a mask, and mask is none"),
        ({"kind": "icepop", "mask_low": 1.0}, "keeps ratios from 1.0 to 5.0"),
        ({"kind": "icepop", "mask_high": 1.0}, "greater than 1"),
        ({"kind": "tis", "weight_cap": 0.9}, "greater than or equal to 1"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(given, message):
    with pytest.raises(ValidationError, match=message):
        CorrectionConfig(**given)


def test_the_configs_of_earlier_runs_are_read_where_they_corrected_nothing():
    former = {"old_logprobs": "auto", "importance_sampling": "off", "importance_sampling_cap": 2.0}
    assert AlgorithmConfig(kind="grpo", **former) == AlgorithmConfig(kind="grpo")
    with pytest.raises(ValidationError, match=r"old_logprobs is correction\.old_logprobs now"):
        AlgorithmConfig(kind="grpo", **former | {"old_logprobs": "trainer"})


@pytest.mark.parametrize("algorithm", ["gspo", "rloo"])
@pytest.mark.parametrize(("kind", "part"), [("tis", "weight"), ("decoupled", "weight"), ("icepop", "weight")])
def test_tokens_are_not_corrected_in_an_objective_of_responses(algorithm, kind, part):
    with pytest.raises(
        ValidationError, match=rf"correction\.{part} token .* ratio_level sequence.* sequence_tis"
    ):
        AlgorithmConfig(kind=algorithm, correction={"kind": kind})
    with pytest.raises(ValidationError, match=r"correction\.mask token .* ratio_level sequence"):
        AlgorithmConfig(kind=algorithm, correction={"weight": "sequence", "mask": "token"})
    for fits in ("sequence_tis", "mis", "geometric"):
        AlgorithmConfig(kind=algorithm, correction={"kind": fits})


@pytest.mark.parametrize("kind", WEIGHING)
def test_stale_samples_are_weighed(kind):
    correction = CorrectionConfig(kind=kind)
    require_correction(correction, 2)
    assert correction_warning(correction, 2) is None
    assert correction.recomputes_old(is_exact=True, max_staleness=2)


def test_stale_samples_without_weights_are_refused_unless_that_is_said():
    require_correction(CorrectionConfig(), 0)
    with pytest.raises(
        ValueError, match=r"max_staleness is 2: .* 2 versions older .* set algorithm\.correction\.kind"
    ):
        require_correction(CorrectionConfig(), 2)
    with pytest.raises(
        ValueError, match=r"max_staleness is 1, .* kind geometric, which rejects and does not weigh"
    ):
        require_correction(CorrectionConfig(kind="geometric"), 1)
    require_correction(CorrectionConfig(kind="geometric", weight="sequence"), 1)
    require_correction(CorrectionConfig(kind="none"), 2)


def test_a_run_that_says_none_is_warned_of_what_it_then_learns():
    none = CorrectionConfig(kind="none")
    assert correction_warning(none, 0) is None
    assert "clipped about old weights" in (correction_warning(none, 1) or "")
    naive = CorrectionConfig(kind="none", old_logprobs="trainer")
    assert "stale samples count as new ones" in (correction_warning(naive, 1) or "")


@pytest.mark.parametrize(
    ("given", "is_exact", "max_staleness", "expected"),
    [
        ({}, True, 0, False),
        ({}, False, 0, True),
        ({"kind": "decoupled"}, True, 0, False),
        ({"kind": "decoupled"}, True, 1, True),
        ({"kind": "none"}, False, 1, False),
        ({"kind": "none", "old_logprobs": "trainer"}, True, 1, True),
        ({"old_logprobs": "sampler"}, False, 0, False),
    ],
)
def test_the_trainers_own_logprobs_are_computed_where_they_differ_from_the_samplers(
    given, is_exact, max_staleness, expected
):
    correction = CorrectionConfig(**given)
    assert correction.recomputes_old(is_exact=is_exact, max_staleness=max_staleness) is expected


@pytest.mark.parametrize(
    ("compute_dtype", "scoring", "expected"),
    [
        ("auto", "model", False),
        ("float32", "model", False),
        ("bfloat16", "model", True),
        ("bfloat16", "engine", False),
    ],
)
def test_products_in_bfloat16_count_as_another_rounding_unless_the_engine_scores(
    compute_dtype, scoring, expected
):
    trainer = TrainerConfig(compute_dtype=compute_dtype, scoring=scoring)
    assert trainer.scores_in_bfloat16 is expected


def test_a_word_is_a_kind_and_a_band_needs_a_mask() -> None:
    assert AlgorithmConfig.model_validate({"correction": "tis"}).correction.kind == "tis"
    assert AlgorithmConfig.model_validate({"correction": None}).correction == CorrectionConfig()
    with pytest.raises(ValueError, match=r"mask_high 3.0 is of a mask, and mask is none"):
        CorrectionConfig(mask_high=3.0)
    with pytest.raises(ValueError, match="kind tis with weight none and mask none corrects nothing"):
        CorrectionConfig(kind="tis", weight="none")
