"""Runs a causal LM over our KV pool: a stock Hugging Face module or our own forward of its weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from ...core.errors import ModelError, NumericsError
from ..attention.backends import Attention
from ..cache.dealt_pool import LeaderPool, RankPool
from ..cache.kv_pool import KVPool, KVShape
from ..parts import PARTS, Ranks, part_width
from ..weights.causal_lm import CausalLM
from .comparison import Comparison, failing_is_refused, require_finite_logits
from .compute_backend import ComputeBackend, FusedChain, PoolAttention
from .cuda_graphs import SAMPLE_COUNTS, ForwardGraphs, Recorder, at_least
from .forward_plan import ForwardPlan, TreePlan
from .hidden_taps import HiddenFollower, HiddenTaps
from .llama_forward import LlamaForward
from .llama_model import LlamaModel, can_serve
from .sent_plans import as_sent
from .support import not_held, refuse_unsupported

LOGITS_TOGETHER = 1 << 20
"Numbers that a rank says at once where ranks gather logits."


@runtime_checkable
class Forward(Protocol):
    """The model's arithmetic: packed tokens in, next-token logits out, attention by the plan."""

    min_tokens: int
    "fewer tokens are padded with dummies, because they would round differently"

    @property
    def library_product(self) -> str | None:
        """Name of a weight outside the linear layers, whose products round by their company; None: there is none."""
        ...

    def __call__(
        self, input_ids: Int[Tensor, " M"], position_ids: Int[Tensor, " M"], plan: ForwardPlan
    ) -> Float[Tensor, "M V"]:
        """Return every token's next-token logits."""
        ...

    def fill(self, input_ids: Int[Tensor, " M"], position_ids: Int[Tensor, " M"], plan: ForwardPlan) -> None:
        """Compute keys and values only."""
        ...

    def tap(self, taps: HiddenTaps) -> None:
        """Show hidden states to `taps` from now on. Raises ModelError where layers cannot be found."""
        ...

    def output(self, x: Float[Tensor, "M H"]) -> Float[Tensor, "M V"]:
        """Return the logits of states that another norm than the last one has normed: the output matrix alone."""
        ...

    @property
    def embedding(self) -> Float[Tensor, "V H"]:
        """The table of embeddings: one memory, whatever is loaded."""
        ...

    def load(self, names: Collection[str], parts: Iterable[Mapping[str, Tensor]]) -> str | None:
        """Take other weights and read back what decodes: see `ModelRunner.load_parts`.

        Returns the name of a copy that is not bit for bit what came; None: all are.
        """
        ...

    def altered_copy(self) -> str | None:
        """Name of a copy that the arithmetic reads and that is not what it is made of, bit by bit; None: none is."""
        ...


