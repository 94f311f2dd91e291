"""`rlhfspec gpu-selftest`: parts that try the engine on the first GPU, and the report."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from transformers.modeling_utils import PreTrainedModel

from ...cluster.observe.console import PipeConsole
from ...core.config import EngineConfig, SpeculationConfig
from ...core.errors import ConfigError, RlhfSpecError
from ...core.records import Completion, Prompt, SampleKey, SampleRequest, SamplingParams, Stream
from ...engine.build import build_engine
from ...engine.engine import Engine
from ...engine.recorded_step import StepRecordings
from ..support.result import ROOT, machine_provenance
from ..support.timing import engine_rate, hugging_face_rate, interleaved, ratios
from ..support.workload import demo_workload, real_workload

PLAIN = SpeculationConfig(policy="off")
CHAIN = SpeculationConfig(policy="fixed", num_nodes=4)
TREE = SpeculationConfig(policy="fixed", num_nodes=8, depth=4, branching=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A pair by its loaders, which return fresh models on the CPU in the type asked for."""

    target: Callable[[str], PreTrainedModel]
    draft: Callable[[str], PreTrainedModel]
    prompts: Sequence[np.ndarray]
    vocab_size: int
    device: torch.device

    def engine(
        self, speculation: SpeculationConfig, dtype: str, *, batch_size: int, new_tokens: int
    ) -> Engine:
        """Build an engine on the device, with the numerics that are the default there."""
        return build_engine(
            self.target(dtype),
            None if speculation.policy == "off" else self.draft(dtype),
            engine=EngineConfig.model_validate(
                {"device": self.device.type, "max_running_samples": batch_size, "probe": False}
            ),
            speculation=speculation,
            max_total_tokens=max(len(prompt) for prompt in self.prompts) + new_tokens,
            vocab_size=self.vocab_size,
        )

    def requests(self, count: int, new_tokens: int, *, one_prompt: bool = False) -> list[SampleRequest]:
        """Sample at T = 1, without stop tokens; prompts in turn, or the first alone."""
        return [
            SampleRequest(
                key=SampleKey(run_seed=5, stream=Stream.BENCH, sample_index=index),
                prompt=Prompt(prompt_id=number, token_ids=np.asarray(self.prompts[number])),
                sampling=SamplingParams(max_new_tokens=new_tokens),
            )
            for index in range(count)
            for number in [0 if one_prompt else index % len(self.prompts)]
        ]


PLANS = {"chain": CHAIN, "tree": TREE}
LOGPROB_TOLERANCE = 2e-3
"Between our float32 forward and Hugging Face's, nats; products may run in TF32 where a user switched it on."
SMALLEST_P = 1e-4
LEAST_EXPECTED = 8.0
"Of a bin of the chi-square test; rarer pairs share one bin."


class PartFailed(RlhfSpecError):
    """A promise was not kept: which, expected, got."""


def logprobs(subject: Subject, *, num_samples: int = 16, new_tokens: int = 48) -> dict[str, float]:
    """Compare the log-probabilities of what every plan emits with a plain Hugging Face forward, in float32.

    Also returned: the share of tokens that plain decoding gives too, 1.0 where numerics are invariant.
    """
    requests = subject.requests(num_samples, new_tokens)
    model = subject.target("float32").to(subject.device)  # pyright: ignore[reportArgumentType]
    figures: dict[str, float] = {}
    plain: list[Completion] = []
    for name, plan in {"plain": PLAIN, **PLANS}.items():
        engine = subject.engine(plan, "float32", batch_size=num_samples, new_tokens=new_tokens)
        done = engine.generate(requests)
        error = max(_logprob_error(model, one, subject) for one in done)
        figures[f"logprob_error_{name}"] = error
        if not error <= LOGPROB_TOLERANCE:
            raise PartFailed(
                f"log-probabilities of the plan {name}: expected Hugging Face's within {LOGPROB_TOLERANCE}, "
                f"got a difference of {error:.3g}"
            )
        if not plain:
            plain = done
            continue
        same = [_common(one.token_ids, other.token_ids) for one, other in zip(plain, done, strict=True)]
        figures[f"equal_token_share_{name}"] = float(np.mean(same))
        if engine.stats.num_accepted_tokens == 0:
            raise PartFailed(f"the plan {name} accepted no draft token: nothing was speculated")
        figures |= _recorded(engine, name)
    return figures


