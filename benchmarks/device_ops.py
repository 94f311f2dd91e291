"""What a decode step asks of a GPU: launches, copies and waits, counted without one; with one, times beside them.

Counted on tensors of the `meta` device, which have shapes and no numbers: one call of an operator that computes or
moves something is one launch; operators that torch takes apart are counted by their parts, attention by lengths as two
(its parts are joined). Views and new memory are none. Whoever looks at a number is refused. Bars: a layer at most 10
launches, plain and verifying, four of them products; a level of a tree of 16 at most 12 beside the draft's layers.
Outside recordings a plain step at most 12, a chain of 8 at most 20, a tree of 8 at most 30, of 16 at most 40; one copy
down a step, waited for once, and one up where there is a draft. A publication: one wait for all its checksums on either
side, and one for what is laid out. A prefill of fresh prompts: one call of attention a layer, no mask. An update: one
copy up and one call of attention a layer for each pack, at most two waits a minibatch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from ..actors.generation.engine_host import received
from ..core.config import AlgorithmConfig, SpeculationConfig, TrainerConfig
from ..core.records import (
    Prompt,
    Reward,
    Rollout,
    SampleKey,
    SampleRequest,
    SamplingParams,
    Stream,
    WeightSpan,
    as_asked,
)
from ..core.weight_records import WORDS
from ..engine.attention.by_length import split_attention
from ..engine.cuda.cuda_backend import CudaBackend, CudaLinear
from ..engine.decode_step import decode_step
from ..engine.decoding.noise import Noise, NoiseSource
from ..engine.draft_policies import build_policy
from ..engine.drafters.model_drafter import ModelDrafter
from ..engine.engine import Engine
from ..engine.model import linears, llama_model
from ..engine.model import runner as runner_module
from ..engine.model.compute_backend import ComputeBackend
from ..engine.model.cuda_graphs import Run
from ..engine.model.prefill import fill_committed
from ..engine.model.prefill_plan import PrefillPiece
from ..engine.model.runner import ModelRunner
from ..engine.recorded_step import StepRecordings
from ..engine.weights import digests
from ..engine.weights.chunks import WeightPacker, unique_tensors
from ..engine.weights.loading import freeze
from ..learning.training import packed_attention
from ..learning.training.learner import Learner
from ..learning.training.training_forward import forwards_made
from .support.harness import Bench
from .support.training_layer import layer_of_an_update
from .support.workload import demo_workload

META = torch.device("meta")
LOOKS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "masked_select"}
MADE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
WHOLE = {"scaled_dot_product_attention"}
ATTENTION_CALLS = WHOLE | {"_varlen_attn"}
KERNELS = {"attend": 2}
"Launches of an operator of ours that is more than one: attention's parts are joined by another."


class DeviceCalls(TorchDispatchMode):
    """`counts`: launches, those replayed inside recordings, copies up and down, those of them that wait.

    `masks`: bytes of the masks that attention read, by their memory. `counts["bytes"]`: read and written on the device.
    """

    def __init__(self, read_as: float = 0.0, device: str = "meta") -> None:
        """`read_as` is what every number of the device is on the host; `device`: the kind that counts."""
        super().__init__()
        self._read_as, self._device = read_as, device
        self.counts: Counter[str] = Counter()
        self.by_name: Counter[str] = Counter()
        self.masks: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        devices = {x.device.type for x in given}
        if name in LOOKS and self._device in devices:
            raise AssertionError(f"{name} looks at numbers of the device, where a step may not wait")
        target = kwargs.get("device", next((x for x in args if isinstance(x, torch.device)), None))
        if name in ("_to_copy", "to") and target is not None and devices and target.type not in devices:
            self._crosses("downs" if target.type == "cpu" else "ups", kwargs.get("non_blocking"))
            if target.type == "cpu":
                return torch.full(given[0].shape, self._read_as, dtype=kwargs.get("dtype") or given[0].dtype)
            return func(*args, **kwargs)
        if name == "copy_" and devices == {"cpu", self._device} and len(devices) > 1:
            down = given[0].device.type == "cpu"
            self._crosses(
                "downs" if down else "ups", kwargs.get("non_blocking") or any(x is True for x in args)
            )
            return given[0] if down else func(*args, **kwargs)
        if name in WHOLE and (mask := args[3] if len(args) > 3 else kwargs.get("attn_mask")) is not None:
            self.masks[mask.untyped_storage()._cdata] = mask.untyped_storage().nbytes()
        if name not in WHOLE and func.namespace != "prim":
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        found = func(*args, **kwargs)
        if self._computes(func, name, given, found):
            self.note_kernel(name, [x for x in [*given, *tree_leaves(found)] if x is not None])
        return found

    def note_kernel(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Count an operator, and the bytes of the tensors that it reads and writes."""
        self.note(name, KERNELS.get(name, 1))
        self.counts["bytes"] += sum({x.untyped_storage()._cdata: x.nbytes for x in tensors}.values())

    def note(self, name: str, launches: int = 1) -> None:
        """Count what is no operator of torch."""
        self.counts["launches"] += launches
        self.by_name[name] += launches

    def read(self, tensor: Tensor, name: str) -> Tensor:
        """Count a kernel that reads a tensor for two numbers."""
        self.note(name)
        self.counts["bytes"] += tensor.nbytes
        return torch.empty(2, dtype=torch.int64, device=META)

    def _computes(self, func: Any, name: str, given: list[Tensor], found: Any) -> bool:
        made = [x for x in tree_leaves(found) if isinstance(x, Tensor) and x.device.type == self._device]
        if name in MADE or not (
            made or (func._schema.is_mutable and self._device in {x.device.type for x in given})
        ):
            return False
        known = {x.untyped_storage()._cdata for x in given}
        return func._schema.is_mutable or any(x.untyped_storage()._cdata not in known for x in made)

    def _crosses(self, way: str, non_blocking: object) -> None:
        self.counts[way] += 1
        self.note(way)
        if not non_blocking:
            self.counts["waits"] += 1


