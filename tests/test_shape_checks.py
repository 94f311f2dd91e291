"""What the short way of `tests/helpers/shape_checks.py` refuses is what jaxtyping refuses."""

from __future__ import annotations

import beartype
import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation, BeartypeCallHintReturnViolation
from jaxtyping import Float, config
from torch import Tensor

from tests.helpers.shape_checks import checked


@pytest.fixture(autouse=True)
def _with_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "jaxtyping_disable", False)


@checked(typechecker=beartype.beartype)
def total(values: Float[Tensor, "B V"], weights: Float[Tensor, " V"]) -> Float[Tensor, " B"]:
    return values @ weights


@checked(typechecker=beartype.beartype)
def first(rows: list[Float[Tensor, " V"]]) -> int:
    return len(rows[0])


@checked(typechecker=beartype.beartype)
def doubled(number: int) -> str:
    return number + number  # type: ignore[return-value]


def test_shapes_are_bound_by_name() -> None:
    assert total(torch.ones(2, 3), torch.ones(3)).tolist() == [3.0, 3.0]
    with pytest.raises(Exception, match=r"parameter 'weights'"):
        total(torch.ones(2, 3), torch.ones(2))


def test_arrays_inside_other_types_are_seen() -> None:
    assert first([torch.ones(3)]) == 3
    with pytest.raises(Exception, match="Type-check error"):
        first([torch.ones(3, 1)])


def test_types_without_arrays_are_checked_of_arguments_and_of_what_is_returned() -> None:
    with pytest.raises(BeartypeCallHintParamViolation):
        doubled("two")  # type: ignore[arg-type]
    with pytest.raises(BeartypeCallHintReturnViolation):
        doubled(2)


def test_where_checks_are_off_so_are_these(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    assert doubled(2) == 4
