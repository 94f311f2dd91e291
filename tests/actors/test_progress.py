"""What polls tell of running samples: the same mapping on the other side."""

import pickle

import numpy as np
import pytest
from ray import cloudpickle

from actors.progress import Progress
from core.records import SampleKey, Stream

TOLD = {
    SampleKey(run_seed=7, stream=Stream.EVAL, sample_index=2**63 + 1): np.array([5, 6, 7]),
    SampleKey(run_seed=7, sample_index=0): np.zeros(0, dtype=np.int64),
    SampleKey(run_seed=8, stream=Stream.BENCH, sample_index=1): np.array([9]),
}


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
@pytest.mark.parametrize("told", [TOLD, {}])
def test_the_same_keys_and_tokens_arrive(pickler, told) -> None:
    arrived = pickler.loads(pickler.dumps(Progress(told), protocol=5))
    assert list(arrived) == list(told)
    assert [row.tolist() for row in arrived.values()] == [row.tolist() for row in told.values()]
    assert all(row.dtype == np.int64 for row in arrived.values())


def test_it_travels_as_few_objects() -> None:
    """The size of what is sent beside the tokens: a key and an array of its own were hundreds of bytes each."""
    rows = {SampleKey(run_seed=1, sample_index=i): np.arange(300) for i in range(128)}
    apart = len(pickle.dumps(Progress(rows), protocol=5)) - 128 * 300 * 8
    assert apart < 16 * 128
