"""Side-by-side timing: rates taken in turn, compared round by round.

Every round runs all contestants forwards and backwards (A B C C B A), so that a drift of the machine falls on all
alike; a round's rate is the mean of its two runs, and a figure the median of the rounds' ratios. What is timed are
whole generations by our engine and by Hugging Face `generate`, in tokens per second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers.modeling_utils import PreTrainedModel

from ...core.records import SampleRequest
from ...engine.engine import Engine

Rate = Callable[[], float]
"Do the work once; tokens (or forwards) per second."


def interleaved(rates: Mapping[str, Rate], rounds: int) -> dict[str, list[float]]:
    """Run every contestant 2 * rounds times, after one run each that is thrown away; rates of each round."""
    for rate in rates.values():
        rate()
    order = list(rates)
    taken: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(rounds):
        round_rates: dict[str, list[float]] = {name: [] for name in order}
        for name in [*order, *reversed(order)]:
            round_rates[name].append(rates[name]())
        for name, values in round_rates.items():
            taken[name].append(statistics.fmean(values))
    return taken


def ratios(taken: Mapping[str, Sequence[float]], a: str, b: str) -> list[float]:
    """Return a / b of every round."""
    return [x / y for x, y in zip(taken[a], taken[b], strict=True)]


def rate_rows(taken: Mapping[str, Sequence[float]], **labels: Any) -> list[dict[str, Any]]:
    """One row a contestant and round, for a table beside the figures."""
    return [
        {"contestant": name, "tokens_per_s": value, **labels}
        for name, values in taken.items()
        for value in values
    ]


class Figures:
    """Figures of a benchmark with their intervals."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.intervals: dict[str, tuple[float, float]] = {}

    def keep(self, name: str, samples: Sequence[float]) -> float:
        """Store the median of the samples, and a bootstrap 95% interval of it; returns the median."""
        values = np.asarray(samples)
        draws = np.random.default_rng(0).choice(values, size=(2000, len(values)))
        medians = np.median(draws, axis=1)
        self.values[name] = statistics.median(samples)
        self.intervals[name] = (float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975)))
        return self.values[name]


def engine_rate(
    engine: Engine, requests: Sequence[SampleRequest], clock: Callable[[], float] = time.perf_counter
) -> Rate:
    """Generate all requests; tokens emitted per second of the clock."""

    def rate() -> float:
        before = engine.stats.num_emitted_tokens
        started = clock()
        engine.generate(requests)
        return (engine.stats.num_emitted_tokens - before) / (clock() - started)

    return rate


def hugging_face_rate(
    model: PreTrainedModel, requests: Sequence[SampleRequest], *, batch_size: int, pad_token_id: int
) -> Rate:
    """Generate all requests with `generate`, `batch_size` at a time, left-padded; tokens of its own per second.

    All requests share their sampling; T = 0 decodes greedily. A batch runs until its last sample ends.
    """
    sampling = requests[0].sampling
    stop = list(sampling.stop_token_ids)
    prompts = [request.prompt.token_ids for request in requests]
    batches = [prompts[first : first + batch_size] for first in range(0, len(prompts), batch_size)]
    settings: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "pad_token_id": pad_token_id,
        "eos_token_id": stop or None,
    }
    if sampling.temperature > 0:
        settings |= {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
    else:
        settings |= {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    if not stop:
        settings["min_new_tokens"] = sampling.max_new_tokens
    generate: Any = model.generate

    @torch.inference_mode()
    def rate() -> float:
        torch.manual_seed(0)
        tokens = 0
        started = time.perf_counter()
        for batch in batches:
            ids, mask = (x.to(model.device) for x in _left_padded(batch, pad_token_id))
            output = generate(ids, attention_mask=mask, **settings)
            tokens += _num_tokens(output[:, ids.shape[1] :].cpu().numpy(), stop)
        return tokens / (time.perf_counter() - started)

    return rate


def _left_padded(prompts: Sequence[np.ndarray], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.from_numpy(np.asarray(prompt))
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def _num_tokens(responses: np.ndarray, stop: Sequence[int]) -> int:
    """Tokens up to and with the first stop token of each row."""
    is_stop = np.isin(responses, stop)
    first = np.where(is_stop.any(1), is_stop.argmax(1) + 1, responses.shape[1])
    return int(first.sum())
