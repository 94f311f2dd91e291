"""A rank that follows: it makes what the leader has, and computes its share of each forward as the orders say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..attention.backends import Attention
from ..cache.kv_pool import KVPool
from ..model.cuda_graphs import CudaRecorder
from ..model.llama_model import LlamaModel
from ..model.runner import ModelRunner
from ..model.sent_plans import as_planned
from ..model.support import not_held
from .ranks import EndedEarly, GroupError, GroupRanks
from .split_answers import Wanted, split_answers


class Follower:
    """Model and forward of one rank. Used by one thread, whose number of torch threads is one."""

    def __init__(self, ranks: GroupRanks) -> None:
        self._ranks = ranks
        self._model: LlamaModel | None = None
        self._runner: ModelRunner | None = None

    def follow(self) -> None:
        """Carry out orders until the leader says stop. Raises GroupError: it is gone, or sent what is unknown."""
        torch.set_num_threads(1)
        if self._ranks.device.type == "cuda":
            # what launches kernels of its own does so on the current device
            torch.cuda.set_device(self._ranks.device)
        while True:
            kind, tensors, what = self._ranks.next_order()
            if kind == "stop":
                self._ranks.close()
                return
            self._carry_out(kind, tensors, what)

    def _carry_out(self, kind: str, tensors: tuple[Tensor, ...], what: dict[str, Any]) -> None:
        if kind == "model":
            self._runner, backend = None, what.pop("backend")(self._ranks.device)
            self._model = LlamaModel(backend=backend, ranks=self._ranks, **what)
        elif kind == "load" and self._model is not None:
            self._load(what["names"])
        elif kind == "runner" and self._model is not None:
            self._runner = self._made_runner(self._model, **what)
        elif self._runner is None:
            raise GroupError(f"the leader of a group asked for '{kind}' before there was a model")
        elif kind in _OF_CELLS:
            _OF_CELLS[kind](self._runner.pool, *tensors, **what)
        else:
            self._forward(self._runner, kind, tensors, what)

    def _made_runner(
        self, model: LlamaModel, *, sizes: dict[str, Any], attention: Attention | None, graph_bytes: int
    ) -> ModelRunner:
        # what is recorded the leader decides: its memory's limit, not ours, ends recordings
        recorder = CudaRecorder(model.device) if graph_bytes else None
        how = {"attention": attention, "recorder": recorder, "graph_bytes": sys.maxsize}
        return ModelRunner(model, backend=model.backend, **how, **sizes)

    def _load(self, names: list[str]) -> None:
        assert self._model is not None
        # a version that the leader cannot load is one that nobody decodes from: the next one may be whole
        with suppress(EndedEarly):
            if self._runner is not None:
                self._runner.load_parts(names, self._ranks.buckets())
            elif (altered := self._model.load(names, self._ranks.buckets())) is not None:
                raise not_held(f"weights of rank {self._ranks.share.rank}", altered)

    @torch.inference_mode()
    def _forward(
        self, runner: ModelRunner, kind: str, tensors: tuple[Tensor, ...], what: dict[str, Any]
    ) -> None:
        ids, positions, *rest = tensors
        if what["is_full"] and runner.graphs is not None:
            runner.graphs.close()
        wanted = rest[: len(Wanted._fields)] if kind == "answers" else []
        plan = as_planned(what["plan"], rest[len(wanted) :], runner.pool, runner.attention)
        if kind == "fill":
            runner.fill(ids, positions, plan)
        elif kind == "logits":
            runner.logits(ids, positions, plan)
        elif kind == "answers":
            split_answers(runner, ids, positions, plan, Wanted(*wanted))
        else:
            raise GroupError(f"the leader of a group asked for '{kind}', which this version does not know")


_OF_CELLS: dict[str, Callable[..., Any]] = {
    "make_dense": KVPool.make_dense,
    "copy_slot": KVPool.copy_slot,
    "move_slot": KVPool.move_slot,
    "clear": KVPool.clear,
    "read": lambda pool, **what: pool.read(**what),
    "store": lambda pool, cells, **what: pool.store(cells=cells, **what),
    "hold": lambda pool, num_tokens: pool.memory.hold(num_tokens),
}
"What is done to the cells of this rank."
