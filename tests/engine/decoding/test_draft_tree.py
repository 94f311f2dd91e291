"""Draft trees by hand: ancestors, selection closed under parents, nodes that straddle a reduction chunk."""

import torch

from rlhfspec.engine.attention.backends import CHUNK
from rlhfspec.engine.decoding.draft_tree import (
    DEAD,
    DraftTree,
    ancestors_or_self,
    chain,
    drop_split_nodes,
    root_only,
    select_best,
)


def tree_of(parents: list[int], scores: list[float] | None = None, ids: list[int] | None = None) -> DraftTree:
    """One sample's tree; node i + 1 has parents[i]."""
    depth: list[int] = []
    for parent in parents:
        depth.append(1 if parent == 0 else depth[parent - 1] + 1)
    n = len(parents)
    return DraftTree(
        token_ids=torch.tensor([ids or list(range(10, 10 + n))]),
        parents=torch.tensor([parents]),
        depth=torch.tensor([depth]),
        rank=torch.ones(1, n, dtype=torch.int64),
        scores=torch.tensor([scores or [1.0] * n]),
        draft_slots=torch.arange(n)[None],
        is_chain=False,
    )


#        root
#       /    \
#      1      2
#     / \      \
#    3   4      5
#    |
#    6
PARENTS = [0, 0, 1, 1, 2, 3]


def test_ancestors_by_hand() -> None:
    expected = {0: {0}, 1: {0, 1}, 2: {0, 2}, 3: {0, 1, 3}, 4: {0, 1, 4}, 5: {0, 2, 5}, 6: {0, 1, 3, 6}}
    marked = ancestors_or_self(tree_of(PARENTS))[0]
    assert {row: set(torch.nonzero(marked[row]).flatten().tolist()) for row in range(7)} == expected


def test_a_chains_ancestors_equal_those_of_the_same_tree() -> None:
    built = chain(torch.arange(5)[None], torch.ones(1, 5))
    assert built.parents.tolist() == [[0, 1, 2, 3, 4]]
    assert built.depth.tolist() == [[1, 2, 3, 4, 5]]
    assert built.draft_slots.tolist() == [[0, 1, 2, 3, -1]], "the last node is never run through the draft"
    assert torch.equal(ancestors_or_self(built), ancestors_or_self(tree_of([0, 1, 2, 3, 4])))


def test_the_empty_tree_has_a_root_alone() -> None:
    empty = root_only(3, torch.device("cpu"))
    assert empty.num_nodes == 0
    assert ancestors_or_self(empty).tolist() == [[[True]]] * 3


def test_select_best_by_hand() -> None:
    candidates = tree_of(PARENTS, scores=[0.6, 0.4, 0.5, 0.1, 0.3, 0.45])
    best = select_best(candidates, 4)
    # order of score: node 1 (0.6), 3 (0.5), 6 (0.45), 2 (0.4)
    assert best.token_ids.tolist() == [[10, 12, 15, 11]]
    assert best.parents.tolist() == [[0, 1, 2, 0]]
    assert best.depth.tolist() == [[1, 2, 3, 1]]
    assert best.draft_slots.tolist() == [[0, 2, 5, 1]]


def test_equal_scores_keep_the_shallower_node() -> None:
    candidates = tree_of([0, 0, 1], scores=[0.5, 0.5, 0.5])
    assert select_best(candidates, 2).token_ids.tolist() == [[10, 11]]


def test_all_candidates_are_kept_when_they_are_few() -> None:
    candidates = tree_of(PARENTS)
    assert select_best(candidates, 6) is candidates
    assert select_best(candidates, 9) is candidates


def test_every_prefix_of_the_selection_is_closed_under_parents() -> None:
    random = torch.Generator().manual_seed(0)
    for _ in range(50):
        parents = [int(torch.randint(i + 1, (), generator=random)) for i in range(20)]
        order = sorted(range(20), key=lambda i: depth_of(parents, i + 1))
        number = {0: 0} | {old + 1: new + 1 for new, old in enumerate(order)}
        parents = [number[parents[old]] for old in order]
        scores: list[float] = []
        for parent in parents:
            share = 1.0 if torch.rand((), generator=random) < 0.2 else float(torch.rand((), generator=random))
            scores.append(share * (scores[parent - 1] if parent else 1.0))
        best = select_best(tree_of(parents, scores), 12)
        for number_of_node, parent in enumerate(best.parents[0].tolist(), start=1):
            assert parent < number_of_node
        assert best.scores[0].tolist() == sorted(best.scores[0].tolist(), reverse=True)
        for node, parent in enumerate(best.parents[0].tolist()):
            above = int(best.depth[0, parent - 1]) if parent else 0
            assert int(best.depth[0, node]) == above + 1


def depth_of(parents: list[int], node: int) -> int:
    return 0 if node == 0 else 1 + depth_of(parents, parents[node - 1])


def test_nodes_stored_in_another_chunk_than_their_place_are_killed() -> None:
    tree = tree_of(PARENTS)  # stored at base + 1..6, belong at base + depth 1, 1, 2, 2, 2, 3
    base = CHUNK - 4  # positions from CHUNK on: stored index >= 4; depth 3 stays below
    kept = drop_split_nodes(tree, torch.tensor([base]))
    assert kept.token_ids.tolist() == [[10, 11, 12, DEAD, DEAD, DEAD]]
    assert kept.parents.equal(tree.parents)
    far = drop_split_nodes(tree, torch.tensor([base - 3]))
    assert far.token_ids.equal(tree.token_ids)
    # from base + 1 on everything lies behind the boundary, stored and dense alike
    assert drop_split_nodes(tree, torch.tensor([CHUNK - 1])).token_ids.equal(tree.token_ids)


def test_chains_are_stored_where_they_belong_and_lose_nothing() -> None:
    built = chain(torch.arange(6)[None], torch.ones(1, 6))
    assert drop_split_nodes(built, torch.tensor([CHUNK - 3])) is built
