"""Compiles LLVM IR for the processor that this process runs on."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import llvmlite.binding as llvm

from ..model.linears import has_avx512

SHARED = "rlhfspec_"
"Before the names that the process knows functions by."
logger = logging.getLogger(__name__)


def compile_modules(*texts: str) -> Any:
    """Return the engine that owns the compiled functions of modules that may call each other.

    Raises:
        RuntimeError: the text is wrong, or the process may not make code.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=",".join(f"{'-+'[on]}{name}" for name, on in features().items()),
        opt=3,
    )
    module = llvm.parse_assembly(texts[0])
    for text in texts[1:]:
        module.link_in(llvm.parse_assembly(text))
    module.verify()
    engine = llvm.create_mcjit_compiler(module, target)
    engine.finalize_object()
    return engine


def share_functions(engine: Any, names: Iterable[str]) -> None:
    """Let modules compiled from now on call an engine's functions by SHARED + name."""
    for name in names:
        llvm.add_symbol(SHARED + name, engine.get_function_address(name))


@lru_cache(maxsize=1)
def features() -> dict[str, bool]:
    """LLVM's names of what this processor has, within what ATEN_CPU_CAPABILITY allows torch too."""
    wide = ("avx512", "avx10", "amx")
    found: dict[str, bool] = dict(llvm.get_host_cpu_features())
    return {name: on and (has_avx512() or not name.startswith(wide)) for name, on in found.items()}


def widest_vector() -> int:
    """Floats in the widest vector of this processor."""
    return 16 if features().get("avx512f") else 8


@lru_cache(maxsize=1)
def can_make_code() -> bool:
    """Whether this process may compile and run code; said once where it may not."""
    try:
        compile_modules("define void @nothing() { ret void }")
    except (OSError, RuntimeError) as error:
        logger.warning("no code of our own can be compiled here (%s): library products serve", error)
        return False
    return True