def distribution(subject: Subject, *, num_samples: int = 4096) -> dict[str, float]:
    """Test the first two tokens of many samples of one prompt, drafted as a tree, against the model's own softmax."""
    prompt = torch.from_numpy(np.asarray(subject.prompts[0])).to(subject.device)
    model = subject.target("float32").to(subject.device)  # pyright: ignore[reportArgumentType]
    batch = min(num_samples, 256)
    engine = subject.engine(TREE, "float32", batch_size=batch, new_tokens=4)
    done = engine.generate(subject.requests(num_samples, 4, one_prompt=True))
    pairs = np.array([one.token_ids[:2] for one in done])
    size = subject.vocab_size
    first = _probabilities(model, prompt[None], size)[0]
    wanted = np.nonzero(first * num_samples >= LEAST_EXPECTED)[0]
    heads = torch.from_numpy(wanted).to(prompt.device)[:, None]
    behind = _probabilities(model, torch.cat([prompt.expand(len(wanted), -1), heads], 1), size)
    expected = first[wanted, None] * behind * num_samples
    seen = np.zeros_like(expected)
    for row, token in enumerate(wanted):
        seen[row] = np.bincount(pairs[pairs[:, 0] == token, 1], minlength=size)[:size]
    common = expected >= LEAST_EXPECTED
    if common.sum() < 2:
        raise PartFailed(
            "this model's first tokens are too certain to test a distribution; give another prompt"
        )
    counts, expected_counts = pooled(seen[common], expected[common], num_samples)
    p = float(stats.chisquare(counts, expected_counts).pvalue)
    if not p > SMALLEST_P:
        raise PartFailed(
            f"the first two tokens of {num_samples} samples: expected the model's distribution, got a chi-square "
            f"test over {len(counts)} bins with p = {p:.2g}"
        )
    return {"distribution_p": p, "distribution_bins": float(len(counts))}


