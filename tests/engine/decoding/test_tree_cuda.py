"""Trees by kernels against those by torch's calls in Triton's interpreter, and compiled for a GPU that is not there."""

import json
from pathlib import Path

from tests.helpers.forked_script import output_of
from tests.helpers.triton_scripts import COMPILE, NEEDS_TRITON, interpreted

EQUAL = """
from types import SimpleNamespace
import numpy as np, torch
from rlhfspec.core.decode_records import Budget
from rlhfspec.core.records import SampleKey, SamplingParams, Stream
from rlhfspec.engine.decoding import tree_cuda
from rlhfspec.engine.triton_here import OPERATORS
from rlhfspec.engine.decoding.draft_tree import ancestors_or_self, select_best
from rlhfspec.engine.decoding.verify import verify
from rlhfspec.engine.decoding.noise import HashedNoise, Noise, gumbel_noise, key_words, row_words
from rlhfspec.engine.decoding.sampling_rule import RowSampling
from rlhfspec.engine.drafters.level_drafter import LevelDrafter

for name in ("leaders", "grow", "pick", "ancestors", "descend"):
    OPERATORS.impl(name, getattr(tree_cuda, name), "CPU")
LevelDrafter.__abstractmethods__ = frozenset()

class Pretended(LevelDrafter):
    pool = SimpleNamespace(room_behind=lambda length: ROOM)

    def forward_level(self, batch, ids, seen, depth, parents):
        shown.append((ids, seen, depth, parents))
        at = (ids * 7 + depth[:, -ids.shape[1]:] * 31 + seen.sum(-1)) % len(table)
        return table[at]

vocab_size, depth = 1100, 4
table = torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
keys = [SampleKey(run_seed=3, stream=Stream.TRAIN, sample_index=index) for index in (0, 7, 1 << 40)]
key = np.stack([key_words(each, np.array([9])) for each in keys])
positions = np.array([[0], [5], [100_000]]) + np.arange(depth)
words = torch.from_numpy(row_words(key, positions))
noise = gumbel_noise(key, positions, vocab_size)
params = [SamplingParams(max_new_tokens=1, temperature=t) for t in (1.0, 0.0, 0.7)]

class Batch(list):
    lengths, sampling = np.array([9, 9, 9]), RowSampling.of(params, torch.device("cpu"))

batch, taken = Batch(params), []
for branching, width, nodes, ROOM in ((2, 4, 8, 64), (3, 5, 16, 9), (4, 1, 30, 64)):
    budget = Budget(num_nodes=nodes, depth=depth, branching=branching, width=width, reason="")
    trees, levels = [], []
    for of in (Noise(noise), HashedNoise(words, vocab_size)):
        shown = []
        candidates = Pretended().grow(batch, budget, of, table[[3, 5, 8]])
        assert candidates.by_kernels == isinstance(of, HashedNoise)
        trees += [candidates, select_best(candidates, nodes)]
        levels.append(shown)
    for expected, got in zip(*levels, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    for expected, got in zip(trees[:2], trees[2:], strict=True):
        for one in ("token_ids", "parents", "depth", "rank", "draft_slots"):
            assert torch.equal(getattr(got, one), getattr(expected, one)), one
        torch.testing.assert_close(got.scores, expected.scores, rtol=2e-5, atol=1e-7)
    # the target takes the nodes at random, and often a child
    for expected, got in zip(trees[:2], trees[2:], strict=True):
        above = ancestors_or_self(expected)
        assert torch.equal(ancestors_or_self(got), above)
        for seed in range(6):
            generator = torch.Generator().manual_seed(seed)
            node = torch.randint(1, expected.num_nodes + 1, (3, 4 * depth), generator=generator)
            choices = torch.full((3, expected.num_nodes + 1), vocab_size)
            for at in node.unbind(1):
                places = at[:, None] - 1
                choices.scatter_(1, expected.parents.gather(1, places), expected.token_ids.gather(1, places))
            verdicts = [verify(choices, tree, above, depth) for tree in (expected, got)]
            for one in ("num_accepted", "path", "token_ids", "num_accepted_rank2_plus"):
                assert torch.equal(*(getattr(verdict, one) for verdict in verdicts)), one
            taken.append(verdicts[0].num_accepted)
assert len(set(torch.cat(taken).tolist())) > 2
# no numbers at all, and still a tree of ids that there are
lost = Pretended().grow(batch, budget, HashedNoise(words, vocab_size), table[[3, 5, 8]] * float("nan"))
assert ((lost.token_ids >= 0) & (lost.token_ids < vocab_size)).all() and lost.scores.isfinite().all()
print("equal")
"""
BUILD = """
from rlhfspec.engine.decoding import noise_cuda, tree_cuda

i64, f32 = "*i64", "*fp32"
for count, rows in ((2, 8), (4, 8)):
    built(f"leaders {count}", noise_cuda._leaders, ["*bf16", "*i32", "*i32", f32, f32, f32, i64, f32, *["i32"] * 8],
          {"count": count, "block": noise_cuda.BLOCK})
    frontier = (i64, f32, "*u8")
    built(f"grow {count}", tree_cuda._grow, [(f32, i64, f32), frontier, (i64, f32), frontier, *["i32"] * 7],
          {"count": count, "block_rows": rows, "block_count": count,
           "block_best": 128 * count, "block_parts": 128, "block_columns": 64}, num_warps=8)
built("pick", tree_cuda._pick, [i64, i64, i64, i64, i64, f32, i64, f32, *["i32"] * 3], {"block": 256, "chunk": 16},
      num_warps=8)
built("ancestors", tree_cuda._ancestors, [i64, "*u8", "i32", "i32"], {"block": 64})
built("descend", tree_cuda._descend, [*[i64] * 6, *["i32"] * 3], {"block": 64}, num_warps=1)
print(json.dumps(found))
"""


@NEEDS_TRITON
def test_they_grow_the_tree_that_torch_grows() -> None:
    assert interpreted(EQUAL) == "equal"


@NEEDS_TRITON
def test_they_compile_for_an_h100_without_one(tmp_path: Path) -> None:
    found = json.loads(output_of(COMPILE + BUILD, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0"))
    assert len(found) == 7
    for name, kernel in found.items():
        assert kernel["spilled"] == [0, 0], (name, kernel)
