"""The self-test's parts. Each returns its figures, and raises PartFailed where a promise is not kept."""

from __future__ import annotations

import time

import numpy as np
import torch
from scipy import stats
from transformers.modeling_utils import PreTrainedModel

from benchmarks.selftest.subject import CHAIN, PLAIN, TREE, Subject
from benchmarks.support.timing import engine_rate, hugging_face_rate, interleaved, ratios
from rlhfspec.core.errors import RlhfSpecError
from rlhfspec.core.records import Completion
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.recorded_step import StepRecordings

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
