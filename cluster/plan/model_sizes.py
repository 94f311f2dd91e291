"""The sizes of a model that memory depends on, and what follows from them alone."""

from __future__ import annotations

from dataclasses import dataclass

from ...engine.cache.kv_pool import KVShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_LAYING_OUT = 1.1
"Our own model's weights are there once; the largest product a second time while it is laid out (measured)."
_INFERENCE_COPY = 1.5
"Of other models products read a copy beside the module, on CPU in float32 at most; half as much again to lay it out."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of one causal LM that memory depends on."""

    num_params: int
    kv: KVShape
    hidden_size: int
    vocab_size: int
    num_adapter_params: int | None = None
    "that learn where the others stay (LoRA); None: all learn"

    has_whole_logits: bool = False
    "something comes behind the head (soft caps, scaling), so that its logits are not computed by chunks"

    is_ours: bool = False
    "whether instances hold it as `engine.model.llama_model` does"

    mlp_size: int = 0
    "values of a token between the MLP's products; of a mixture those of all experts that it goes to"

    norms_heads: bool = False
    "queries and keys are normalised by the head"

    has_two_tables: bool = False
    "the head is no second use of the embedding"

    num_product_params: int = 0
    "parameters that matrix products of the layers read, which autocast rounds"

    largest_product: int = 0
    "values of the layers' largest tensor, which of a mixture may be one for all experts"

    @property
    def table(self) -> int:
        """Values of the embedding, or of the head."""
        return self.vocab_size * self.hidden_size

    def layer_bytes(self, *, in_bfloat16: bool) -> int:
        """Bytes of a token that a layer keeps for the backward pass, counted tensor by tensor (Llama and its kin).

        The input of each of two norms, normalised and scaled, float32, of which autocast rounds a copy for every
        product; queries, keys, values, what attention gives before and after it is laid out; gate, its activation, up
        and their product. Norms of heads: their input and what is normalised.
        """
        size, kv = (2 if in_bfloat16 else 4), self.kv
        queries, keys = kv.num_heads * kv.head_size, kv.num_kv_heads * kv.head_size
        norms = 2 * (4 + 4) + (2 * (3 + 2) if in_bfloat16 else 2 * 4)
        of_heads = (queries + keys) * (6 if in_bfloat16 else 8) if self.norms_heads else 0
        return (
            norms * self.hidden_size + size * (3 * queries + 2 * keys) + size * 4 * self.mlp_size + of_heads
        )

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the parameters."""
        return self.num_params * DTYPE_BYTES[dtype]

    def decoding_bytes(self, dtype: str, *, on_gpu: bool) -> int:
        """Bytes of an instance's weights as they are published and as they decode."""
        size = DTYPE_BYTES[dtype] if on_gpu else 4
        if self.is_ours and not on_gpu:
            # a head that is the embedding is held as both
            return int((self.num_params + self.table) * size * _LAYING_OUT)
        if self.is_ours:
            # what is laid out while there are neither caches nor buckets takes their room
            return (self.num_params + (0 if self.has_two_tables else self.table)) * size
        copies = 1 if on_gpu else _INFERENCE_COPY
        return self.weight_bytes(dtype) + int(self.num_params * size * copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    """The models of a run."""

    target: ModelShape
    draft: ModelShape | None = None
    "None: nothing drafts that has weights of its own"
    teacher: ModelShape | None = None
    reward_params: int | None = None
    "of all reward models in the pool; None: there are only rules"