class CountingRecorder:
    """Counts what a recording holds when it is made, and one launch a replay."""

    held_bytes = 0

    def __init__(self, calls: DeviceCalls) -> None:
        self._calls = calls

    def record(self, run: Run) -> Run:
        """See `engine.model.cuda_graphs.Recorder`."""
        before = self._calls.counts["launches"]
        result = run()
        inside = self._calls.counts["launches"] - before

        def replay() -> Tensor:
            self._calls.note("replay")
            self._calls.counts["replayed"] += inside
            return result

        return replay


class CountedNoise(Noise):
    """As `engine.decoding.noise_cuda` makes it: a choice is a kernel and two calls, all values are one kernel."""

    def __init__(self, shape: tuple[int, int, int], note: Callable[[str, int], None]) -> None:
        super().__init__(torch.empty(shape, device=META))
        self.words = torch.empty(2, *shape[:2], dtype=torch.int32, device=META)
        self._note = note

    @property
    def values(self) -> Tensor:
        """See `Noise`."""
        self._note("gumbel", 1)
        return self._values

    def choose(self, logits: Tensor, levels: Tensor, divisors: Tensor, factors: Tensor) -> Tensor:
        """See `Noise.choose`."""
        self._note("choice", 3)
        return torch.empty(levels.shape, dtype=torch.int64, device=META)


class CountedNoiseSource(NoiseSource):
    """Hands it out."""

    ahead = False

    def __init__(self, calls: DeviceCalls) -> None:
        super().__init__(META)
        self._calls = calls

    def of_words(self, words: Tensor, vocab_size: int) -> Noise:
        """See `NoiseSource`."""
        return CountedNoise((*words.shape[1:], vocab_size), self._calls.note)  # pyright: ignore[reportArgumentType]


