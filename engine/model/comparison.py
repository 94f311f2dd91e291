"""The start-up comparison: a model decodes a little through our caches and must say what its own forward says.

Two prompts are prefilled in one forward, go on token by token, and end in a tree of two branches; every logit is
compared with plain forwards of the same sequences. Prefill alone would not do: a model that keeps state outside
attention (convolutions, recurrences), or lets tokens of one batch see each other, passes it and decodes garbage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...core.errors import NotFiniteError, RlhfSpecError
from ..attention.backends import Attention
from ..cache.kv_pool import KVPool
from ..cache.segments import Segments
from ..decoding.draft_tree import DraftTree, ancestors_or_self, chain
from ..weights.causal_lm import CausalLM, max_context_tokens
from ..weights.chunks import describe_not_finite, not_finite, unique_tensors
from .forward_plan import ForwardPlan, TreePlan, TurnRows
from .llama_model import LlamaModel
from .prefill_plan import PrefillPiece, PrefillPlan
from .support import switch_attention, unsupported

if TYPE_CHECKING:
    from .runner import ModelRunner

COMPARED_TOKENS = 96
SINGLE_TOKENS = 4
BRANCH_TOKENS = 2
LEAST_TOKENS = 2 + SINGLE_TOKENS + BRANCH_TOKENS
"A prompt of one, singles, root, a branch."
PLAIN_ATTENTION = "eager"
TOLERATED = {torch.float32: (1e-3, 2e-3)}
"""Total variation, and difference of logits over their spread, up to which two forwards differ by rounding.

