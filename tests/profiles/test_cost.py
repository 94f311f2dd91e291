"""The cost model: monotone and never negative, whatever the coefficients; fits find synthetic costs again."""

from dataclasses import replace

import numpy as np
import pytest
from hand_tables import drawn_shapes, noisy_table, truth

from rlhfspec.profiles.cost import (
    CostModel,
    CostTable,
    Shape,
    as_recorded,
    draft_terms,
    fit_costs,
    rest_terms,
    verify_terms,
)


def random_model(random: np.random.Generator) -> CostModel:
    """Coefficients of very unlike sizes, some of them nought."""
    one = drawn_shapes(1, random)

    def drawn(count: int) -> tuple[float, ...]:
        return tuple((10 ** random.uniform(-7, -3, count) * (random.random(count) < 0.7)).tolist())

    return CostModel(
        draft=drawn(len(draft_terms(one))),
        verify=drawn(len(verify_terms(one))),
        rest=drawn(len(rest_terms(one))),
    )


def moved(shape: Shape, **by: float) -> Shape:
    return replace(shape, **{name: np.asarray(getattr(shape, name)) + step for name, step in by.items()})


def some_models() -> list[CostModel]:
    random = np.random.default_rng(0)
    drawn = [random_model(random) for _ in range(20)]
    return [*drawn, *(fit_costs(noisy_table(seed, noise=0.3)) for seed in range(3))]


@pytest.mark.parametrize("name", ["num_samples", "context_tokens", "levels", "width"])
def test_drafting_never_gets_cheaper_with_more_of_anything(name: str) -> None:
    shape = drawn_shapes(300, np.random.default_rng(1))
    for model in some_models():
        assert (np.diff([model.draft_s(moved(shape, **{name: by})) for by in range(12)], axis=0) >= 0).all()


@pytest.mark.parametrize(
    "by",
    [
        {"num_samples": 1},
        {"context_tokens": 64},
        {"width": 1},
        {"widest": 1},
        {"widest": 1, "num_samples": 2, "context_tokens": 100, "num_nodes": 1},
    ],
    ids=lambda by: "+".join(by),
)
def test_a_step_never_gets_cheaper_with_more_of_anything(by: dict[str, float]) -> None:
    shape = drawn_shapes(300, np.random.default_rng(2))
    steps = [moved(shape, **{name: step * n for name, step in by.items()}) for n in range(12)]
    for model in some_models():
        for predicted in (model.verify_s, model.rest_s):
            seconds = np.array([predicted(s) for s in steps])
            assert (np.diff(seconds, axis=0) >= -1e-12).all()


def test_more_nodes_for_every_sample_never_get_cheaper() -> None:
    n = np.arange(40.0)
    for model in some_models():
        for batch in (1.0, 3.0, 32.0):
            for width in (1.0, 3.0):
                uniform = Shape(
                    num_samples=batch,
                    context_tokens=300 * batch,
                    num_nodes=batch * n,
                    widest=n,
                    levels=4.0,
                    width=width,
                )
                assert (np.diff(model.verify_s(uniform)) >= -1e-12).all()
                assert (np.diff(model.rest_s(uniform)) >= -1e-12).all()


def test_more_nodes_in_a_ragged_batch_never_get_cheaper() -> None:
    nodes = np.arange(8.0, 8 * 6)
    for model in some_models():
        ragged = Shape(
            num_samples=8.0, context_tokens=999.0, num_nodes=nodes, widest=6.0, levels=6.0, width=1.0
        )
        assert (np.diff(model.verify_s(ragged)) >= -1e-12).all()


def test_predictions_of_a_fit_are_never_negative() -> None:
    for seed in range(3):
        model = fit_costs(noisy_table(seed, count=60, noise=0.8))
        for phase in (model.draft, model.verify, model.rest):
            assert min(phase) >= 0.0 and np.isfinite(phase).all()
        shape = drawn_shapes(500, np.random.default_rng(seed + 10))
        assert model.draft_s(shape).min() >= 0.0
        assert model.verify_s(shape).min() >= 0.0
        assert model.rest_s(shape).min() >= 0.0


def test_a_fit_finds_synthetic_costs_again() -> None:
    model = fit_costs(noisy_table(3))
    unseen = drawn_shapes(400, np.random.default_rng(99))
    for predicted, true in zip(
        (model.draft_s(unseen), model.verify_s(unseen), model.rest_s(unseen)), truth(unseen), strict=True
    ):
        error = np.abs(predicted / true - 1)
        assert np.median(error) < 0.02
        assert np.quantile(error, 0.95) < 0.06


