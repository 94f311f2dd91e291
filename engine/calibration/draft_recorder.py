"""Records refined drafts with features and outcomes (`profiles.recording`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...core.errors import ConfigError
from ...core.records import SampleRequest
from ...profiles.acceptance import AcceptanceModel
from ...profiles.recording import DraftRecording
from ..decoding.draft_tree import DraftTree
from ..decoding.verify import Verdict
from ..drafters.refinement import Scorer


class RecordingScorer(Scorer):
    """A scorer that keeps what it saw. Every candidate must be verified, or its outcome would be unknown."""

    def __init__(self, model: AcceptanceModel, *, branching: int, width: int, num_levels: int) -> None:
        super().__init__(model)
        self._shape = (branching, width)
        self._num_levels = num_levels
        self._features: list[tuple[np.ndarray, np.ndarray]] = []
        self._rows: list[dict[str, np.ndarray]] = []
        self._level = self._rank = np.zeros(0)

    def saw(self, margin: np.ndarray, logprob: np.ndarray) -> None:
        """Take one level's features, [B, w, b]."""
        rows = len(margin)
        self._features.append((margin.reshape(rows, -1), logprob.reshape(rows, -1)))

    def concluded(self, tree: DraftTree, verdict: Verdict, requests: Sequence[SampleRequest]) -> None:
        """Take the outcome; drafts cut short by a limit are left out."""
        features, self._features = self._features, []
        if tree.num_kept is not None or int(tree.depth[0, -1]) < self._num_levels:
            return
        margin, logprob = (np.concatenate(parts, axis=1) for parts in zip(*features, strict=True))
        if margin.shape[1] != tree.num_nodes:
            return
        nodes = torch.zeros(len(margin), tree.num_nodes + 1, dtype=torch.bool, device=tree.parents.device)
        nodes.scatter_(1, verdict.path, True)
        self._level, self._rank = tree.depth[0].cpu().numpy(), tree.rank[0].cpu().numpy()
        # a node that a chunk's end killed was never judged
        whole = (tree.token_ids >= 0).all(dim=1).cpu().numpy()
        rows = {
            "margin": margin,
            "logprob": logprob,
            "parent": (tree.parents - 1).cpu().numpy(),
            "accepted": nodes[:, 1:].cpu().numpy(),
            "sample": np.array([request.key.sample_index for request in requests]),
        }
        self._rows.append({name: values[whole] for name, values in rows.items()})

    @property
    def num_drafts(self) -> int:
        """Decode steps recorded so far."""
        return len(self._rows)

    def recording(self) -> DraftRecording:
        """Return all drafts so far. Raises ConfigError: there is none."""
        if not self._rows:
            raise ConfigError(
                "the profile of this pair needs drafts to measure and got none: responses are too short for a draft of "
                f"{self._shape[0]} x {self._shape[1]} tokens; raise sampling.max_new_tokens, or set "
                "speculation.policy to fixed or off"
            )
        names = ("margin", "logprob", "parent", "accepted", "sample")
        return DraftRecording(
            branching=self._shape[0],
            width=self._shape[1],
            level=self._level,
            rank=self._rank,
            **{name: np.concatenate([row[name] for row in self._rows]) for name in names},
        )
