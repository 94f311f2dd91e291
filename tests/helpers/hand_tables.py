"""Hand-made tables: measured decode steps with known costs, recorded drafts with known outcomes."""

from dataclasses import fields

import numpy as np

from rlhfspec.profiles.cost import CostTable, Shape
from rlhfspec.profiles.recording import DraftRecording

SHAPES = ((1, 1, 16), (2, 2, 8), (3, 3, 5))


def drawn_shapes(count: int, random: np.random.Generator) -> Shape:
    """Decode steps as a sweep draws them: plain, uniform, ragged, chains and trees."""
    rows = []
    for _ in range(count):
        batch = int(random.choice([1, 2, 4, 8, 16, 32]))
        context = batch * int(random.choice([60, 200, 500]))
        if random.random() < 0.2:
            rows.append((batch, context, 0, 0, 0, 1))
            continue
        _, width, most = SHAPES[random.integers(3)]
        levels = int(random.integers(1, most + 1))
        widest = int(random.integers(1, min(16, levels * width * width) + 1))
        nodes = batch * widest
        if batch > 1 and random.random() < 0.35:
            nodes = int(random.integers(widest, batch * widest))
        rows.append((batch, context, nodes, widest, levels, width))
    columns = np.array(rows, dtype=float).T
    return Shape(
        num_samples=columns[0],
        context_tokens=columns[1],
        num_nodes=columns[2],
        widest=columns[3],
        levels=columns[4],
        width=columns[5],
    )


def truth(shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds with a knee at 20 tokens, which is no hinge of ours."""
    s = {f.name: np.asarray(getattr(shape, f.name)) for f in fields(Shape)}
    tokens = s["num_samples"] + s["num_nodes"]
    knee = np.maximum(tokens - 20, 0)
    ragged = s["num_samples"] * (s["widest"] + 1) > tokens
    verify = 8e-3 + 4e-5 * tokens + 3e-4 * knee + 4e-7 * s["context_tokens"] + 3e-4 * ragged
    level = 1e-3 + 4e-5 * s["num_samples"] * s["width"] + 1e-7 * s["context_tokens"]
    draft = 1e-4 + s["levels"] * level
    rest = 4e-4 + 1e-5 * s["num_samples"] * (s["widest"] + 1)
    return draft, verify, rest


def noisy_table(seed: int, count: int = 400, noise: float = 0.05) -> CostTable:
    random = np.random.default_rng(seed)
    shape = drawn_shapes(count, random)
    draft, verify, rest = (s * np.exp(random.normal(0, noise, count)) for s in truth(shape))
    return CostTable(shape=shape, draft_s=draft, verify_s=verify, rest_s=rest)


def logit(share: list[list[float]]) -> np.ndarray:
    table = np.asarray(share)
    return np.log(table / (1 - table))


def two_drafts() -> DraftRecording:
    """Two children of the root, two of each; the second draft expands its second child first."""
    conditional = [[0.8, 0.5, 0.5, 0.25, 0.9, 0.1], [0.4, 0.6, 0.9, 0.2, 0.75, 0.5]]
    return DraftRecording(
        branching=2,
        width=2,
        margin=np.arange(12.0).reshape(2, 6),
        logprob=logit(conditional),
        parent=np.array([[-1, -1, 0, 0, 1, 1], [-1, -1, 1, 1, 0, 0]]),
        accepted=np.array([[1, 0, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0]], dtype=bool),
        level=np.array([1, 1, 2, 2, 2, 2]),
        rank=np.array([1, 2, 1, 2, 1, 2]),
        sample=np.array([4, 7]),
    )


def grown(seed: int, drafts: int = 40, branching: int = 2, width: int = 2, levels: int = 4) -> DraftRecording:
    """Random drafts, grown as a drafter grows them."""
    random = np.random.default_rng(seed)
    parents, accepted = [[-1] * branching], []
    level, start = [1] * branching, 0
    for number in range(2, levels + 1):
        size = len(level) - start
        parents.append(np.repeat(np.arange(start, start + min(width, size)), branching).tolist())
        start = len(level)
        level += [number] * (min(width, size) * branching)
    parent = np.concatenate(parents).astype(int)
    rank = np.tile(np.arange(1, branching + 1), len(parent) // branching)
    for _ in range(drafts):
        row = np.zeros(len(parent), dtype=bool)
        for node in np.nonzero(rank == 1)[0]:
            if parent[node] < 0 or row[parent[node]]:
                choice = random.choice(branching + 1, p=[0.6, 0.2, 0.2])
                if choice < branching:
                    row[node + choice] = True
        accepted.append(row)
    return DraftRecording(
        branching=branching,
        width=width,
        margin=random.exponential(1.0, (drafts, len(parent))),
        logprob=-random.exponential(1.0, (drafts, len(parent))),
        parent=np.tile(parent, (drafts, 1)),
        accepted=np.array(accepted),
        level=np.array(level),
        rank=rank,
        sample=np.arange(drafts) % 3,
    )
