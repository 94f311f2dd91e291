"""Tries a family's small model: it decodes in a process of its own, and is judged by its own plain forwards."""

from __future__ import annotations

import copy
import ctypes
import mmap
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from ...core.config import EngineConfig, SpeculationConfig
from ...core.errors import NumericsError, RlhfSpecError
from ...core.records import Completion, Prompt, SampleKey, SampleRequest, SamplingParams, Stream
from ...engine.build import build_engine
from ...engine.cache import kv_pool
from ...engine.cache.kv_memory import PoolShape, WholeMemory, round_up
from ...engine.engine import Engine
from ...policies.drafting.baselines import FixedPolicy, OffPolicy
from ...policies.drafting.draft_policy import DraftPolicy
from ..support.reference import compare_with_reference, same_bits
from .configs import VOCAB_SIZE, Family, build_model, perturbed

CANARY = 0xA5
MARGIN_BYTES = 512
MOST_BUFFERS = 512
"Watched before they are looked at."
_GUARD_BYTES = 1 << 28
"On each side; addresses only. A layer of another shape than the pool's reaches far."
_PROT_NONE = 0
_UNRESERVED = getattr(mmap, "MAP_NORESERVE", 0x4000)
_libc = ctypes.CDLL(None, use_errno=True)


class CorruptionError(Exception):
    """Memory was written that nobody owns."""


class GuardedMemory(WholeMemory):
    """A pool's cells that end where a page begins that nobody may touch; another such page lies before them."""

    def __init__(self, shape: PoolShape, device: torch.device) -> None:
        lead = (shape.num_layers, 2, shape.num_slots, shape.num_kv_heads, round_up(shape.capacity))
        sizes = torch.Size((*lead, shape.head_size))
        num_bytes = sizes.numel() * shape.dtype.itemsize
        guard, inner = _GUARD_BYTES, round_up(num_bytes, mmap.PAGESIZE)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNRESERVED
        self._map = mmap.mmap(-1, inner + 2 * guard, flags=flags)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for place in (start, start + guard + inner):
            if _libc.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(guard), _PROT_NONE) != 0:
                raise OSError(ctypes.get_errno(), "mprotect refused a guard page")
        owned = torch.frombuffer(self._map, dtype=torch.uint8, offset=guard, count=inner)
        self._slack, cells = owned[: inner - num_bytes], owned[inner - num_bytes :]
        self._slack.fill_(CANARY)
        self.cells = cells.view(shape.dtype).view(sizes)

    def is_intact(self) -> bool:
        """Whether nothing was written between the guard page and the first cell."""
        return bool((self._slack == CANARY).all())


