"""Acceptance by hand, and against a walk down the tree in plain Python."""

from dataclasses import replace

import torch

from rlhfspec.engine.decoding.draft_tree import DEAD, DraftTree, ancestors_or_self, chain, root_only
from rlhfspec.engine.decoding.verify import Verdict, verify


def tree_of(parents: list[list[int]], ids: list[list[int]], ranks: list[list[int]]) -> DraftTree:
    depth = torch.zeros(len(parents), len(parents[0]), dtype=torch.int64)
    for row, row_parents in enumerate(parents):
        for node, parent in enumerate(row_parents):
            depth[row, node] = 1 + (depth[row, parent - 1] if parent else 0)
    return DraftTree(
        token_ids=torch.tensor(ids),
        parents=torch.tensor(parents),
        depth=depth,
        rank=torch.tensor(ranks),
        scores=torch.ones(depth.shape),
        draft_slots=-torch.ones_like(depth),
        is_chain=False,
    )


def verdict_of(choices: list[list[int]], tree: DraftTree) -> Verdict:
    deepest = int(tree.depth.max()) if tree.num_nodes else 0
    return verify(torch.tensor(choices), tree, ancestors_or_self(tree), deepest)


def test_the_accepted_path_by_hand() -> None:
    #   root -> 1 (token 5), 2 (token 7);  2 -> 3 (token 9), 4 (token 1);  4 -> 5 (token 2)
    tree = tree_of([[0, 0, 2, 2, 4]], [[5, 7, 9, 1, 2]], [[1, 2, 1, 2, 1]])
    # the target says 7 at the root, 1 at node 2, 3 at node 4: nodes 2 and 4 are accepted, 3 is the bonus
    verdict = verdict_of([[7, 0, 1, 0, 3, 8]], tree)
    assert verdict.num_accepted.tolist() == [2]
    assert verdict.path.tolist() == [[0, 2, 4, 4]]
    assert verdict.token_ids[0, :3].tolist() == [7, 1, 3]
    assert verdict.num_accepted_rank2_plus.sum().item() == 2


def test_a_node_below_a_refused_one_is_refused_though_its_token_fits() -> None:
    tree = tree_of([[0, 1]], [[5, 6]], [[1, 1]])
    verdict = verdict_of([[4, 6, 9]], tree)
    assert verdict.num_accepted.tolist() == [0]
    assert verdict.token_ids[0, 0].item() == 4


def test_chains_and_dead_nodes() -> None:
    tree = chain(torch.tensor([[5, 6, 7], [5, DEAD, DEAD], [DEAD, 6, 7]]), torch.ones(3, 3))
    verdict = verdict_of([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]], tree)
    assert verdict.num_accepted.tolist() == [3, 1, 0]
    assert verdict.token_ids[0].tolist() == [5, 6, 7, 8]
    assert verdict.token_ids[1, :2].tolist() == [5, 6]
    assert verdict.token_ids[2, 0].item() == 5


def test_the_empty_tree_emits_the_targets_token() -> None:
    verdict = verdict_of([[3], [4]], root_only(2, torch.device("cpu")))
    assert verdict.num_accepted.tolist() == [0, 0]
    assert verdict.token_ids.tolist() == [[3], [4]]


def walk(choices: list[int], tree: DraftTree, row: int) -> tuple[list[int], list[int]]:
    """Node numbers of the accepted path and the emitted tokens."""
    node, path, emitted = 0, [0], []
    while True:
        emitted.append(choices[node])
        children = [
            child + 1
            for child in range(tree.num_nodes)
            if int(tree.parents[row, child]) == node and int(tree.token_ids[row, child]) == choices[node]
        ]
        if not children:
            return path, emitted
        node = children[0]
        path.append(node)


def test_random_trees_equal_a_walk_from_the_root() -> None:
    random = torch.Generator().manual_seed(1)
    deepest = 0
    for _ in range(100):
        parents = [[int(torch.randint(i + 1, (), generator=random)) for i in range(10)] for _ in range(3)]
        tree = tree_of(parents, [[0] * 10] * 3, [[1] * 10] * 3)
        ids = torch.zeros(3, 10, dtype=torch.int64)
        for row in range(3):  # siblings carry different tokens
            for node in range(10):
                ids[row, node] = sum(parents[row][other] == parents[row][node] for other in range(node))
        tree = replace(tree, token_ids=ids)
        choices = torch.randint(2, (3, 11), generator=random).tolist()
        verdict = verdict_of(choices, tree)
        for row in range(3):
            path, emitted = walk(choices[row], tree, row)
            assert verdict.num_accepted[row].item() == len(path) - 1
            assert verdict.path[row, : len(path)].tolist() == path
            assert verdict.token_ids[row, : len(path)].tolist() == emitted
            deepest = max(deepest, len(path) - 1)
    assert deepest >= 4
