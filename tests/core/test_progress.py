"""What polls tell of running samples: the same mapping on the other side."""

import pickle

import pytest
from ray import cloudpickle

from rlhfspec.core.progress import Progress
from rlhfspec.core.records import SampleKey, Stream

TOLD = {
    SampleKey(run_seed=7, stream=Stream.EVAL, sample_index=2**63 + 1): 3,
    SampleKey(run_seed=7, sample_index=0): 0,
    SampleKey(run_seed=8, stream=Stream.BENCH, sample_index=1): 1,
}


def progress_of(told: dict[SampleKey, int]) -> Progress:
    return Progress(list(told), list(told.values()))


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
@pytest.mark.parametrize("told", [TOLD, {}])
def test_progress_survives_pickling(pickler, told) -> None:
    progress = progress_of(told)
    arrived = pickler.loads(pickler.dumps(progress, protocol=5))
    assert list(arrived.items()) == list(told.items()) == list(progress.items())
    assert isinstance(arrived, dict) and len(progress) == len(told)


def test_progress_pickles_to_few_bytes_a_sample() -> None:
    """A key of its own was hundreds of bytes for each sample."""
    told = progress_of({SampleKey(run_seed=1, sample_index=i): 300 for i in range(128)})
    assert len(pickle.dumps(told, protocol=5)) < 16 * 128