class Guards:
    """While entered, watches the pools and buffers that the engine makes in this process."""

    def __init__(self) -> None:
        self._pools: list[GuardedMemory] = []
        self._buffers: list[Tensor] = []
        self._usual: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        self._replace(kv_pool, "WholeMemory", self._pool)
        for name in ("new_empty", "new_zeros"):
            self._replace(torch.Tensor, name, self._watched(getattr(torch.Tensor, name), name == "new_zeros"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for place, name, usual in self._usual:
            setattr(place, name, usual)

    def require_intact(self) -> None:
        """Raise CorruptionError when anything was written beside a pool or a buffer; forget the buffers."""
        buffers, self._buffers = self._buffers, []
        for flat in buffers:
            if not ((flat[:MARGIN_BYTES] == CANARY).all() and (flat[-MARGIN_BYTES:] == CANARY).all()):
                raise CorruptionError("something was written beside a buffer of the engine")
        if not all(pool.is_intact() for pool in self._pools):
            raise CorruptionError("something was written before the first cell of a KV pool")

    def _replace(self, place: Any, name: str, made: Any) -> None:
        self._usual.append((place, name, getattr(place, name)))
        setattr(place, name, made)

    def _pool(self, shape: PoolShape, device: torch.device) -> GuardedMemory:
        self._pools.append(GuardedMemory(shape, device))
        return self._pools[-1]

    def _watched(self, usual: Callable[..., Tensor], zeros: bool) -> Callable[..., Tensor]:
        """Return another way to make a tensor: where the engine calls it, with canaries on both sides."""

        def make(like: Tensor, *size: Any, **options: Any) -> Tensor:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            made = usual(like, *size, **options)
            if not caller.startswith("rlhfspec.engine.") or made.numel() == 0:
                return made
            flat = torch.full((made.nbytes + 2 * MARGIN_BYTES,), CANARY, dtype=torch.uint8)
            self._buffers.append(flat)
            if len(self._buffers) > MOST_BUFFERS:
                self.require_intact()
                self._buffers.append(flat)
            inner = flat[MARGIN_BYTES:-MARGIN_BYTES].view(made.dtype).view(made.shape)
            return inner.zero_() if zeros else inner

        return make


TOLERANCE = 1e-3
"Largest difference of a log-probability from the oracle's."
LEAST_INFLUENCE = 1e-3
"Total variation at a prompt's end that its first token makes."
Outcome = Literal["exact", "fast only", "refused", "not built", "wrong", "raw exception", "corruption"]
PLANS: dict[str, DraftPolicy] = {
    "tree": FixedPolicy(num_nodes=8, depth=4, branching=2),
    "chain": FixedPolicy(num_nodes=4, depth=4, branching=1),
    "plain": OffPolicy(),
}
DRAFTED = SpeculationConfig(policy="fixed", num_nodes=8, depth=4, branching=2)
SUFFIX = SpeculationConfig(policy="fixed", drafter="suffix", num_nodes=4)
PROMPT_TOKENS = (3, 70, 9, 40)
NEW_TOKENS = (14, 9, 12, 10)
SAMPLINGS = ({}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}, {"temperature": 1.3})
LONGEST = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What became of one family."""

    name: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    logprob_error: float = 0.0
    tokens: int = 0
    near_ties: int = 0
    accepted: int = 0
    trace: str = ""


class _Wrong(Exception):
    """Something was decoded that the model does not say."""


class _Trial:
    def __init__(self, family: Family, guards: Guards) -> None:
        self.family, self.guards = family, guards
        self.model = build_model(family)
        self.oracle = copy.deepcopy(self.model)
        self.oracle.set_attn_implementation("eager")
        self._require_context()
        self.requests = _requests()
        self.tokens = self.near_ties = self.accepted = 0
        self.logprob_error = 0.0

    def run(self) -> tuple[Outcome, str]:
        """Return the outcome and, unless it is exact, why.

        Raises:
            _Wrong: something sampled is not what the model says, or refused in one way and served in another.
        """
        refusal = self._refusal("auto")
        fast = self._refusal("fast")
        if fast is not None:
            if refusal is None:
                raise _Wrong(f"served under auto and refused under fast: {fast}")
            return "refused", f"{type(fast).__name__}: {fast}"
        if refusal is None:
            return "exact", ""
        if isinstance(refusal, NumericsError):
            return "fast only", str(refusal)
        raise _Wrong(f"refused under auto and served under fast: {refusal}")

    def _refusal(self, numerics: Literal["auto", "fast"]) -> RlhfSpecError | None:
        """Decode; return the error of ours that ends it, if any."""
        try:
            self._decode_all(numerics)
        except RlhfSpecError as error:
            return error
        return None

    def _require_context(self) -> None:
        """Raise ValueError where the model does not look back: its decoding would prove nothing."""
        ids = torch.randint(3, VOCAB_SIZE, (2, 10), generator=torch.Generator().manual_seed(7))
        ids[1, 1:] = ids[0, 1:]
        with torch.inference_mode():
            first, second = self.oracle(input_ids=ids, use_cache=False).logits[:, -1].softmax(-1)
        if float((first - second).abs().sum()) < 2 * LEAST_INFLUENCE:
            raise ValueError("the small model does not look at its context")

    def _decode_all(self, numerics: Literal["auto", "fast"]) -> None:
        """Three plans in a batch of three, then look-ups one sample at a time; invariant ones must agree bitwise."""
        found = {}
        engine = self._engine(numerics, 3, DRAFTED)
        for name, policy in PLANS.items():
            engine.policy = policy
            found[name] = self._decode(engine, self.requests if name == "plain" else self.requests[::-1])
        if numerics == "auto":
            found["suffix"] = self._decode(self._engine(numerics, 1, SUFFIX), self.requests)
        plain = found["plain"]
        for name, done in found.items():
            self._judge(f"{numerics}, {name}", done)
            if numerics == "auto" and not all(same_bits(plain[key], done[key]) for key in plain):
                raise _Wrong(f"{name} differs from plain decoding")

    def _engine(
        self, numerics: Literal["auto", "fast"], batch: int, speculation: SpeculationConfig
    ) -> Engine:
        return build_engine(
            copy.deepcopy(self.model),
            perturbed(self.model) if speculation.drafter == "model" else None,
            engine=EngineConfig(
                device="cpu",
                numerics=numerics,
                max_running_samples=batch,
                max_prefill_tokens=48,
                forward=self.family.forward,
            ),
            speculation=speculation,
            max_total_tokens=LONGEST,
            vocab_size=VOCAB_SIZE,
        )

    def _decode(self, engine: Engine, requests: Sequence[SampleRequest]) -> dict[SampleKey, Completion]:
        before = engine.stats.num_accepted_tokens
        done = {completion.key: completion for completion in engine.generate(requests)}
        self.accepted += engine.stats.num_accepted_tokens - before
        self.guards.require_intact()
        return done

    def _judge(self, what: str, done: Mapping[SampleKey, Completion]) -> None:
        for request in self.requests:
            completion = done[request.key]
            result = compare_with_reference(self.oracle, request, completion, VOCAB_SIZE)
            self.tokens += completion.num_tokens
            self.near_ties += result.num_near_ties
            self.logprob_error = max(self.logprob_error, result.logprob_max_abs_error)
            if result.num_mismatches or not result.logprob_max_abs_error <= TOLERANCE:
                raise _Wrong(
                    f"{what}: {result.num_mismatches} of {completion.num_tokens} tokens off the rule, "
                    f"log-probabilities off by {result.logprob_max_abs_error:.1e}"
                )


def try_family(family: Family) -> Finding:
    """Try one family in this process, which may not survive it."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    trial: _Trial | None = None
    outcome: Outcome = "not built"
    trace = ""
    with Guards() as guards:
        try:
            trial = _Trial(family, guards)
            outcome, reason = trial.run()
        except _Wrong as error:
            outcome, reason = "wrong", str(error)
        except CorruptionError as error:
            outcome, reason = "corruption", str(error)
        except Exception as error:  # whatever the code of some family raises is a finding
            outcome = "not built" if trial is None else "raw exception"
            reason, trace = f"{type(error).__name__}: {error}", traceback.format_exc(limit=-6)
    return Finding(
        name=family.name,
        outcome=outcome,
        reason=" ".join(reason.split()),
        seconds=time.perf_counter() - started,
        logprob_error=trial.logprob_error if trial else 0.0,
        tokens=trial.tokens if trial else 0,
        near_ties=trial.near_ties if trial else 0,
        accepted=trial.accepted if trial else 0,
        trace=trace,
    )


def _requests() -> list[SampleRequest]:
    random = np.random.default_rng(3)
    return [
        SampleRequest(
            key=SampleKey(run_seed=11, stream=Stream.BENCH, sample_index=index),
            prompt=Prompt(prompt_id=index, token_ids=random.integers(3, VOCAB_SIZE, length)),
            sampling=SamplingParams(max_new_tokens=new, **sampling),  # type: ignore[arg-type]
        )
        for index, (length, new, sampling) in enumerate(
            zip(PROMPT_TOKENS, NEW_TOKENS, SAMPLINGS, strict=True)
        )
    ]


LIMIT_S = 600.0
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    # what is allocated and what is freed holds junk, not zeros
    "MALLOC_PERTURB_": "165",
}


def try_families(
    families: Iterable[Family],
    *,
    told: Callable[[Finding], None] | None = None,
    attempt: Callable[[Family], Finding] = try_family,
) -> list[Finding]:
    """Return what became of each, in their order; as many at once as there are cores.

    Args:
        families: to try.
        told: hears each finding as it is made.
        attempt: what tries one family, in its process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rlhfspec.benchmarks.models.trial"])
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})

    def one(family: Family) -> Finding:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(attempt, family, theirs))
        process.start()
        theirs.close()
        finding = None
        try:
            if ours.poll(LIMIT_S):
                finding = ours.recv()
            else:
                finding = Finding(
                    name=family.name, outcome="raw exception", reason=f"no answer within {LIMIT_S:.0f} s"
                )
        except EOFError:
            process.join()
            finding = Finding(name=family.name, outcome="corruption", reason=_end(process.exitcode))
        process.kill()
        process.join()
        if told is not None:
            told(finding)
        return finding

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(one, families))


def _work(attempt: Callable[[Family], Finding], family: Family, answer: Connection) -> None:
    answer.send(attempt(family))


def _end(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"the process ended by {signal.Signals(-exitcode).name}"
    return f"the process ended with exit code {exitcode} and no answer"