PLANS = {
    "plain": SpeculationConfig(policy="off"),
    "chain8": SpeculationConfig(policy="fixed", num_nodes=8, depth=8, branching=1),
    "tree8": SpeculationConfig(policy="fixed", num_nodes=8, depth=4, branching=2),
    "tree16": SpeculationConfig(policy="fixed", num_nodes=16, depth=8, branching=2),
}
BATCH, VOCAB_SIZE, CAPACITY, STEPS = 8, 512, 256, 3


def counted(plan: str, *, layers: int = 2, kernels: bool = True, recorded: bool = True) -> Counter[str]:
    """Return what a decode step of 8 samples asks of the device, a step's mean, beside `DeviceCalls.by_name`."""
    calls = DeviceCalls()
    with calls, _nothing_to_compare():
        engine = _engine(plan, calls, layers=layers, kernels=kernels, recorded=recorded)
        for index in range(BATCH):
            engine.submit(
                SampleRequest(
                    key=SampleKey(run_seed=0, stream=Stream.BENCH, sample_index=index),
                    prompt=Prompt(prompt_id=index, token_ids=np.arange(3, 20 + index)),
                    sampling=SamplingParams(max_new_tokens=100),
                )
            )
        # the first admits and fills, the second still brings drafters up, and both record
        for _ in range(2):
            engine.step()
        calls.counts.clear()
        calls.by_name.clear()
        for _ in range(STEPS):
            engine.step()
    total = calls.counts | {f"call {name}": count for name, count in calls.by_name.items()}
    return Counter({name: count / STEPS for name, count in total.items()})  # type: ignore[arg-type]


def layer_launches(plan: str, *, kernels: bool) -> float:
    """Return the launches of one decoder layer of the target in a step's forward."""
    few, many = (
        counted(plan, layers=layers, kernels=kernels, recorded=False)["launches"] for layers in (2, 4)
    )
    return (many - few) / 2


def level_launches() -> float:
    """Return the launches of one level of a tree of 16 outside the draft model's layers."""
    plans = {str(d): SpeculationConfig(policy="fixed", num_nodes=16, depth=d, branching=2) for d in (6, 8)}
    with patch.dict(PLANS, plans):
        few, many = (counted(plan, recorded=False)["launches"] for plan in plans)
    return (many - few) / 2 - layer_launches("tree16", kernels=True)


def prefill(*, layers: int = 3) -> dict[str, float]:
    """Return the attention calls of a layer, and the bytes of masks, of 8 prompts in one prefill."""
    calls = DeviceCalls()
    with calls, _nothing_to_compare():
        runner = _runner(layers, CudaBackend(META))
        tokens = np.arange(BATCH * 40).reshape(BATCH, 40) % VOCAB_SIZE
        pieces = [PrefillPiece(slot=slot, start=0, length=20 + slot) for slot in range(BATCH)]
        fill_committed(runner, tokens, pieces, 8192, cached=np.zeros(BATCH, dtype=np.int64))
    # the last layer's keys and values are all that is wanted of it
    attention = sum(calls.by_name[name] for name in ATTENTION_CALLS) / (layers - 1)
    return {"attention_calls_a_layer_prefill": attention, "mask_bytes_prefill": sum(calls.masks.values())}


PUBLICATION_BUCKET_BYTES = 1 << 17


