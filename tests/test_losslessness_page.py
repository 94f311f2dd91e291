"""The textbook page runs: its rule is exact whatever is drafted, and the engine's verification is its rule."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlhfspec.engine.decoding.draft_tree import DraftTree
from rlhfspec.engine.decoding.verify import verify
from tests.test_layers import ROOT

PAGE = ROOT / "docs" / "explanation" / "losslessness.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 45
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def random_tree(rng: np.random.Generator, vocab: int, depth: int) -> dict[int, Any]:
    if not depth:
        return {}
    children = rng.permutation(vocab)[: rng.integers(0, 4)]
    return {int(token): random_tree(rng, vocab, depth - 1) for token in children}


@pytest.mark.parametrize("drafter", ["none", "random", "oracle", "always wrong"])
def test_the_tokens_are_those_of_plain_decoding_whatever_is_drafted(
    page: dict[str, Any], drafter: str
) -> None:
    rng = np.random.default_rng(0)
    for key in range(20):
        plain = page["decode"](key, [1, 2], 14)

        def oracle(tokens: list[int], plain: list[int] = plain) -> dict[int, Any]:
            tree: dict[int, Any] = {}
            for token in reversed(plain[len(tokens) :]):
                tree = {token: tree}
            return tree

        def wrong(tokens: list[int], key: int = key) -> dict[int, Any]:
            return {token: {} for token in range(5) if token != page["target_token"](key, tokens)}

        draft: dict[str, Callable[[list[int]], dict[int, Any]]] = {
            "none": lambda _: {},
            "random": lambda _: random_tree(rng, 5, 4),
            "oracle": oracle,
            "always wrong": wrong,
        }
        assert page["decode_speculatively"](key, [1, 2], 14, draft[drafter]) == plain


def test_the_rule_samples_from_the_model(page: dict[str, Any]) -> None:
    prompt = [3, 1, 4]
    scores = page["logits"](prompt)
    expected = np.exp(scores) / np.exp(scores).sum()
    drawn = np.bincount([page["target_token"](key, prompt) for key in range(4000)], minlength=5) / 4000
    assert np.abs(drawn - expected).max() < 4 * np.sqrt(0.25 / 4000)


def test_the_engine_verifies_by_the_rule_of_the_page(page: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    longest = 0
    for key in range(60):
        tree = random_tree(rng, 5, 4)
        tokens, parents, paths = [], [], [[]]
        level = [(0, tree)]
        while level:  # breadth first, as the engine numbers nodes: the root is 0
            below = []
            for parent, children in level:
                for token, grandchildren in children.items():
                    tokens.append(token)
                    parents.append(parent)
                    paths.append([*paths[parent], token])
                    below.append((len(tokens), grandchildren))
            level = below
        emitted = page["verify"](key, [1, 2], tree)
        longest = max(longest, len(emitted))
        choices = torch.tensor([[page["target_token"](key, [1, 2, *path]) for path in paths]])
        ancestors = torch.tensor([[one == other[: len(one)] for one in paths] for other in paths])[None]
        node = torch.tensor([tokens], dtype=torch.int64).reshape(1, -1)
        drafted = DraftTree(
            token_ids=node,
            parents=torch.tensor([parents], dtype=torch.int64).reshape(1, -1),
            depth=torch.tensor([[len(path) for path in paths[1:]]], dtype=torch.int64).reshape(1, -1),
            rank=torch.ones_like(node),
            scores=torch.ones(node.shape),
            draft_slots=-torch.ones_like(node),
            is_chain=False,
        )
        verdict = verify(choices, drafted, ancestors, max_depth=4)
        assert verdict.token_ids[0, : int(verdict.num_accepted[0]) + 1].tolist() == emitted
    assert longest > 2
