"""The self-test on the first GPU that this process sees."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from benchmarks.selftest.run import device_tests, run_parts, write_report
from benchmarks.selftest.subject import Subject
from benchmarks.support.workload import demo_workload, real_workload
from rlhfspec.cluster.observe.console import PipeConsole
from rlhfspec.core.errors import ConfigError

NUM_PROMPTS = 16


def selftest(*, out: Path, quick: bool, real: bool) -> int:
    """Write the report; return 0 when nothing failed. Raises ConfigError where torch sees no CUDA device."""
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise ConfigError(
            f"gpu-selftest needs a CUDA device, and torch {torch.__version__} ({built}) sees none; "
            "install a CUDA build of torch and check `nvidia-smi`"
        )
    out.mkdir(parents=True, exist_ok=True)
    console, device = PipeConsole(), torch.device("cuda", torch.cuda.current_device())
    workload = (
        real_workload(NUM_PROMPTS, data=None, max_new_tokens=128, console=console)
        if real
        else demo_workload(NUM_PROMPTS)
    )
    if workload is None:
        return 1
    subject = Subject(
        target=workload.target,
        draft=workload.draft,
        prompts=[prompt.token_ids for prompt in workload.prompts],
        vocab_size=workload.vocab_size,
        device=device,
    )
    dtype = "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    results = run_parts(subject, dtype=dtype, quick=quick, say=partial(console.print, markup=False))
    console.print("tests marked gpu")
    results.append(device_tests())
    report = write_report(results, out, device=device, what={"model": workload.name, "dtype": dtype})
    for one in results:
        console.print(f"{one.state}: {one.name}", markup=False)
    console.print(f"report: {report}", markup=False)
    return int(any(one.state == "failed" for one in results))
