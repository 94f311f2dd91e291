"""A run folder as a run leaves it, of two weight versions and with an episode, made in one process in a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rlhfspec.cluster.folder.iteration_logs import note_weights
from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.folder.rollouts import SCHEMA, write_rollouts
from rlhfspec.core.checkpoint_manifest import write_manifest
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.metrics import MetricsLog
from rlhfspec.core.records import Completion, History, ResponseFacts, Rollout, SampleRequest
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.engine import Engine
from rlhfspec.engine.weights.chunks import pack_weights, weight_views
from rlhfspec.engine.weights.loading import load_causal_lm, load_tokenizer, num_token_ids
from rlhfspec.learning.data.chat.written_text import response_text
from rlhfspec.learning.data.cursor import PromptCursor
from rlhfspec.learning.data.prompts import load_prompts, sampling_params
from rlhfspec.learning.rewards.reward_function import build_reward

SAMPLES = 6
"Of each iteration."
MAX_NEW_TOKENS = 24
CUT = 10
AHEAD: dict[str, dict[str, Any]] = {
    "rollout": {"max_staleness": 1},
    "algorithm": {"correction": {"kind": "tis"}},
}
"Changes of a config: responses of two weight versions."


def run_config(pair: Any, folder: Path, **changes: dict[str, Any]) -> Config:
    """Of a tiny pair; `changes` by section."""
    tree: dict[str, Any] = {
        "run": {"iterations": 2, "seed": 5, "checkpoint_every": 1, "cache_dir": str(folder / "cache")},
        "models": {"target": str(pair.target), "draft": str(pair.draft)},
        "data": {"task": "chain", "limit": 40},
        "sampling": {"max_new_tokens": MAX_NEW_TOKENS},
        "speculation": {"policy": "fixed", "num_nodes": 6, "depth": 3, "branching": 2},
        "rollout": {"prompts_per_iteration": SAMPLES},
        "engine": {"max_running_samples": 4, "probe": False, "device": "cpu"},
    }
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values}
    return config_from_dict(tree)


def make_run(config: Config, folder: Path, *, is_drafted: bool = False) -> Path:
    """Two iterations; the weights move a little in between. No advantage is known.

    By plain decoding, or as the config says where `is_drafted`.

    With `rollout.max_staleness` the second one's responses are begun by the first weights: CUT tokens of them.
    """
    run = RunDir.create(config, folder)
    tokenizer = load_tokenizer(config.models.target)
    target = load_causal_lm(config.models.target, "float32")
    plain = config.speculation.model_copy(update={"policy": "off"})
    engine = build_engine(
        target,
        load_causal_lm(str(config.models.draft), "float32") if is_drafted else None,
        engine=config.engine.model_copy(update={"max_running_samples": 7}),
        speculation=config.speculation if is_drafted else plain,
        max_total_tokens=100,
        vocab_size=num_token_ids(tokenizer),
        instance="gen-0",
    )
    sampling = sampling_params(config.sampling, tokenizer, model=config.models.target)
    cursor = PromptCursor(
        load_prompts(config.data, tokenizer, seed=config.run.seed), run_seed=config.run.seed, shuffle=True
    )
    manifest, _ = pack_weights(target, name="target", weight_version=0)
    note_weights(run.weights_file, manifest)
    moved = load_causal_lm(config.models.target, "float32")
    begun: list[SampleRequest] = []
    for iteration in range(2):
        size = config.rollout.samples_per_prompt
        requests = begun or cursor.next_requests(SAMPLES // size, size, sampling)
        completions = [_whole(done) for done in engine.generate(requests)]
        if config.environment.kind is not None:
            completions = [_second_turn(engine, request) for request in requests]
        texts = [response_text(tokenizer, completion) for completion in completions]
        prompts = [request.prompt for request in requests]
        facts = [ResponseFacts.of(completion) for completion in completions]
        rewards = build_reward(config.reward).score(prompts, texts, facts)
        write_rollouts(
            run.rollouts_file(iteration),
            [
                Rollout(prompt=prompt, completion=completion, response_text=text, reward=reward)
                for prompt, completion, text, reward in zip(prompts, completions, texts, rewards, strict=True)
            ],
        )
        MetricsLog(run.metrics_file).write(
            iteration, {"rollout/invariant": 1.0, "time/generate_s": 10.0, "time/iteration_s": 20.0}
        )
        if config.rollout.max_staleness and not iteration:
            begun = [_begun(engine, request) for request in cursor.next_requests(SAMPLES, 1, sampling)]
        torch.manual_seed(iteration)
        for weight in moved.parameters():
            weight.data.add_(torch.randn_like(weight) * 0.05)
        manifest, chunks = pack_weights(moved, name="target", weight_version=iteration + 1)
        engine.load_weights(manifest, weight_views(manifest, chunks))
        note_weights(run.weights_file, manifest)
        checkpoint = run.checkpoint_dir("target", iteration)
        moved.save_pretrained(checkpoint)
        tokenizer.save_pretrained(checkpoint)
        write_manifest(
            checkpoint, model="target", weight_version=iteration + 1, parameter_checksum=manifest.checksum
        )
    run.set_status("finished")
    return run.path


def _begun(engine: Engine, request: SampleRequest) -> SampleRequest:
    """The request of what follows the first CUT tokens."""
    short = replace(request.sampling, max_new_tokens=CUT, stop_token_ids=())
    (first,) = engine.generate([replace(request, sampling=short)])
    return replace(request, key=replace(request.key, turn=1), history=first.as_history())


def _whole(completion: Completion) -> Completion:
    return replace(completion, key=completion.key.sample, sampled=None)


def _second_turn(engine: Engine, request: SampleRequest) -> Completion:
    """A turn of up to ten tokens, an answer of three, another turn up to the end."""
    short = replace(request, sampling=replace(request.sampling, max_new_tokens=10))
    (first,) = engine.generate([short])
    answer = np.array([5, 6, 7])
    nothing = np.zeros(3, dtype=np.float32)
    history = History(
        token_ids=np.concatenate([first.token_ids, answer]),
        sampled=np.concatenate([first.is_sampled, np.zeros(3, dtype=bool)]),
        policy_logprobs=np.concatenate([first.policy_logprobs, nothing]),
        sampling_logprobs=np.concatenate([first.sampling_logprobs, nothing]),
    )
    (whole,) = engine.generate([replace(request, key=replace(request.key, turn=1), history=history)])
    return replace(whole, key=request.key)


def change_row(run: Path, iteration: int, row: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change one row of a rollout file in place."""
    file = RunDir(path=run).rollouts_file(iteration)
    rows = pq.read_table(file).to_pylist()
    change(rows[row])
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), file)
