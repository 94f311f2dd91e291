"""Which models can be dealt to how many ranks; a group of processes without Ray, and dealing a model to it.

A rank of it is `python -m rlhfspec.engine.group.dealing FOLDER RANK RANKS DEVICE`; on "cuda" each has its own GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from ...core.errors import ModelError
from ..cache.kv_pool import CELL_STEP
from ..model.llama_model import INNER_STEP, LlamaModel, config_of
from ..model.support import not_held
from ..numerics import choose_backend
from ..parts import PARTS, Share
from ..weights.causal_lm import PreTrainedModel
from ..weights.chunks import unique_tensors
from ..weights.llama_config import LlamaConfig, weight_shapes
from .follower import Follower
from .ranks import GroupError, GroupRanks, joined

TIMEOUT_S = 600.0
_LAST_CHARS = 2000
_END_S = 5.0
"From a closed socket to the end of its process."
PANEL = 16
"Rows of our own products: `engine.cpu.products.PANEL`, whose module needs llvmlite."
LEAST_IDS = CELL_STEP
"Token ids of a rank: a vector of them is chosen from at once."


def require_dealt(
    hf_config_json: str, config: LlamaConfig | None, ranks: int, vocab_size: int | None
) -> None:
    """Raise ModelError where a model has no share for each of so many ranks.

    Args:
        hf_config_json: of the model.
        config: the same where our own forward serves it.
        ranks: 2 or 4.
        vocab_size: token ids that are dealt; all by default.
    """
    if config is None or config.hidden_size % PANEL:
        family = json.loads(hf_config_json).get("model_type", "unknown")
        raise ModelError(
            f"cluster.generation.tensor_parallel {ranks} needs a model that our own forward serves: a Llama, Mistral, "
            f"Qwen2 or Qwen3 whose heads and hidden size are multiples of {PANEL}, got one of type '{family}'; set it "
            "to 1, or take such a model"
        )
    if ranks not in (2, PARTS):
        raise ModelError(f"cluster.generation.tensor_parallel must be 1, 2 or {PARTS}, got {ranks}")
    biased = [name for name in weight_shapes(config) if name.endswith(("o_proj.bias", "down_proj.bias"))]
    if biased:
        raise ModelError(
            f"cluster.generation.tensor_parallel {ranks} needs products that are added up to have no bias, got "
            f"'{biased[0]}'; set it to 1"
        )
    for rank in range(ranks):
        share = Share(rank=rank, ranks=ranks)
        columns = len(share.of(config.intermediate_size, INNER_STEP))
        ids = len(share.of_vocabulary(vocab_size or config.vocab_size))
        if columns == 0 or ids < LEAST_IDS:
            raise ModelError(
                f"the model is too small for {ranks} ranks: rank {rank} would have {columns} inner columns and {ids} "
                f"token ids, expected at least 1 and {LEAST_IDS}; lower cluster.generation.tensor_parallel"
            )


def require_module_dealt(model: PreTrainedModel, ranks: int, vocab_size: int | None) -> None:
    """Do as `require_dealt` for a module, which may have no numbers."""
    require_dealt(model.config.to_json_string(use_diff=False), config_of(model), ranks, vocab_size)


def dealt(model: PreTrainedModel, ranks: GroupRanks | None, vocab_size: int | None = None) -> LlamaModel:
    """Return a model's weights as an instance has them, dealt where there are ranks, of which this process leads.

    Raises ModelError as `require_dealt`, WeightsError for a copy that is not what was dealt.
    """
    tensors = dict(unique_tensors(model))
    config = config_of(model)
    if ranks is not None:
        text = model.config.to_json_string(use_diff=False)
        require_dealt(text, config, ranks.share.ranks, vocab_size)
    assert config is not None
    backend = choose_backend(torch.device("cpu"), num_threads=1)
    own = LlamaModel(config, model.dtype, backend, ranks=ranks, vocab_size=vocab_size)
    # part by part, as weights are published
    altered = own.load(tensors, [{name: tensor} for name, tensor in tensors.items()])
    if altered is not None:
        raise not_held("the leader of a group", altered)
    return own


class LocalRanks:
    """A group whose leader is this process."""

    def __init__(self, folder: Path, num_ranks: int, device: str = "cpu") -> None:
        """Start the other ranks and meet them. Raises TimeoutError: not all came; GroupError: one has ended."""
        meeting = folder / f"ranks_{num_ranks}"
        meeting.mkdir()
        command = [sys.executable, "-m", "rlhfspec.engine.group.dealing", str(meeting)]
        paths = os.pathsep.join(path for path in sys.path if path)
        self._logs = [folder / f"rank_{rank}_of_{num_ranks}.log" for rank in range(1, num_ranks)]
        self.followers: list[subprocess.Popen[bytes]] = []
        for rank, log in enumerate(self._logs, 1):
            with log.open("w") as file:
                follower = subprocess.Popen(
                    [*command, str(rank), str(num_ranks), device],
                    stderr=file,
                    env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
                )
            self.followers.append(follower)
        try:
            self.ranks = _join(str(meeting), 0, num_ranks, device, watch=self._require_running)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """End them. Raises GroupError: one did not end well."""
        self.ranks.order("stop")
        self.ranks.close()
        for follower in self.followers:
            follower.wait(timeout=TIMEOUT_S)
        self._require_running()

    def _require_running(self) -> None:
        """Raise GroupError where a rank has ended, and not well."""
        ended = [
            (log.read_text(errors="replace")[-_LAST_CHARS:], code)
            for each, log in zip(self.followers, self._logs, strict=True)
            if (code := each.poll())
        ]
        if ended:
            # one that ended by itself, before those that it left behind
            said, code = min(ended, key=lambda one: "GroupError" in one[0])
            raise GroupError(f"a rank ended with {code}, expected 0; it said: {said}")

    def tell_of_ended(self) -> None:
        """Raise GroupError with what a rank said that has ended, and not well."""
        for follower in self.followers:
            with suppress(subprocess.TimeoutExpired):
                follower.wait(timeout=_END_S)
        self._require_running()

    def kill(self) -> None:
        """End what still runs."""
        for follower in self.followers:
            follower.kill()
            follower.wait()


@contextmanager
def local_ranks(num_ranks: int) -> Iterator[GroupRanks | None]:
    """So many ranks, of which this process leads; None: it is the only one."""
    if num_ranks == 1:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        group = LocalRanks(Path(folder), num_ranks)
        try:
            yield group.ranks
            group.stop()
        except GroupError:
            group.tell_of_ended()
            raise
        finally:
            group.kill()


def _join(
    folder: str, rank: int, num_ranks: int, device: str, watch: Callable[[], None] = lambda: None
) -> GroupRanks:
    return joined(
        folder,
        rank,
        num_ranks,
        instance="gen-0",
        start_timeout_s=TIMEOUT_S,
        step_timeout_s=TIMEOUT_S,
        device=torch.device(f"cuda:{rank}" if device == "cuda" else device),
        watch=watch,
    )


def _require_leader(leader: int) -> None:
    """Raise GroupError where the process that started this one is gone."""
    if os.getppid() != leader:
        raise GroupError("the leader of a group is gone")


if __name__ == "__main__":
    watched = partial(_require_leader, os.getppid())
    Follower(_join(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], watched)).follow()