def pooled(seen: np.ndarray, expected: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Add what the bins leave out of `total` as a bin, or to the rarest where less than one is expected of it."""
    rest, expected_rest = total - seen.sum(), total - expected.sum()
    if expected_rest >= 1.0:
        return np.append(seen, rest), np.append(expected, expected_rest)
    rarest = np.arange(len(expected)) == expected.argmin()
    return seen + rarest * rest, expected + rarest * expected_rest


def speed(
    subject: Subject, dtype: str, *, batch_size: int = 8, new_tokens: int = 128, rounds: int = 3
) -> dict:
    """Time whole generations beside Hugging Face `generate` in turn; ratios exceed 1 where ours is faster."""
    requests = subject.requests(batch_size, new_tokens)
    model = subject.target(dtype).to(subject.device)  # pyright: ignore[reportArgumentType]
    contestants = {"hf": hugging_face_rate(model, requests, batch_size=batch_size, pad_token_id=0)}
    for name, plan in {"plain": PLAIN, **PLANS}.items():
        engine = subject.engine(plan, dtype, batch_size=batch_size, new_tokens=new_tokens)
        contestants[name] = engine_rate(engine, requests)
    taken = interleaved(contestants, rounds)
    figures = {f"{name}_over_hf_b{batch_size}": np.median(ratios(taken, name, "hf")) for name in taken}
    del figures[f"hf_over_hf_b{batch_size}"]
    rates = {f"{name}_tokens_per_s_b{batch_size}": np.median(values) for name, values in taken.items()}
    return {name: float(value) for name, value in (figures | rates).items()}


def bandwidth(
    subject: Subject, dtype: str, *, new_tokens: int = 128, copy_bytes: int = 1 << 30
) -> dict[str, float]:
    """Compare a plain decode step of one sample with what reading the weights must take at the device's bandwidth.

    The bound is the linear weights' bytes over the rate at which a large copy reads and writes.
    """
    engine = subject.engine(PLAIN, dtype, batch_size=1, new_tokens=new_tokens)
    requests = subject.requests(1, new_tokens)
    engine.generate(requests)
    steps = engine.stats.num_decode_steps
    started = time.perf_counter()
    engine.generate(requests)
    _finished(subject.device)
    step_s = (time.perf_counter() - started) / (engine.stats.num_decode_steps - steps)
    model, embedding = engine.runner.model, engine.runner.embedding
    tied = model.config.get_text_config().tie_word_embeddings
    read = model.num_parameters() * model.dtype.itemsize - (0 if tied else embedding.nbytes)
    source = torch.zeros(copy_bytes, dtype=torch.uint8, device=subject.device)
    rate = 2 * copy_bytes / _copy_s(source)
    return {
        "copy_gb_per_s": rate / 1e9,
        "step_ms_b1": step_s * 1e3,
        "bandwidth_share_b1": read / rate / step_s,
    }


def _copy_s(source: torch.Tensor, repeats: int = 5) -> float:
    target = torch.empty_like(source)
    seconds = []
    for _ in range(repeats + 1):
        _finished(source.device)
        started = time.perf_counter()
        target.copy_(source)
        _finished(source.device)
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds[1:]))


def _finished(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def _logprob_error(model: PreTrainedModel, done: Completion, subject: Subject) -> float:
    prompt = subject.prompts[done.key.sample_index % len(subject.prompts)]
    ids = torch.from_numpy(np.concatenate([prompt, done.token_ids])).to(subject.device)
    logits = model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1, : subject.vocab_size]
    logprobs = torch.log_softmax(logits.float(), -1).gather(1, ids[len(prompt) :, None])[:, 0]
    return float(np.abs(logprobs.cpu().numpy() - done.policy_logprobs).max())


@torch.inference_mode()
def _probabilities(model: PreTrainedModel, ids: torch.Tensor, vocab_size: int) -> np.ndarray:
    """Of the next token behind each row, float64 [rows, V]."""
    logits = model(ids, use_cache=False).logits[:, -1, :vocab_size]
    return torch.softmax(logits.double(), -1).cpu().numpy()


def _recorded(engine: Engine, name: str) -> dict[str, float]:
    graphs, steps = engine.runner.graphs, getattr(engine, "_decode", None)
    if graphs is None:
        return {}
    shapes = [*graphs.shapes, *(steps.shapes if isinstance(steps, StepRecordings) else [])]
    return {f"recorded_shapes_{name}": float(len(shapes))}


def _common(one: np.ndarray, other: np.ndarray) -> float:
    """Share of positions with the same token."""
    length = min(len(one), len(other))
    return float((one[:length] == other[:length]).sum() / max(len(one), len(other)))


TESTS_TIMEOUT_S = 1800


@dataclass(slots=True, kw_only=True)
class PartResult:
    """What one part found."""

    name: str
    state: str
    "passed, failed or skipped"
    figures: dict[str, float] = field(default_factory=dict)
    message: str = ""


def run_parts(subject: Subject, *, dtype: str, quick: bool, say: Callable[[str], None]) -> list[PartResult]:
    """Run every part; one that raises is reported as failed."""
    small: dict[str, Any] = {"new_tokens": 32} if quick else {}
    parts: dict[str, Callable[[], dict[str, float]]] = {
        "log-probabilities beside Hugging Face": lambda: logprobs(subject),
        "distribution of sampled tokens": lambda: distribution(subject, num_samples=1024 if quick else 4096),
        "speed beside Hugging Face": lambda: speed(subject, dtype, rounds=1 if quick else 3, **small),
        "share of the bandwidth bound": lambda: bandwidth(
            subject, dtype, copy_bytes=1 << (26 if quick else 30), **small
        ),
    }
    results = []
    for name, part in parts.items():
        say(name)
        try:
            results.append(PartResult(name=name, state="passed", figures=part()))
        except RlhfSpecError as error:
            results.append(PartResult(name=name, state="failed", message=str(error)))
        except Exception:
            results.append(PartResult(name=name, state="failed", message=traceback.format_exc().strip()))
    return results


def device_tests(*, timeout_s: float = TESTS_TIMEOUT_S, root: Path = ROOT) -> PartResult:
    """Run the tests that need a device, in a process of their own."""
    name = "tests marked gpu"
    if not (root / "tests").is_dir() or find_spec("pytest") is None:
        why = "not run: they come with a checkout of the project and its extra dev (pip install -e '.[dev]')"
        return PartResult(name=name, state="skipped", message=why)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "-rfE",
        "--tb=short",
        # what other tests import may not be there
        *_files_with_device_tests(root),
    ]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return PartResult(name=name, state="failed", message=f"no end within {timeout_s:g} s")
    output = done.stdout.strip()
    return PartResult(
        name=name,
        state="passed" if done.returncode == 0 else "failed",
        message=output[-6000:] + ("\n" + done.stderr.strip()[-2000:] if done.returncode else ""),
    )


def _files_with_device_tests(root: Path) -> list[str]:
    """Test files of the project that have a test for a device."""
    return [
        str(path.relative_to(root))
        for path in sorted((root / "tests").rglob("test_*.py"))
        if "mark.gpu" in (text := path.read_text()) or "DEVICES" in text
    ]


def write_report(results: list[PartResult], out: Path, *, device: torch.device, what: dict[str, Any]) -> Path:
    """Write OUT/gpu_selftest.json and OUT/report.md; return the second."""
    provenance = machine_provenance() | device_facts(device) | what
    tree = {
        "parts": {one.name: {"state": one.state, "message": one.message} for one in results},
        "figures": {name: value for one in results for name, value in one.figures.items()},
        "provenance": provenance,
    }
    (out / "gpu_selftest.json").write_text(json.dumps(tree, indent=2) + "\n")
    lines = ["# rlhfspec gpu-selftest", "", "| part | state |", "|---|---|"]
    lines += [f"| {one.name} | {one.state} |" for one in results]
    lines += ["", "| figure | value |", "|---|---|"]
    lines += [f"| `{name}` | {value:.4g} |" for one in results for name, value in one.figures.items()]
    lines += ["", "| machine | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in provenance.items()]
    for one in results:
        if one.message:
            lines += ["", f"## {one.name}: {one.state}", "", "```", one.message, "```"]
    report = out / "report.md"
    report.write_text("\n".join(lines) + "\n")
    return report


def device_facts(device: torch.device) -> dict[str, Any]:
    """What a bug's reader asks first."""
    facts: dict[str, Any] = {"device": str(device), "torch_cuda": torch.version.cuda}
    if device.type != "cuda":
        return facts
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return facts | {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gb": round(total / 1e9, 1),
        "free_gb": round(free / 1e9, 1),
        "bfloat16": torch.cuda.is_bf16_supported(),
        "triton": find_spec("triton") is not None,
        "xformers": find_spec("xformers") is not None,
    }


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
