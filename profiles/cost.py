"""The cost model: seconds of a decode step's phases, from what is drafted and verified (design 3.2).

    step = draft(B, context, levels, width) + verify(B, context, nodes) + rest(B, nodes)

Each phase is a sum of non-negative terms: constants, tokens, hinges above numbers of tokens (the knee, where a
forward leaves its flat part), attention over the context. So it is monotone in every argument, but where the last
missing node turns a ragged batch into a uniform one, which scatters nothing. Where decode forwards are recorded (CUDA
graphs), a uniform batch costs what the recording computes that serves it: terms take its number of samples. Fitted by
statsmodels as weighted least squares of relative errors; terms that would be negative are dropped and the rest
fitted again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

VERIFY_HINGES = (4, 8, 16, 32, 64, 128, 256)
BATCH_HINGES = (8, 32)
"Of numbers of samples, beyond which their caches no longer stay in the processor's."
DRAFT_HINGES = (4, 16, 64, 128)

Values = np.ndarray | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What decode steps draft and verify; arrays broadcast against each other."""

    num_samples: Values
    "B"
    context_tokens: Values
    "committed tokens of the whole batch"
    num_nodes: Values
    "draft nodes verified in the whole batch"
    widest: Values
    "draft nodes of the sample that has most"
    levels: Values
    "levels drafted; 0 is plain decoding"
    width: Values
    "nodes expanded a level, per sample"

    def __len__(self) -> int:
        return len(np.atleast_1d(self.num_samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Measured decode steps; arrays of one length."""

    shape: Shape
    draft_s: np.ndarray
    verify_s: np.ndarray
    rest_s: np.ndarray

    def __len__(self) -> int:
        return len(self.verify_s)

    def where(self, mask: np.ndarray) -> CostTable:
        """Return the rows under the mask."""
        shape = Shape(**{f.name: np.asarray(getattr(self.shape, f.name))[mask] for f in fields(Shape)})
        return CostTable(
            shape=shape,
            draft_s=self.draft_s[mask],
            verify_s=self.verify_s[mask],
            rest_s=self.rest_s[mask],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Coefficients of the three phases; seconds per term."""

    draft: tuple[float, ...]
    verify: tuple[float, ...]
    rest: tuple[float, ...]
    recorded_samples: tuple[int, ...] = ()
    "numbers of samples that decode forwards are recorded for, in order; none: they run as they come"

    def draft_s(self, shape: Shape) -> np.ndarray:
        """Seconds to draft: 0 for plain decoding but for the constant part."""
        return _total(self.draft, draft_terms(as_recorded(shape, self.recorded_samples)), shape)

    def verify_s(self, shape: Shape) -> np.ndarray:
        """Seconds of the target's forward."""
        return _total(self.verify, verify_terms(as_recorded(shape, self.recorded_samples)), shape)

    def rest_s(self, shape: Shape) -> np.ndarray:
        """Seconds of acceptance, commitment and the decode step's own work."""
        return _total(self.rest, rest_terms(shape), shape)


def join_costs(tables: Sequence[CostTable]) -> CostTable:
    """Put tables behind one another."""

    def joined(get: Callable[[CostTable], np.ndarray | float]) -> np.ndarray:
        return np.concatenate([np.asarray(get(table)) for table in tables])

    names = Shape.__dataclass_fields__
    return CostTable(
        shape=Shape(**{name: joined(lambda t, name=name: getattr(t.shape, name)) for name in names}),
        draft_s=joined(lambda t: t.draft_s),
        verify_s=joined(lambda t: t.verify_s),
        rest_s=joined(lambda t: t.rest_s),
    )


def fit_costs(table: CostTable, recorded_samples: tuple[int, ...] = ()) -> CostModel:
    """Fit the three phases; `recorded_samples` as of `CostModel`."""
    computed = as_recorded(table.shape, recorded_samples)
    return CostModel(
        draft=_fit(_columns(draft_terms(computed), computed), table.draft_s),
        verify=_fit(_columns(verify_terms(computed), computed), table.verify_s),
        rest=_fit(_columns(rest_terms(table.shape), table.shape), table.rest_s),
        recorded_samples=recorded_samples,
    )


def as_recorded(shape: Shape, recorded_samples: tuple[int, ...]) -> Shape:
    """Return what forwards compute for a shape: recordings fill a uniform batch up; ragged ones are not recorded."""
    if not recorded_samples:
        return shape
    samples, counts = np.asarray(shape.num_samples), np.array(recorded_samples)
    place = np.searchsorted(counts, samples)
    filled = np.where(place < len(counts), counts[np.minimum(place, len(counts) - 1)], samples)
    uniform = shape.num_nodes >= samples * shape.widest
    return replace(
        shape,
        num_samples=np.where(uniform, filled, samples),
        num_nodes=np.where(uniform, filled * shape.widest, shape.num_nodes),
    )


def draft_terms(shape: Shape) -> list[Values]:
    """Terms of the draft phase."""
    batch, context, levels, width = shape.num_samples, shape.context_tokens, shape.levels, shape.width
    drafts = levels > 0
    is_tree = width > 1
    tokens = batch * width
    terms = [1.0, drafts, drafts * batch, drafts * context]
    terms += [levels, levels * tokens, *(levels * _above(tokens, knee) for knee in DRAFT_HINGES)]
    terms += [levels * context, levels * is_tree, levels * levels * is_tree * tokens]
    return terms


def verify_terms(shape: Shape) -> list[Values]:
    """Terms of the target's forward."""
    batch, context, widest = shape.num_samples, shape.context_tokens, shape.widest
    tokens = batch + shape.num_nodes
    rows = batch * (widest + 1)
    ragged = rows > tokens
    terms = [1.0, batch, tokens]
    terms += [_above(tokens, knee) for knee in VERIFY_HINGES]
    terms += [_above(batch, knee) for knee in BATCH_HINGES]
    # attention reads the context once for every sample, and multiplies it with every row
    terms += [context, context * widest, rows, ragged, ragged * rows, (shape.width > 1) * (widest > 0) * rows]
    return terms


def rest_terms(shape: Shape) -> list[Values]:
    """Terms of everything else."""
    batch, widest = shape.num_samples, shape.widest
    drafts = widest > 0
    is_tree = (shape.width > 1) & drafts
    return [1.0, batch, batch * (widest + 1), drafts, is_tree, is_tree * batch * widest]


def _above(count: Values, knee: int) -> Values:
    """What is beyond a knee, of an array or of a number: a decode step's prediction is made of numbers."""
    return max(count - knee, 0.0) if isinstance(count, float) else np.maximum(count - knee, 0)


def _total(coefficients: Sequence[float], terms: Sequence[Values], shape: Shape) -> np.ndarray:
    """The weighted sum of the terms: plans look it up all the time, so what weighs nothing is left out."""
    extent = _extent(shape)
    seconds: Any = np.zeros(extent) if extent else 0.0
    for coefficient, term in zip(coefficients, terms, strict=True):
        if coefficient:
            seconds += coefficient * term
    return np.asarray(seconds)


def _columns(terms: Sequence[Values], shape: Shape) -> np.ndarray:
    extent = _extent(shape)
    return np.stack([np.broadcast_to(term, extent) for term in terms], axis=-1).astype(float)


def _extent(shape: Shape) -> tuple[int, ...]:
    values = (
        shape.num_samples,
        shape.context_tokens,
        shape.num_nodes,
        shape.widest,
        shape.levels,
        shape.width,
    )
    return np.broadcast_shapes(*(value.shape for value in values if isinstance(value, np.ndarray)))


def _fit(terms: np.ndarray, seconds: np.ndarray) -> tuple[float, ...]:
    """Weighted least squares with non-negative coefficients: drop the most negative term, fit again."""
    import statsmodels.api as sm

    # relative errors count, and a preempted step must not pull the fit
    weights = 1.0 / np.maximum(seconds, 1e-6) ** 2
    scale = np.maximum(np.abs(terms).max(axis=0), 1e-12)
    kept = np.nonzero(np.abs(terms).max(axis=0) > 0)[0]
    values = np.zeros(len(kept))
    for _ in range(4):
        kept, values = _non_negative(sm, terms / scale, seconds, weights, kept)
        predicted = (terms[:, kept] / scale[kept]) @ values
        error = np.abs(seconds / np.maximum(predicted, 1e-9) - 1.0)
        weights = np.minimum(1.0, 0.15 / np.maximum(error, 1e-9)) / np.maximum(predicted, 1e-6) ** 2
    coefficients = np.zeros(terms.shape[1])
    coefficients[kept] = values / scale[kept]
    return tuple(coefficients.tolist())


def _non_negative(
    sm, terms: np.ndarray, seconds: np.ndarray, weights: np.ndarray, kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    while True:
        with warnings.catch_warnings():
            # terms that a short sweep cannot tell apart share their part
            warnings.simplefilter("ignore")
            values = np.asarray(sm.WLS(seconds, terms[:, kept], weights=weights).fit().params)
        if (values >= 0).all() or len(kept) == 1:
            return kept, np.maximum(values, 0.0)
        kept = np.delete(kept, int(np.argmin(values * terms[:, kept].mean(axis=0))))
