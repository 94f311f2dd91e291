"""Recorded drafts: large trees with features and outcomes, the material of fits, yield curves and the oracle.

Because the target's token is defined before anything is drafted (design 3.1), the outcome of every sub-tree of a
recorded tree is known exactly: a node is accepted or not, whatever else is verified.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .acceptance import AcceptanceModel, NodeTable


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRecording:
    """S drafts of one shape with C candidates each, level by level. One draft is one sample in one decode step."""

    branching: int
    width: int
    margin: np.ndarray
    "[S, C], see `AcceptanceModel.conditional`"
    logprob: np.ndarray
    "[S, C]"
    parent: np.ndarray
    "[S, C] index of the parent candidate, -1 for the root"
    accepted: np.ndarray
    "[S, C] bool: the whole path is what the target says"
    level: np.ndarray
    "[C], 1 for children of the root"
    rank: np.ndarray
    "[C], 1 for the first choice among siblings"
    sample: np.ndarray
    "[S] which prompt"

    def __len__(self) -> int:
        return len(self.margin)

    def where(self, mask: np.ndarray) -> DraftRecording:
        """Return the drafts under the mask [S]."""
        rows = {
            name: getattr(self, name)[mask] for name in ("margin", "logprob", "parent", "accepted", "sample")
        }
        return DraftRecording(
            branching=self.branching, width=self.width, level=self.level, rank=self.rank, **rows
        )

    @property
    def reached(self) -> np.ndarray:
        """[S, C]: the parent is accepted, so the node's own acceptance is a fair trial."""
        above = np.take_along_axis(self.accepted, np.maximum(self.parent, 0), axis=1)
        return np.where(self.parent < 0, True, above)

    def nodes(self) -> NodeTable:
        """Return the nodes whose parents are accepted."""
        reached = self.reached
        rows, columns = np.nonzero(reached)
        return NodeTable(
            margin=self.margin[reached],
            logprob=self.logprob[reached],
            level=self.level[columns],
            rank=self.rank[columns],
            accepted=self.accepted[reached],
            sample=self.sample[rows],
        )

    def scores(self, model: AcceptanceModel) -> np.ndarray:
        """Return every candidate's estimated path acceptance, [S, C]."""
        level = np.broadcast_to(self.level, self.margin.shape)
        rank = np.broadcast_to(self.rank, self.margin.shape)
        scores = model.conditional(self.margin, self.logprob, level, rank)
        for number in range(2, int(self.level.max()) + 1):
            columns = np.nonzero(self.level == number)[0]
            scores[:, columns] *= np.take_along_axis(scores, self.parent[:, columns], axis=1)
        return scores

    def yield_curve(self, model: AcceptanceModel, levels: int, max_nodes: int) -> tuple[float, ...]:
        """Mean accepted nodes among the n best by score of a draft of so many levels, for n = 0..max_nodes."""
        within = self.level <= levels
        order = np.argsort(-self.scores(model)[:, within], axis=1, kind="stable")[:, :max_nodes]
        gained = np.take_along_axis(self.accepted[:, within], order, axis=1).mean(axis=0).cumsum()
        curve = np.concatenate([[0.0], gained])
        return tuple(np.pad(curve, (0, max_nodes + 1 - len(curve)), mode="edge").tolist())


def join_nodes(tables: list[NodeTable]) -> NodeTable:
    """Put tables behind one another."""
    return NodeTable(
        **{
            name: np.concatenate([getattr(table, name) for table in tables])
            for name in NodeTable.__dataclass_fields__
        }
    )
