"""Where an engine computes, by what, and what it promises of its bits: chosen once, when it is built."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

import torch

from ..core.config import EngineConfig
from ..core.errors import ConfigError
from .attention.backends import ATTENTION, Attention, plan_attention_once
from .attention.by_length import MAX_HEAD_SIZE, split_attention
from .attention.xformers import require_xformers, xformers_attention
from .cache.kv_pool import KVShape
from .model.compute_backend import ComputeBackend, PoolAttention
from .triton_here import can_run_triton
from .weights.causal_lm import CausalLM

Numerics = Literal["invariant", "fast"]
logger = logging.getLogger(__name__)


def resolve_device(wish: str, key: str = "engine.device") -> torch.device:
    """The device that `key` wishes for, a GPU with its number. Raises ConfigError when CUDA is asked for and absent."""
    on_gpu = wish != "cpu" and torch.cuda.is_available()
    if wish == "cuda" and not on_gpu:
        raise ConfigError(f"{key} is cuda but torch sees no CUDA device; use cpu or auto")
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def resolve_numerics(engine: EngineConfig, device: torch.device) -> Numerics:
    """Return invariant or fast; `auto` is invariant on CPU with one thread, where the probe has been seen to hold.

    Raises ConfigError for invariant numerics with several threads: they cut elementwise work anywhere, and a value
    at a cut rounds as scalar code does.
    """
    several = device.type == "cpu" and engine.num_threads > 1
    if engine.numerics == "auto":
        return "invariant" if device.type == "cpu" and not several else "fast"
    if engine.numerics == "invariant" and several:
        raise ConfigError(
            f"engine.numerics invariant needs engine.num_threads 1, got {engine.num_threads}: several threads round "
            "by where they cut the work; use more generation actors, or engine.numerics fast"
        )
    return engine.numerics


def kernels_for(engine: EngineConfig, numerics: Numerics) -> bool:
    """Whether kernels of ours may compute on a GPU: invariant numerics are arranged for library calls alone."""
    return engine.kernels == "auto" and numerics != "invariant"


def use_threads(num_threads: int) -> None:
    """Set torch's thread count for this thread: one a generation actor is the honest default on CPU."""
    if torch.get_num_threads() != num_threads:
        logger.info("torch threads: %d, as engine.num_threads says", num_threads)
        torch.set_num_threads(num_threads)


@contextmanager
def on_threads(num_threads: int) -> Iterator[None]:
    """Let torch compute on so many threads in the block: the number is each thread's own, and several round unlike one.

    At the sizes of a CPU's models a second one often only waits.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_backend(
    device: torch.device, *, num_threads: int | None = None, kernels: bool = True
) -> ComputeBackend:
    """Return what computes on a device: with torch's number of threads here, unless another is given.

    `kernels`: on a GPU, of our own where Triton can make them (`kernels_for`).
    """
    if device.type == "cpu" and (num_threads or torch.get_num_threads()) == 1 and has_llvm():
        # needs the extra `cpu`
        from .cpu.backend import CpuBackend
        from .cpu.jit import can_make_code

        if can_make_code():
            return CpuBackend(device)
    if kernels and can_run_triton(device):
        from .cuda.cuda_backend import CudaBackend

        return CudaBackend(device)
    return ComputeBackend(device)


@lru_cache(maxsize=1)
def has_llvm() -> bool:
    """Whether llvmlite is installed, more than folders that an uninstall left; said once where it is not."""
    if (found := find_spec("llvmlite")) is not None and found.origin is not None:
        return True
    logger.warning(
        "llvmlite is not installed: torch computes, several times slower on one CPU thread; "
        "install the extra `cpu` (pip install 'rlhfspec[cpu]')"
    )
    return False


def attention_for(
    engine: EngineConfig,
    numerics: Numerics,
    backend: ComputeBackend,
    model: CausalLM | None = None,
) -> Attention | PoolAttention:
    """Return the attention of a model. Raises ConfigError when it cannot serve these numerics or this machine."""
    # attention inside the pool is the fastest where there is one, and ordered besides
    ordered = numerics == "invariant" or isinstance(backend.attention, PoolAttention)
    if engine.attention == "ordered" or (engine.attention == "auto" and ordered):
        return backend.attention
    if backend.device.type == "cuda":
        plan_attention_once()
    can_split = can_run_triton(backend.device)
    if engine.attention == "auto" and not (can_split and engine.kernels == "auto"):
        return ATTENTION["sdpa"]
    if numerics == "invariant" and engine.attention in ("sdpa", "xformers", "split"):
        raise ConfigError(
            f"engine.attention {engine.attention} is not invariant: its row sums depend on neighbours; "
            "use ordered (or auto), or engine.numerics fast"
        )
    if engine.attention == "xformers":
        require_xformers(backend.device)
        return xformers_attention
    if engine.attention in ("auto", "split"):
        if not can_split:
            raise ConfigError(
                f"engine.attention split needs engine.device cuda, Triton and a C compiler, got {backend.device.type}; "
                "use auto, ordered or sdpa"
            )
        from .cuda import row_operators  # noqa: F401 (defines the operator)

        return split_attention if model is None or _is_split(model) else ATTENTION["sdpa"]
    return ATTENTION[engine.attention]


def _is_split(model: CausalLM) -> bool:
    """Whether the kernel serves: exact products of float32 run on no tensor core."""
    return model.dtype != torch.float32 and KVShape.of(model.config).head_size <= MAX_HEAD_SIZE


def describe_numerics(engine: EngineConfig, device: torch.device, *, refused: str = "") -> str:
    """Return in one line what is promised of tokens, and why where `auto` promises less than every bit.

    `refused`: what the start-up probe found, where `auto` has fallen back to fast numerics.
    """
    numerics = resolve_numerics(engine, device)
    if numerics == "invariant" and not refused:
        return "invariant: tokens and log-probabilities are equal bit for bit, whatever is drafted, batched or moved"
    if refused:
        why = refused
    elif engine.numerics == "fast":
        why = "engine.numerics says so"
    elif device.type == "cpu":
        why = f"engine.num_threads is {engine.num_threads}, and several threads round by where they cut the work"
    else:
        why = "on CUDA library products round by the batch"
    return f"fast: tokens follow the model's distribution, their bits may depend on the batch ({why})"
