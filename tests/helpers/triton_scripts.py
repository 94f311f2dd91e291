"""Kernels in a process of their own: in Triton's interpreter, or compiled for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

MOST_REGISTERS = 64
"A thread's; with more, fewer than 1024 threads run on one multiprocessor."
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: extra dev")
COMPILE = """
import json, re, subprocess, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
found = {}

def built(name, kernel, types, constants, num_warps=4, aligned=()):
    names = kernel.arg_names
    types = [*types, *["constexpr"] * len(constants)]
    source = ASTSource(
        fn=kernel,
        signature=dict(zip(names, types, strict=True)),
        constexprs={(names.index(key),): value for key, value in constants.items()},
        # what calls find to be multiples of 16
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}).asm
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made["cubin"])
        file.flush()
        used = subprocess.run(
            [str(tools / "cuobjdump"), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    (registers,) = re.findall(r"REG:(\\d+)", used)
    found[name] = {
        "registers": int(registers),
        "spilled": [int(x) for x in re.findall(r"(?:STACK|LOCAL):(\\d+)", used)],
        "shifts": sorted({word for word in made["ptx"].split() if word.startswith("shr.")}),
        "wide": sorted({word for word in made["ptx"].split() if re.match(r"(ld|st)\\.global\\.v", word)}),
    }
"""
"Begin of a script that builds kernels: `built` notes what they take in `found`."


def interpreted(script: str, *words: str) -> str:
    """Return what a script prints in Triton's interpreter, which is chosen when Triton is imported: in no fork.

    Raises AssertionError with its errors where it fails.
    """
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        env=os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
