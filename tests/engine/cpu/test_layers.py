"""Norms, rotations and gates in our own code against their formulas; the table that runs them."""

import math

import pytest
import torch

from rlhfspec.engine.cpu.program import OPERATIONS, Program, native_code

CODE = native_code(8)


@pytest.mark.parametrize("size", [8, 40, 512])
def test_norms_divide_by_the_length(size: int) -> None:
    x = torch.randn(3, 2, size, generator=torch.Generator().manual_seed(size))
    gains, out = torch.randn(2, size), torch.empty_like(x)
    lengths = (x.double().square().sum(-1, keepdim=True) + 0.25).sqrt()
    for name, factor in (("norms", torch.ones(2, size)), ("norms_gained", gains)):
        CODE.operations[name](
            out=out.data_ptr(),
            x=x.data_ptr(),
            gains=gains.data_ptr(),
            groups=3,
            lanes=2,
            size=size,
            group_stride=2 * size,
            lane_stride=size,
            floor=0.25,
        )
        torch.testing.assert_close(out.double(), x.double() / lengths * factor, rtol=1e-5, atol=1e-6)


def test_a_rotation_turns_neighbours_of_the_lanes_asked_for() -> None:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(5, 2, 4, 16, generator=random)
    rope = torch.randn(5, 8, dtype=torch.complex64, generator=random)
    expected = x.clone()
    torch.view_as_complex(expected.view(5, 2, 4, 8, 2))[:, :, :3] *= rope[:, None, None]
    CODE.operations["rotate"](
        x=x.data_ptr(), rope=rope.data_ptr(), tokens=5, heads=2, turned=3, lanes=4, size=16
    )
    torch.testing.assert_close(x, expected, rtol=1e-6, atol=1e-6)


def test_a_gate_is_silu_even_far_out() -> None:
    gate = torch.cat(
        [torch.linspace(-100, 100, 10_001), torch.tensor([0.0, -1e30, 1e30, math.nan] + [1.0] * 3)]
    )
    both = torch.stack([gate, torch.full_like(gate, 3.0)])
    out = torch.empty(1, len(gate))
    CODE.operations["gate"](out=out.data_ptr(), both=both.data_ptr(), rows=1, size=len(gate))
    exact = 3.0 * torch.nn.functional.silu(gate.double())
    torch.testing.assert_close(out[0].double(), exact, rtol=1e-5, atol=1e-35, equal_nan=True)


def test_a_program_runs_its_operations_in_order() -> None:
    """Two gates, one behind the other: an argument set before, the first or the second alone on demand."""
    x, middle, out = torch.randn(2, 16), torch.zeros(2, 8), torch.zeros(1, 8)
    program = Program(CODE)
    program.add("gate", out=middle.data_ptr(), both=x.data_ptr(), rows="rows", size=8)
    program.add("gate", out=out.data_ptr(), both=middle.data_ptr(), rows=1, size=8)
    program.close()
    silu = torch.nn.functional.silu
    program.set(rows=1)
    program.run(0, 1)
    torch.testing.assert_close(middle[0], silu(x[0, :8]) * x[0, 8:])
    assert not middle[1].any() and not out.any()
    program.set(rows=2)
    program.run()
    torch.testing.assert_close(middle, silu(x[:, :8]) * x[:, 8:])
    expected = silu(middle[0]) * middle[1]
    torch.testing.assert_close(out[0], expected)
    middle.zero_(), out.zero_()
    program.run(1)
    assert not middle.any() and not out.any()


def test_a_program_says_what_is_missing() -> None:
    program = Program(CODE)
    with pytest.raises(TypeError, match="gate takes out, both, rows, size, got out"):
        program.add("gate", out=0)
    program.add("gate", **dict.fromkeys(OPERATIONS["gate"], "all"))
    program.close()
    with pytest.raises(KeyError, match="all"):
        program.set()
    for first, count in ((0, 2), (1, 1), (-1, 1), (0, 0)):
        with pytest.raises(IndexError, match="of a program of 1"):
            program.run(first, count)