The second tells where all distributions are flat. Every row is judged."""
TOLERATED_OF_HALF = (0.25, 0.5)
"""The same of 16-bit types, for the median row: a deep model's own eager and sdpa forwards differ by up to 0.28 in a
row, where a router's near tie falls the other way (measured). Lost state spoils nearly every row, by far more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """One sample of the comparison, in the slot of its number: prompt, single tokens, root, two branches."""

    ids: Int[Tensor, " T"]
    "prompt, singles, root and first branch"
    branch: Int[Tensor, " b"]
    "the second branch, behind the root"
    plain: Float[Tensor, "T V"]
    "the model's own logits"
    plain_branch: Float[Tensor, "b V"]

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first that is decoded."""
        return len(self.ids) - SINGLE_TOKENS - 1 - BRANCH_TOKENS


class Comparison:
    """What a model's own forward says; made before its attention is replaced."""

    def __init__(self, model: CausalLM, pool: KVPool, *, vocab_size: int) -> None:
        """Run the plain forwards.

        Raises:
            ModelError: the model's own forward fails.
            NotFiniteError: its logits are not finite.
        """
        self._model = model
        # the tree takes BRANCH_TOKENS columns more than the sequence has tokens
        room = min(COMPARED_TOKENS, pool.capacity) - BRANCH_TOKENS
        longest = min(room, max_context_tokens(model.config) or room)
        # a second sample of another length shares the batch
        lengths = [longest, max(longest // 3, LEAST_TOKENS)][: pool.num_slots]
        with failing_is_refused(model, "its own forward"):
            self._sequences = [
                _sequence(model, slot, length, pool.device, vocab_size) for slot, length in enumerate(lengths)
            ]

    def require_equal(self, served: ModelRunner) -> None:
        """Decode the same through the cache. Leaves junk in the first slots.

        Raises ModelError, naming the layers that keep state elsewhere where they can be told.
        """
        lengths = [len(sequence.ids) for sequence in self._sequences]
        served.pool.memory.hold(np.array(lengths) + BRANCH_TOKENS)
        attended: Counter[int] = Counter()
        model = self._model
        with failing_is_refused(model, "its forward through our cache"):
            for phase, plain, got in self._phases(served, attended):
                if not is_rounding(plain, got, model):
                    raise unsupported(
                        model,
                        f"{phase}, its logits through our cache differ from its own forward's (total variation "
                        f"{total_variation(plain, got):.1e}){_state_elsewhere(model, served, attended)}",
                    )

    def _phases(self, served: ModelRunner, attended: Counter[int]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield what is done, the model's own logits and ours."""
        sequences, device = self._sequences, served.pool.device
        pieces = [
            PrefillPiece(slot=slot, start=0, length=sequence.prompt_tokens)
            for slot, sequence in enumerate(sequences)
        ]
        prompts = [sequence.ids[: sequence.prompt_tokens] for sequence in sequences]
        plan = _Listening(PrefillPlan(pool=served.pool, attention=served.attention, pieces=pieces), attended)
        positions = torch.cat([torch.arange(len(prompt), device=device) for prompt in prompts])
        yield (
            "in prefill",
            torch.cat([sequence.plain[: sequence.prompt_tokens] for sequence in sequences]),
            served.logits(torch.cat(prompts), positions, plan),
        )
        base = torch.tensor([sequence.prompt_tokens for sequence in sequences], device=device)
        nothing = chain(base.new_empty(len(base), 0), torch.empty(len(base), 0, device=device))
        for step in range(SINGLE_TOKENS):
            at = (base + step).tolist()
            root = _column([s.ids[i] for s, i in zip(sequences, at, strict=True)])
            plain = torch.stack([s.plain[i] for s, i in zip(sequences, at, strict=True)])
            yield (
                "decoding one token at a time",
                plain,
                tree_logits(served, root, nothing, base + step, view=max(at) + 1)[:, 0],
            )
        root_at = (base + SINGLE_TOKENS).tolist()
        branches = _two_branches(
            torch.stack([s.ids[i + 1 :] for s, i in zip(sequences, root_at, strict=True)]),
            torch.stack([s.branch for s in sequences]),
        )
        root = _column([s.ids[i] for s, i in zip(sequences, root_at, strict=True)])
        own = [
            torch.stack([s.plain[i + 1 :], s.plain_branch], 1)
            for s, i in zip(sequences, root_at, strict=True)
        ]
        plain = torch.stack(
            [
                torch.cat([s.plain[i, None], both.flatten(0, 1)])
                for s, i, both in zip(sequences, root_at, own, strict=True)
            ]
        )
        yield (
            "decoding a tree",
            plain.flatten(0, 1),
            tree_logits(
                served, root, branches, base + SINGLE_TOKENS, view=max(root_at) + 1 + 2 * BRANCH_TOKENS
            ).flatten(0, 1),
        )


def tree_logits(
    served: ModelRunner, root: Int[Tensor, "B 1"], tree: DraftTree, base: Int[Tensor, " B"], *, view: int
) -> Float[Tensor, "B n V"]:
    """Run root and nodes of a tree behind `base` cached tokens of slots 0..B-1, with `view` positions in sight."""
    ids, positions = torch.cat([root, tree.token_ids], dim=1), base[:, None] + tree.depth_with_root
    plan = tree_plan(served, tree, base, view=view)
    return served.logits(ids.reshape(-1), positions.reshape(-1), plan).view(*ids.shape, -1)


def tree_plan(served: ModelRunner, tree: DraftTree, base: Int[Tensor, " B"], *, view: int) -> TreePlan:
    """The plan of such a forward."""
    return TreePlan(
        pool=served.pool,
        attention=served.attention,
        base=base,
        num_tokens=tree.num_nodes + 1,
        seen=None if tree.is_chain else ancestors_or_self(tree),
        depth=None if tree.is_chain else tree.depth_with_root,
        view_tokens=view,
    )


def require_finite_logits(served: ModelRunner) -> None:
    """Decode a prompt of weights that have no forward of their own to compare with. Leaves junk in the first slot.

    Raises NotFiniteError, naming the weight at fault where there is one.
    """
    model, pool = served.model, served.pool
    room = min(COMPARED_TOKENS, pool.capacity)
    length = min(room, max_context_tokens(model.config) or room)
    ids = compared_ids(model, 0, length, served.vocab_size).to(pool.device)
    pool.memory.hold(np.array([length]))
    piece = PrefillPiece(slot=0, start=0, length=length)
    plan = PrefillPlan(pool=pool, attention=served.attention, pieces=[piece])
    _finite(model, served.logits(ids, torch.arange(length, device=pool.device), plan))


def total_variation(plain: Float[Tensor, "M V"], served: Float[Tensor, "M V"]) -> float:
    """Return the largest total variation between two forwards' distributions; NaN where one is not finite."""
    return float(_variations(plain.float(), served.float()).max())


def _variations(plain: Float[Tensor, "M V"], served: Float[Tensor, "M V"]) -> Float[Tensor, " M"]:
    return (plain.softmax(-1) - served.softmax(-1)).abs().sum(-1) / 2


def is_rounding(plain: Float[Tensor, "M V"], served: Float[Tensor, "M V"], model: CausalLM) -> bool:
    """Whether two forwards differ by no more than the model's type rounds."""
    plain, served = plain.float(), served.float()
    difference = (plain - plain.mean(-1, keepdim=True)) - (served - served.mean(-1, keepdim=True))
    relative = difference.norm(dim=-1) / plain.std(-1, correction=0).mul(plain.shape[-1] ** 0.5).clamp(
        min=1e-6
    )
    if model.dtype in TOLERATED:
        variation, spread = TOLERATED[model.dtype]
        return float(_variations(plain, served).max()) <= variation and float(relative.max()) <= spread
    variation, spread = TOLERATED_OF_HALF
    return (
        float(_variations(plain, served).quantile(0.5)) <= variation
        and float(relative.quantile(0.5)) <= spread
    )


def continuation_fault(
    model: CausalLM,
    prompt: Int[np.ndarray, " P"],
    token_ids: Int[np.ndarray, " T"],
    logprobs: Float[np.ndarray, " T"],
) -> str | None:
    """How a greedy continuation differs from the model's own forward by more than rounding; None: it does not.

    Each token must be the best one, or behind it by rounding, and its log-probability the model's.
    """
    ids, chosen = torch.from_numpy(np.concatenate([prompt, token_ids])), torch.from_numpy(token_ids)
    rows = _finite(model, plain_logits(model, ids))[len(prompt) - 1 : -1].float()
    at = rows.gather(-1, chosen[:, None])[:, 0]
    spread = rows.std(-1, correction=0).clamp(min=1e-6)
    behind = (rows.max(-1).values - at) / spread
    apart = (at - rows.logsumexp(-1) - torch.from_numpy(logprobs)).abs() / spread
    worst, (_, tolerated) = torch.maximum(behind, apart), TOLERATED.get(model.dtype, TOLERATED_OF_HALF)
    difference = float(worst.max() if model.dtype in TOLERATED else worst.quantile(0.5))
    if difference <= tolerated:
        return None
    place = int(worst.argmax())
    return (
        f"response token {place} of {len(token_ids)} is {int(token_ids[place])} with log-probability "
        f"{logprobs[place]:.3f}, and the {model.config.model_type} model's own forward takes "
        f"{int(rows[place].argmax())} and gives that one {float(at[place] - rows[place].logsumexp(-1)):.3f}"
    )


@contextmanager
def failing_is_refused(model: CausalLM, what: str) -> Iterator[None]:
    """Turn whatever a model's own code raises in the block into a ModelError; our errors and full memory pass."""
    try:
        yield
    except (RlhfSpecError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "allocate memory" in str(error):  # torch's CPU allocator raises a RuntimeError
            raise
        lines = str(error).strip().splitlines() or [""]
        raise unsupported(model, f"{what} raises {type(error).__name__}: {lines[0]}") from error


@torch.inference_mode()
def plain_logits(model: Any, ids: Int[Tensor, " T"]) -> Float[Tensor, "T V"]:
    """Run the model's own forward, with its own attention, over one sequence."""
    before = model.config._attn_implementation or PLAIN_ATTENTION
    switch_attention(model, PLAIN_ATTENTION)
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    switch_attention(model, before)
    return logits


def _sequence(model: CausalLM, slot: int, length: int, device: torch.device, vocab_size: int) -> _Sequence:
    ids, behind = compared_ids(model, slot, length, vocab_size).to(device), length - BRANCH_TOKENS
    branch = ids[behind:].flip(0)
    plain = _finite(model, plain_logits(model, ids)[:, :vocab_size])
    other = plain_logits(model, torch.cat([ids[:behind], branch]))[behind:, :vocab_size]
    return _Sequence(ids=ids, branch=branch, plain=plain, plain_branch=_finite(model, other))


def compared_ids(model: CausalLM, slot: int, length: int, vocab_size: int) -> Int[Tensor, " T"]:
    """Token ids without the padding one: some models (RoBERTa's kin) count positions by it."""
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    known = torch.tensor([token for token in range(vocab_size) if token != padding])
    return known[(torch.arange(length) * (31 + 6 * slot) + slot) % len(known)]


def _finite(model: CausalLM, logits: Tensor) -> Tensor:
    """Return the logits. Raises NotFiniteError, naming the weight at fault where there is one."""
    if torch.isfinite(logits.float().logsumexp(-1)).all():
        return logits
    # those of ours were finite when they were read: what is odd is a vector that a caller put there
    held = model.vectors if isinstance(model, LlamaModel) else dict(unique_tensors(model))
    if odd := not_finite(held.items()):
        cause = f"{describe_not_finite(odd)}; take another checkpoint"
    else:
        cause = (
            f"its weights are finite, so {model.dtype} is too narrow; take another models.dtype or checkpoint"
        )
    raise NotFiniteError(f"the {model.config.model_type} model gives logits that are not finite: {cause}")


def _two_branches(first: Int[Tensor, "B b"], second: Int[Tensor, "B b"]) -> DraftTree:
    """A tree whose root has two children, each the head of a chain; the branches' nodes alternate."""
    batch, levels = first.shape
    ids = torch.stack([first, second], 2).flatten(1)
    number = torch.arange(2 * levels, device=ids.device).expand(batch, -1)
    return DraftTree(
        token_ids=ids,
        parents=(number - 1).clamp(min=0),
        depth=number // 2 + 1,
        rank=number % 2 + 1,
        scores=torch.ones(batch, 2 * levels, device=ids.device),
        draft_slots=-torch.ones_like(ids),
        is_chain=False,
    )


def _column(ids: list[Tensor]) -> Int[Tensor, "B 1"]:
    return torch.stack(ids)[:, None]


class _Listening(ForwardPlan):
    """A forward plan that counts which layers attend."""

    def __init__(self, plan: PrefillPlan, attended: Counter[int]) -> None:
        self.pool, self.attention = plan.pool, plan.attention
        self._plan, self._attended = plan, attended

    def segments(self) -> Segments:
        # a fused forward asks once and attends in every layer
        self._attended.update(range(self.pool.shape.num_layers))
        return self._plan.segments()

    def store_rows(self, layer: int, qkv: Tensor) -> None:
        self._plan.store_rows(layer, qkv)

    def attend_rows(self, attention: Attention, layer: int, qkv: Tensor, **how: Any) -> Tensor:
        return self._plan.attend_rows(attention, layer, qkv, **how)

    def attend(self, layer: int, qkv: Tensor, **how: Any) -> Tensor:
        self._attended[layer] += 1
        return self._plan.attend(layer, qkv, **how)

    def store_turned(self, layer: int, turn: TurnRows, qkv: Tensor, positions: Tensor) -> Tensor:
        return self._plan.store_turned(layer, turn, qkv, positions)

    def attend_turned(self, layer: int, turn: TurnRows, qkv: Tensor, positions: Tensor, **how: Any) -> Tensor:
        self._attended[layer] += 1
        return self._plan.attend_turned(layer, turn, qkv, positions, **how)


def _state_elsewhere(model: CausalLM, served: ModelRunner, attended: Counter[int]) -> str:
    """Say which layers keep what the cache does not hold, as far as it can be told."""
    layers = range(served.pool.shape.num_layers)
    absent = [layer for layer in layers if not attended[layer]]
    several = [layer for layer in layers if attended[layer] > 1]
    if absent:
        kinds = ", ".join(dict.fromkeys(_kind(model, layer) for layer in absent))
        return f": layers {_numbers(absent)} ({kinds}) keep state outside the cache of keys and values"
    if several:
        return (
            f": layers {_numbers(several)} attend more than once in a forward, and the cache holds one pass"
        )
    return ""


def _kind(model: Any, layer: int) -> str:
    """What a config calls a layer, else its class."""
    config = model.config.get_text_config()
    for name in ("layer_types", "layers_block_type", "block_types"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, (list, tuple)) and layer < len(kinds):
            return str(kinds[layer])
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == config.num_hidden_layers:
            return type(module[layer]).__name__
    return "unknown"


def _numbers(layers: list[int]) -> str:
    shown = ", ".join(str(layer) for layer in layers[:6])
    return shown + (", ..." if len(layers) > 6 else "")