class ModelRunner:
    """A model, its KV pool, and the forward that joins them."""

    def __init__(
        self,
        model: CausalLM,
        *,
        num_slots: int,
        capacity: int,
        backend: ComputeBackend,
        vocab_size: int,
        attention: Attention | PoolAttention | None = None,
        reach: int | None = None,
        stock: bool = False,
        recorder: Recorder | None = None,
        graph_bytes: int = 0,
        who: str = "the model",
    ) -> None:
        """Build pool and forward, and compare the forward with the model's own, where it has one.

        Args:
            model: ours, or Hugging Face's in eval mode: a Llama or kin is copied, others stay the owner of the weights.
            num_slots: samples at once.
            capacity: tokens of one sample, draft nodes included.
            backend: what computes, chosen for the model's device in this thread.
            vocab_size: token ids to return logits for.
            attention: instead of the back end's, which is bitwise invariant.
            reach: see `KVPool`; given: the cache's memory comes with the samples' length.
            stock: use the Hugging Face module even where a forward of ours exists.
            recorder: records decode forwards to replay them; none: every forward runs as it comes.
            graph_bytes: device memory that recordings may hold.
            who: in errors.

        Raises:
            ModelError: the architecture cannot be served.
            NotFiniteError: the model's weights or logits are not finite.
        """
        refuse_unsupported(model, capacity)
        self.who = who
        self.backend = backend
        self.attention: Attention | PoolAttention = attention or backend.attention
        self.vocab_size = vocab_size
        self.device = model.device
        # CPU attention runs in float32: bfloat16 products sum in pairs, which decoys would split
        dtype = torch.float32 if self.device.type == "cpu" else model.dtype
        self.ranks: Ranks | None = None
        "the group that the model is dealt to"
        room = {"num_slots": num_slots, "capacity": capacity, "reach": reach, "dtype": dtype}
        if isinstance(model, LlamaModel) and (ranks := model.ranks) is not None:
            self.ranks = ranks
            self._tell_of_runner(num_slots, capacity, reach, graph_bytes if recorder is not None else 0)
            kind = LeaderPool if ranks.share.rank == 0 else RankPool
            whole = KVShape.of(model.config)
            self.pool: KVPool = kind(model.kv_shape, whole=whole, ranks=ranks, device=self.device, **room)
        else:
            self.pool = KVPool(KVShape.of(model.config), device=self.device, **room)
        comparison = (
            None if isinstance(model, LlamaModel) else Comparison(model, self.pool, vocab_size=vocab_size)
        )
        with failing_is_refused(model, "laying it out for decoding"):
            if not isinstance(model, LlamaModel) and not stock and can_serve(model):
                model = LlamaModel.of(model, backend)
            self._forward: Forward = (
                LlamaForward(model, capacity=self.pool.capacity)
                if isinstance(model, LlamaModel)
                else _stock_forward(model, backend)
            )
        self.model = model
        self._require_held(self._forward.altered_copy())
        self._chain: FusedChain | None = None
        self._one_thread = torch.get_num_threads() == 1
        self.graphs: ForwardGraphs | None = None
        self.taps: HiddenTaps | None = None
        self._require_right(comparison)
        if recorder is not None:
            self.graphs = ForwardGraphs(recorder, max_bytes=graph_bytes)

    @property
    def is_own(self) -> bool:
        """Whether our own forward serves the model."""
        return isinstance(self._forward, LlamaForward)

    @property
    def is_fused(self) -> bool:
        """Whether the back end computes the whole of a forward in one call: groups give the bits of one rank then."""
        return self._fused_forward is not None

    @property
    def recorded_samples(self) -> tuple[int, ...]:
        """Numbers of samples that decode forwards are recorded for; none: they run as they come."""
        if self.graphs is None:
            return ()
        slots = self.pool.num_slots
        return tuple(sorted({min(at_least(count, SAMPLE_COUNTS), slots) for count in range(1, slots + 1)}))

    @property
    def prepacked(self) -> bool:
        """Whether any weight lies in another layout than a plain matrix."""
        return isinstance(self.model, LlamaModel) and self.model.prepacked

    @property
    def rounds_by_chunk(self) -> bool:
        """Whether a token's place in its chunk of positions may change a bit (`draft_tree.drop_split_nodes`)."""
        return self._fused_forward is None and not self._rounds_by_batch

    @property
    def library_product(self) -> str | None:
        """Name of a weight outside the linear layers, whose products round by their company; None: there is none."""
        return self._forward.library_product

    def stop_prepacking(self) -> None:
        """Lay the weights out for plain products."""
        if isinstance(self.model, LlamaModel) and self.prepacked:
            self.model = self.model.plain()
            self._forward = LlamaForward(self.model, capacity=self.pool.capacity)
            self._chain = None
            if self.taps is not None:
                self._forward.tap(self.taps)

    def tap(self, layers: Sequence[int], *, max_tokens: int, whole_prefills: bool = False) -> HiddenTaps:
        """Set hidden states aside from now on, of forwards of at most so many tokens.

        Args:
            layers: whose inputs, from 0; the number of layers asks for the last one's output.
            max_tokens: of one forward.
            whole_prefills: as of `HiddenTaps`.

        Raises:
            ModelError: there is no such layer, or a group's prefills are to be whole.
        """
        if whole_prefills and self.ranks is not None:
            raise ModelError(
                "an MTP layer reads the last layer's output of prefills, which no group of ranks computes"
            )
        num_layers = self.pool.shape.num_layers
        if any(not 0 <= layer <= num_layers for layer in layers):
            raise ModelError(
                f"hidden states of layers {list(layers)} were asked for, the target has {num_layers} layers; take a "
                "draft head that was made for this target"
            )
        if self.graphs is not None and self.graphs.shapes:
            raise ModelError(
                "hidden states must be asked for before the first decode step: forwards are recorded"
            )
        padding = self._forward.min_tokens
        taps = HiddenTaps(
            layers,
            hidden_size=int(self.model.config.get_text_config().hidden_size),
            max_tokens=max_tokens + padding,
            dtype=torch.float32 if self.device.type == "cpu" else self.model.dtype,
            device=self.device,
            whole_prefills=whole_prefills,
        )
        self._forward.tap(taps)
        self.taps = taps
        return taps

    @property
    def followers(self) -> Sequence[HiddenFollower]:
        """Who hears of hidden states."""
        return () if self.taps is None else self.taps.followers

    @property
    def fused_chain(self) -> FusedChain | None:
        """What drafts chains in few calls, where the back end has it."""
        if self._chain is None and self._fused_forward is not None:
            self._chain = self._fused_forward.chain(self.pool, vocab_size=self.vocab_size)
        return self._chain

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """In the block forwards run as they come: what is recorded around them must not find recordings in it."""
        graphs, self.graphs = self.graphs, None
        try:
            yield
        finally:
            self.graphs = graphs

    @torch.inference_mode()
    def logits(
        self, input_ids: Int[Tensor, " M"], position_ids: Int[Tensor, " M"], plan: ForwardPlan
    ) -> Float[Tensor, "M V"]:
        """Run the packed tokens and return each one's next-token logits, padded ids cut off.

        Raises NumericsError where torch's number of threads is no longer what the runner was built with.
        """
        if self.ranks is None:
            return self._logits(input_ids, position_ids, plan)
        self._order("logits", input_ids, position_ids, plan)
        mine = self._logits(input_ids, position_ids, plan)
        width = part_width(self.vocab_size) * (PARTS // self.ranks.share.ranks)
        # a few rows at once: where ranks meet there stays room for the most that they ever said
        blocks = [
            torch.cat(list(self.ranks.exchange(F.pad(rows, (0, width - rows.shape[1])))), dim=1)
            for rows in mine.split(max(1, LOGITS_TOGETHER // width))
        ]
        return torch.cat(blocks)[:, : self.vocab_size]

    @torch.inference_mode()
    def own_logits(
        self,
        input_ids: Int[Tensor, " M"],
        position_ids: Int[Tensor, " M"],
        plan: ForwardPlan,
        *wanted: Tensor,
    ) -> Float[Tensor, "M W"]:
        """In a group: run the packed tokens and return logits of this rank's token ids.

        `wanted` goes to the other ranks with the order.
        """
        self._order("answers", input_ids, position_ids, plan, *wanted)
        return self._logits(input_ids, position_ids, plan)

    def _logits(self, input_ids: Tensor, position_ids: Tensor, plan: ForwardPlan) -> Tensor:
        self._require_same_threads()
        padded = self._padded(input_ids, position_ids)
        if self.graphs is not None and isinstance(plan, TreePlan):
            out = self.graphs.run(self._forward, *padded, plan)
        else:
            out = self._forward(*padded, plan)
        return out[: len(input_ids), : self.vocab_size]

    @torch.inference_mode()
    def fill(self, input_ids: Int[Tensor, " M"], position_ids: Int[Tensor, " M"], plan: ForwardPlan) -> None:
        """Run the packed tokens for their keys and values only. Raises NumericsError as `logits`."""
        self._order("fill", input_ids, position_ids, plan)
        self._require_same_threads()
        self._forward.fill(*self._padded(input_ids, position_ids), plan)

    @torch.inference_mode()
    def output_logits(self, x: Float[Tensor, "M H"]) -> Float[Tensor, "M V"]:
        """Return the logits of normed states by the output matrix as it is now; padded ids are cut off."""
        return self._forward.output(x)[:, : self.vocab_size]

    @property
    def embedding(self) -> Float[Tensor, "V H"]:
        """The model's table of embeddings, which follows what is loaded."""
        return self._forward.embedding

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load named weights. Raises WeightsError as `load_parts`."""
        self.load_parts(tensors, [tensors])

    def load_parts(self, names: Collection[str], parts: Iterable[Mapping[str, Tensor]]) -> None:
        """Load named weights part by part, as they come, and read back every copy that decodes.

        All is written in place: recorded graphs stay right. What raises on the way leaves weights of two versions,
        which the caller must not decode from. Raises WeightsError when names or a part do not fit, and when a copy
        differs from what came in any bit.
        """
        self._require_same_threads()
        self._chain = None
        self._require_held(self._forward.load(names, parts))

    def _require_right(self, comparison: Comparison | None) -> None:
        """Compare with the model's own forward, where it has one; of a group, the leader looks at all ranks' logits."""
        if self.ranks is not None and self.ranks.share.rank > 0:
            return
        if comparison is None:
            require_finite_logits(self)
        else:
            comparison.require_equal(self)

    def _tell_of_runner(self, num_slots: int, capacity: int, reach: int | None, graph_bytes: int) -> None:
        """Let the other ranks make runners like this one."""
        assert self.ranks is not None
        sizes = {"num_slots": num_slots, "capacity": capacity, "reach": reach, "vocab_size": self.vocab_size}
        attention = None if isinstance(self.attention, PoolAttention) else self.attention
        self.ranks.order("runner", sizes=sizes, attention=attention, graph_bytes=graph_bytes)

    def _order(
        self, kind: str, input_ids: Tensor, position_ids: Tensor, plan: ForwardPlan, *wanted: Tensor
    ) -> None:
        if self.ranks is not None:
            (sent, tensors), is_full = as_sent(plan), self.graphs is not None and self.graphs.is_full
            self.ranks.order(kind, input_ids, position_ids, *wanted, *tensors, plan=sent, is_full=is_full)

    def _require_held(self, altered: str | None) -> None:
        if altered is not None:
            raise not_held(self.who, altered)

    def _require_same_threads(self) -> None:
        """Several threads round unlike one: no sample may see both."""
        if self.device.type == "cpu" and (torch.get_num_threads() == 1) != self._one_thread:
            raise NumericsError(
                f"this engine was built with torch.get_num_threads() {'at' if self._one_thread else 'not at'} 1, and "
                f"its thread now has {torch.get_num_threads()}: it would round differently from here on; call "
                "torch.set_num_threads in the thread that decodes as it was when the engine was built"
            )

    @property
    def _fused_forward(self) -> LlamaForward | None:
        """The forward, where the back end computes the whole of it in one call."""
        forward = self._forward
        if not isinstance(forward, LlamaForward) or forward.fused is None:
            return None
        return forward if isinstance(self.attention, PoolAttention) else None

    @property
    def _rounds_by_batch(self) -> bool:
        """Whether bits depend on the batch whatever is padded or dropped: library attention beside the CPU."""
        return self.device.type != "cpu" and self.attention is not self.backend.attention

    def _padded(self, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        missing = 0 if self._rounds_by_batch else self._forward.min_tokens - len(input_ids)
        if missing <= 0:
            return input_ids, position_ids
        zeros = input_ids.new_zeros(missing)
        return torch.cat([input_ids, zeros]), torch.cat([position_ids, zeros])


def _stock_forward(model: Any, backend: ComputeBackend) -> Forward:
    # imports transformers' modelling code, which most instances never need
    from .stock_forward import StockForward

    return StockForward(model, backend)