def test_a_fit_reproduces_the_knee_in_verification_cost() -> None:
    model = fit_costs(noisy_table(4))
    tokens = np.array([1.0, 8, 16, 64, 128, 256]) - 1
    one = Shape(num_samples=1.0, context_tokens=200.0, num_nodes=tokens, widest=tokens, levels=1.0, width=1.0)
    # one sample of 16 nodes at most was seen: batches carry the tokens
    many = replace(one, num_samples=tokens + 1, num_nodes=0.0, widest=0.0, levels=0.0)
    slope = np.diff(model.verify_s(many)) / np.diff(tokens)
    assert slope[0] < 1.5e-4
    assert slope[-1] == pytest.approx(3.4e-4, rel=0.25)


def test_slow_outlier_steps_do_not_bias_the_fit() -> None:
    clean = noisy_table(5, noise=0.02)
    random = np.random.default_rng(6)
    hit = random.random(len(clean)) < 0.05
    slow = replace(
        clean,
        draft_s=np.where(hit, clean.draft_s * 20, clean.draft_s),
        verify_s=np.where(hit, clean.verify_s * 20, clean.verify_s),
        rest_s=np.where(hit, clean.rest_s * 20, clean.rest_s),
    )
    model = fit_costs(slow)
    unseen = drawn_shapes(300, np.random.default_rng(7))
    for predicted, true in zip(
        (model.draft_s(unseen), model.verify_s(unseen), model.rest_s(unseen)), truth(unseen), strict=True
    ):
        assert np.median(np.abs(predicted / true - 1)) < 0.04


def test_plain_decoding_costs_the_constant_parts_only() -> None:
    model = random_model(np.random.default_rng(8))
    plain = Shape(num_samples=4.0, context_tokens=400.0, num_nodes=0.0, widest=0.0, levels=0.0, width=1.0)
    assert float(model.draft_s(plain)) == pytest.approx(model.draft[0])
    assert float(model.rest_s(plain)) == pytest.approx(model.rest[0] + 4 * model.rest[1] + 4 * model.rest[2])


def test_terms_by_hand() -> None:
    shape = Shape(num_samples=3.0, context_tokens=100.0, num_nodes=7.0, widest=4.0, levels=2.0, width=2.0)
    # 6 draft tokens a level: 2 above the first hinge
    assert draft_terms(shape) == [1, 1, 3, 100, 2, 12, 4, 0, 0, 0, 200, 2, 24]
    # 10 tokens in 15 rows: 6 above the first hinge, 2 above the second; ragged
    assert verify_terms(shape) == [1, 3, 10, 6, 2, 0, 0, 0, 0, 0, 0, 0, 100, 400, 15, 1, 15, 15]
    assert rest_terms(shape) == [1, 3, 15, 1, 1, 12]


def test_where_keeps_the_rows_under_the_mask() -> None:
    table = noisy_table(9, count=20)
    mask = np.asarray(table.shape.num_samples) > 2
    kept = table.where(mask)
    assert len(kept) == len(kept.shape) == mask.sum()
    assert kept.verify_s.tolist() == table.verify_s[mask].tolist()
    assert np.asarray(kept.shape.levels).tolist() == np.asarray(table.shape.levels)[mask].tolist()


def test_a_recorded_batch_costs_what_its_recording_computes() -> None:
    model = replace(random_model(np.random.default_rng(9)), recorded_samples=(1, 2, 4, 8, 12))
    bare = replace(model, recorded_samples=())

    def shape(samples: float, nodes: float, widest: float) -> Shape:
        return Shape(
            num_samples=samples, context_tokens=900.0, num_nodes=nodes, widest=widest, levels=2.0, width=2.0
        )

    for phase in ("draft_s", "verify_s"):
        padded, unpadded = getattr(model, phase), getattr(bare, phase)
        assert padded(shape(5.0, 15.0, 3.0)) == unpadded(shape(8.0, 24.0, 3.0))
        assert padded(shape(8.0, 0.0, 0.0)) == unpadded(shape(8.0, 0.0, 0.0))
        # beyond the largest, and ragged: as they come
        assert padded(shape(13.0, 39.0, 3.0)) == unpadded(shape(13.0, 39.0, 3.0))
        assert padded(shape(5.0, 14.0, 3.0)) == unpadded(shape(5.0, 14.0, 3.0))


def test_a_fit_by_recorded_shape_predicts_every_number_of_samples() -> None:
    counts, drawn = (1, 2, 4, 8, 12, 16, 24, 32), noisy_table(5).shape
    samples = np.random.default_rng(6).integers(1, 33, len(drawn)).astype(float)
    # every sample has as many nodes as the widest: what recordings serve
    shape = replace(drawn, num_samples=samples, num_nodes=samples * drawn.widest)
    draft_s, verify_s, rest_s = truth(as_recorded(shape, counts))
    table = CostTable(shape=shape, draft_s=draft_s, verify_s=verify_s, rest_s=rest_s)
    errors = [
        np.quantile(np.abs(fit_costs(table, recorded).verify_s(shape) / verify_s - 1), 0.9)
        for recorded in (counts, ())
    ]
    assert errors[0] < 0.05 and errors[1] > 3 * errors[0], errors