def publication(*, layers: int = 2) -> dict[str, float]:
    """Return what a version costs an instance on the trainer's GPU: bytes read and written by one of it, and waits.

    The trainer waits and the instance waits beside what orders them, once a bucket: when it may be read, and written
    over. What is held as it is published is copied, and its comparison is left out: its tensors have no addresses.
    """
    calls, model, on_host = DeviceCalls(read_as=1.0), _model(layers), Tensor.tolist
    version = dict(unique_tensors(model))
    packer = WeightPacker(
        name="target",
        weight_version=1,
        hf_config_json=model.config.to_json_string(use_diff=False),
        chunk_bytes=PUBLICATION_BUCKET_BYTES,
        cuts=True,
        device=META,
        kind="words",
    )
    own = llama_model.LlamaModel(
        llama_model.LlamaConfig.of(packer.manifest().hf_config_json), model.dtype, CudaBackend(META)
    )
    with (
        calls,
        patch.object(Tensor, "tolist", lambda self: on_host(self.cpu())),
        patch.object(digests, "word_sums", lambda tensor, first: calls.read(tensor, "word_sums")),
    ):
        sent = list(packer.buckets(version.items()))
        packer.sums()
        by_trainer = calls.counts["waits"]
        calls.counts.clear()
        announced = replace(packer.manifest(), checksum=WORDS)
        buckets = iter(sent)
        # the trainer's window, as a member on its GPU reads it; checksums as every number of the device is read
        group: Any = SimpleNamespace(
            device=META,
            receive=lambda into, what: next(buckets),
            release=lambda what: None,
            of_trainer=lambda table, what: torch.ones_like(table),
        )
        own.load(version, received(announced, group, digests.Digest("words"), "gen-0"))
    return {
        "bytes_moved_a_byte_publication": calls.counts["bytes"] / announced.num_bytes,
        "buckets_publication": len(sent),
        "waits_publication_trainer": by_trainer,
        "waits_publication_instance": calls.counts["waits"],
    }


def update(*, layers: int = 2) -> dict[str, float]:
    """Return what an update asks of the device: uploads and attention calls a pack, waits a minibatch.

    Of two epochs less those of one: what an update does once, before its first step and after its last, is not counted.
    """
    once, twice = (_updated(layers, epochs) for epochs in (1, 2))
    more = Counter({name: twice[name] - once[name] for name in twice})
    return {
        "copies_up_a_pack_update": more["ups"] / more["packs"],
        "attention_calls_a_layer_update": more["call _varlen_attn"] / more["packs"] / layers,
        "waits_a_minibatch_update": more["waits"] / more["minibatches"],
    }


def _updated(layers: int, epochs: int) -> Counter[str]:
    """Count an update of 4 groups of 2 answers, two minibatches an epoch and two packs each."""
    calls = DeviceCalls(read_as=1.0)
    trainer = TrainerConfig(minibatch_size=4, max_tokens_per_forward=40, epochs=epochs)
    model = _model(layers).float().requires_grad_(True)
    # autocast knows no `meta`: attention alone is told that products are computed in 16 bits
    with calls, patch.object(packed_attention, "_products_of", lambda query: torch.bfloat16):
        learner = Learner(
            model,
            algorithm=AlgorithmConfig(kind="grpo", kl_coef=0.1, ratio_level="sequence"),
            trainer=trainer,
            temperature=1.0,
            seed=0,
            pad_token_id=0,
        )
        before = forwards_made()
        learner.update([_answer(index) for index in range(8)])
    # the reference's are the same whatever the epochs
    calls.counts["packs"] = forwards_made() - before
    calls.counts["minibatches"] = 2 * epochs
    return calls.counts | Counter({f"call {name}": count for name, count in calls.by_name.items()})


