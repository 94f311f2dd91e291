"""The other ranks of a group, as processes: `python -m benchmarks.support.rank_processes FOLDER RANK RANKS`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers.modeling_utils import PreTrainedModel

from benchmarks.support.result import ROOT
from rlhfspec.engine.group.dealing import require_dealt
from rlhfspec.engine.group.follower import Follower
from rlhfspec.engine.group.ranks import GroupRanks, joined
from rlhfspec.engine.model.llama_model import LlamaModel, known_config
from rlhfspec.engine.numerics import choose_backend
from rlhfspec.engine.weights.causal_lm import DTYPES
from rlhfspec.engine.weights.chunks import unique_tensors

TIMEOUT_S = 600.0


def dealt(model: PreTrainedModel, ranks: GroupRanks | None, vocab_size: int | None = None) -> LlamaModel:
    """A model's weights as an instance has them, dealt where there are ranks, of which this process leads."""
    tensors = dict(unique_tensors(model))
    text = model.config.to_json_string(use_diff=False)
    config = known_config(text, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    assert config is not None
    dtype = next(name for name, kind in DTYPES.items() if kind == model.dtype)
    if ranks is not None:
        require_dealt(text, config, ranks.share.ranks, vocab_size)
        ranks.order("model", hf_config_json=text, dtype=dtype, vocab_size=vocab_size)
    backend = choose_backend(torch.device("cpu"), num_threads=1)
    own = LlamaModel(config, model.dtype, backend, ranks=ranks, vocab_size=vocab_size)
    # part by part, as weights are published
    assert own.load(tensors, [{name: tensor} for name, tensor in tensors.items()]) is None
    return own


def _join(folder: str, rank: int, num_ranks: int) -> GroupRanks:
    timeouts = {"start_timeout_s": TIMEOUT_S, "step_timeout_s": TIMEOUT_S}
    return joined(folder, rank, num_ranks, instance="gen-0", **timeouts)


class RankProcesses:
    """A group whose leader is this process."""

    def __init__(self, folder: Path, ranks: int) -> None:
        meeting = folder / f"ranks_{ranks}"
        meeting.mkdir()
        command = [sys.executable, "-m", "benchmarks.support.rank_processes", str(meeting)]
        self.followers = [
            subprocess.Popen(
                [*command, str(rank), str(ranks)],
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            for rank in range(1, ranks)
        ]
        self.ranks = _join(str(meeting), 0, ranks)

    def stop(self) -> None:
        """End them. Raises AssertionError: one did not end well."""
        self.ranks.order("stop")
        self.ranks.close()
        for follower in self.followers:
            _, said = follower.communicate(timeout=TIMEOUT_S)
            assert follower.returncode == 0, said

    def kill(self) -> None:
        """End what still runs."""
        for follower in self.followers:
            follower.kill()
            follower.communicate()


if __name__ == "__main__":
    Follower(_join(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))).follow()
