"""The start-up probe of a group: its ranks must give the bits of one, of logits and of what is sampled from them.

The leader has its share of the weights alone, so it cannot compare the model with what one rank computes: it compares a
layer of the same heads and widths, of drawn weights and a small vocabulary.
"""

from __future__ import annotations

import json

import numpy as np
import torch
from torch import Tensor

from ...core.errors import NumericsError
from ...core.records import SamplingParams
from ..decoding.answers import Answers, WholeAnswers
from ..decoding.draft_tree import DraftTree, chain
from ..decoding.noise import row_words
from ..decoding.sampling_rule import RowSampling
from ..decoding.verify import verify
from ..model.comparison import tree_plan
from ..model.compute_backend import ComputeBackend
from ..model.invariance_probe import PATH_TOKENS, PROBE_SEED, plain_logits
from ..model.llama_model import LlamaModel
from ..model.runner import ModelRunner
from ..parts import Ranks
from ..weights.causal_lm import DTYPES
from ..weights.llama_config import LlamaConfig, weight_shapes
from .split_answers import Wanted, split_answers

IDS, CONTEXT = 512, 5
TEMPERATURES = (1.0, 0.7, 0.0)


def require_bits_of_one_rank(
    hf_config_json: str, dtype: str, *, backend: ComputeBackend, ranks: Ranks
) -> None:
    """Compare a layer decoded by all ranks with what this one computes alone. Raises NumericsError: a bit differs."""
    small = {"num_hidden_layers": 1, "vocab_size": IDS, "num_outputs": IDS}
    text = json.dumps(json.loads(hf_config_json) | small)
    config, generator = LlamaConfig.of(text), torch.Generator().manual_seed(PROBE_SEED)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.1).to(DTYPES[dtype])
        for name, shape in weight_shapes(config).items()
    }
    ids = torch.randint(IDS, (CONTEXT + PATH_TOKENS,), generator=generator)
    alone, together = (_said(text, dtype, tensors, ids, backend, each) for each in (None, ranks))
    for what, expected in alone.items():
        got = together[what]
        if not torch.equal(expected, got):
            raise NumericsError(
                f"{what} of a layer that {ranks.share.ranks} ranks compute differ from one rank's by up to "
                f"{float((expected - got).abs().max()):.2e}, expected the same bits; set "
                "cluster.generation.tensor_parallel=1"
            )


def _said(
    text: str,
    dtype: str,
    tensors: dict[str, Tensor],
    ids: Tensor,
    backend: ComputeBackend,
    ranks: Ranks | None,
) -> dict[str, Tensor]:
    """Logits behind a prompt, and what is sampled at each of them, by what it is."""
    model = LlamaModel(LlamaConfig.of(text), DTYPES[dtype], backend, ranks=ranks, vocab_size=IDS)
    model.load(tensors, [tensors])
    runner = ModelRunner(
        model,
        num_slots=1,
        capacity=CONTEXT + PATH_TOKENS + 1,
        backend=backend,
        vocab_size=IDS,
        who="the probe of a group",
    )
    said = {"logits": plain_logits(runner, ids, CONTEXT)}
    tree = chain(ids[None, CONTEXT + 1 :], torch.ones(1, PATH_TOKENS - 1))
    for temperature in TEMPERATURES:
        answers = _answers(runner, ids, tree, temperature)
        values, _ = answers.logprobs(verify(answers.token_ids, tree, None, PATH_TOKENS - 1), is_chain=True)
        said[f"tokens at temperature {temperature:g}"] = answers.token_ids
        said[f"log-probabilities at temperature {temperature:g}"] = values
    return said


def _answers(runner: ModelRunner, ids: Tensor, tree: DraftTree, temperature: float) -> Answers:
    """What is sampled at the nodes of a chain behind the prompt, as a decode step does it."""
    levels, base = torch.arange(PATH_TOKENS)[None], torch.tensor([CONTEXT])
    rows = RowSampling.of([SamplingParams(max_new_tokens=1, temperature=temperature)], runner.device)
    words = row_words(np.array([[PROBE_SEED, 1]], dtype=np.int32), 1 + CONTEXT + levels.numpy())
    plan = tree_plan(runner, tree, base, view=CONTEXT + PATH_TOKENS)
    path, positions = ids[CONTEXT:], CONTEXT + levels[0]
    if runner.ranks is None:
        noise = runner.backend.noise.of_words(torch.from_numpy(words), IDS)
        return WholeAnswers(runner.logits(path, positions, plan)[None], noise, levels, rows)
    wanted = Wanted(torch.from_numpy(words), levels, rows.divisor, rows.noise_factor)
    return split_answers(runner, path, positions, plan, wanted)