def _answer(index: int) -> Rollout:
    response = np.arange(5, 13) + index
    zeros = np.zeros(len(response), dtype=np.float32)
    request = SampleRequest(
        key=SampleKey(run_seed=0, stream=Stream.BENCH, sample_index=index),
        prompt=Prompt(prompt_id=index // 2, token_ids=np.arange(20) + index // 2),
        sampling=SamplingParams(max_new_tokens=len(response)),
        group_id=index // 2,
    )
    completion = replace(
        as_asked(request),
        token_ids=response,
        policy_logprobs=zeros,
        sampling_logprobs=zeros,
        weight_spans=(WeightSpan(weight_version=0, first_position=0),),
        sampled=None,
    )
    reward = Reward(value=float(index % 2))
    return Rollout(prompt=request.prompt, completion=completion, response_text="", reward=reward)


def _runner(num_layers: int, backend: ComputeBackend) -> ModelRunner:
    return ModelRunner(
        _model(num_layers),
        num_slots=BATCH,
        capacity=CAPACITY,
        backend=backend,
        vocab_size=VOCAB_SIZE,
        attention=split_attention,
    )


def _engine(plan: str, calls: DeviceCalls, *, layers: int, kernels: bool, recorded: bool) -> Engine:
    backend = CudaBackend(META) if kernels else ComputeBackend(META)
    backend.noise = CountedNoiseSource(calls)

    return Engine(
        _runner(layers, backend),
        drafter=None if plan == "plain" else ModelDrafter(_runner(1, backend), max_prefill_tokens=8192),
        policy=build_policy(PLANS[plan]),
        max_total_tokens=CAPACITY - 32,
        max_prefill_tokens=8192,
        decode=StepRecordings(CountingRecorder(calls), max_bytes=1) if recorded else decode_step,
    )


def _model(num_layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=CAPACITY,
    )
    # not under `torch.device`: rotary frequencies are computed on the host
    model: Any = LlamaForCausalLM(config)
    return freeze(model.to(torch.bfloat16)).to(META)  # type: ignore[return-value,arg-type]


@contextmanager
def _nothing_to_compare() -> Iterator[None]:
    """Tensors without numbers have nothing that could differ from the model's own forward, or from a copy."""
    nothing = {"__init__": lambda self, *args, **kwargs: None, "require_equal": lambda self, runner: None}
    with (
        patch.multiple(
            runner_module,
            Comparison=type("NoComparison", (), nothing),
            refuse_unsupported=lambda model, capacity: None,
        ),
        patch.object(linears, "same_bits", lambda copy, of: True),
        patch.object(CudaLinear, "holds", lambda self, rows, bias: True),
    ):
        yield


NEW_TOKENS = 64


def run(bench: Bench) -> int:
    """Run the benchmark; always returns 0. `data` is not used."""
    bench.figures.values |= count()
    if torch.cuda.is_available():
        bench.figures.values |= measure()
    bench.console.print(f"written {bench.write()}")
    return 0


def count() -> dict[str, float]:
    """Return launches a layer, and what a step asks for inside recordings and outside of them."""
    figures = prefill() | update() | layer_of_an_update(lambda: DeviceCalls(device="cpu")) | publication()
    for name, kernels in (("", True), ("_library", False)):
        for what, plan in (("plain", "plain"), ("verify", "tree8")):
            figures[f"launches_a_layer_{what}{name}"] = layer_launches(plan, kernels=kernels)
    figures["launches_a_level_tree16"] = level_launches()
    for plan in PLANS:
        step = counted(plan)
        figures[f"launches_outside_{plan}"] = step["launches"]
        figures[f"launches_inside_{plan}"] = step["replayed"]
        figures[f"copies_up_{plan}"], figures[f"copies_down_{plan}"] = step["ups"], step["downs"]
        figures[f"blocking_copies_{plan}"] = step["waits"]
        figures[f"launches_unrecorded_{plan}"] = counted(plan, recorded=False)["launches"]
    return figures


def measure() -> dict[str, float]:
    """Return milliseconds of a decode step of the demo pair on the first GPU, by plan."""
    workload = demo_workload(BATCH)
    requests = [
        SampleRequest(
            key=SampleKey(run_seed=1, stream=Stream.BENCH, sample_index=index),
            prompt=Prompt(prompt_id=index, token_ids=prompt.token_ids),
            sampling=SamplingParams(max_new_tokens=NEW_TOKENS),
        )
        for index, prompt in enumerate(workload.prompts[:BATCH])
    ]
    figures = {}
    for plan, speculation in PLANS.items():
        engine = workload.engine(
            speculation,
            workload.draft("bfloat16"),
            dtype="bfloat16",
            device="cuda",
            max_running_samples=BATCH,
            probe=False,
        )
        engine.generate(requests)
        torch.cuda.synchronize()
        steps, began = engine.stats.num_decode_steps, time.perf_counter()
        engine.generate(requests)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        figures[f"step_ms_{plan}"] = 1e3 * seconds / (engine.stats.num_decode_steps - steps)
    return figures
