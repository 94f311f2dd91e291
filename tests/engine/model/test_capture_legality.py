"""What a decode forward that is recorded may not do, refused while it runs on the CPU.

A CUDA graph records launches: the host reads nothing, no shape depends on data, and nothing is uploaded from memory
that the recording does not own.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhfspec.core.records import SamplingParams
from rlhfspec.engine.attention.backends import ATTENTION
from rlhfspec.engine.model.cuda_graphs import ForwardGraphs, Run
from tests.engine.test_losslessness import PROMPT_LENGTHS, Make, MakeRequests, assert_equal
from tests.helpers.backends import torch_backend

HOST_READS = {"_local_scalar_dense", "item", "equal", "allclose", "is_nonzero"}
SHAPES_BY_DATA = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
UPLOADS = {"lift_fresh", "lift_fresh_copy", "from_file"}
"What `torch.tensor` and its like do with values of the host."


class CaptureRules(TorchDispatchMode):
    """Refuses what a capture forbids; counts what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.num_calls += 1
        name = func.overloadpacket.__name__
        if name in HOST_READS | SHAPES_BY_DATA | UPLOADS:
            raise AssertionError(f"a recorded forward calls {name}, which a CUDA graph cannot hold")
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if by_mask:
            raise AssertionError(f"a recorded forward calls {name} with a mask: its shape depends on data")
        return func(*args, **(kwargs or {}))


class LawfulRecorder:
    """Runs what would be recorded under the rules of a capture, every time."""

    held_bytes = 0

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_runs = 0

    def record(self, run: Run) -> Run:
        def replay() -> torch.Tensor:
            with CaptureRules() as rules:
                result = run()
            self.num_calls += rules.num_calls
            self.num_runs += 1
            return result

        replay()
        return replay


@pytest.mark.parametrize("attention", ["ordered", "sdpa"])
@pytest.mark.parametrize("plan", ["off", "chain4", "tree8"])
def test_recorded_forwards_do_nothing_that_a_capture_forbids(
    make_engine: Make, make_requests: MakeRequests, plan: str, attention: str
) -> None:
    make = partial(make_engine, backend=torch_backend())
    requests = make_requests(PROMPT_LENGTHS, SamplingParams(max_new_tokens=8))
    engine, recorder = make(plan, batch=7), LawfulRecorder()
    runners = [engine.runner]
    if engine.drafter is not None:
        runners.append(engine.drafter.runner)  # type: ignore[attr-defined]
    for runner in runners:
        runner.graphs = ForwardGraphs(recorder, max_bytes=1)
        runner.attention = ATTENTION[attention]
    done = engine.generate(requests)
    assert recorder.num_runs > 4
    assert recorder.num_calls > 20 * recorder.num_runs, "the rules saw the kernels of the forwards"
    if attention == "ordered":
        assert_equal(done, make("off").generate(requests))


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: x + torch.tensor([1.0]),
        lambda x: bool(x.any()),
    ],
    ids=["item", "nonzero", "mask", "unique", "upload", "bool"],
)
@pytest.mark.parametrize("inference", [False, True])
def test_the_rules_refuse(forbidden: Any, inference: bool) -> None:
    """In inference mode torch takes fewer calls apart before a rule sees them."""
    with (
        torch.inference_mode(inference),
        CaptureRules(),
        pytest.raises(AssertionError, match="a recorded forward calls"),
    ):
        forbidden(torch.ones(3))
