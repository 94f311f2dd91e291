"""The calculator task for a model that has learned nothing: random characters, and every `=` is answered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from benchmarks.support.workload import BENCH_SEED, Workload
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.records import Completion, Prompt, SampleKey, SampleRequest, SamplingParams
from rlhfspec.engine.engine import Engine
from rlhfspec.learning.environments.environment_protocol import Environment, environment_maker, stop_texts
from rlhfspec.learning.environments.episode import Episode, EpisodeLimits
from rlhfspec.learning.environments.observations import ObservationRenderer, ending_with
from rlhfspec.learning.models.make import PairPaths
from rlhfspec.learning.models.tokenization import character_tokenizer
from rlhfspec.learning.rewards.written_text import written_text

ALPHABET = "0123456789+-*/=<>#. abcdefghijklmnopqrstuvwxyz"
MAX_TURNS = 24


def calculator_workload(folder: Path, num_episodes: int, *, max_new_tokens: int) -> Workload:
    """Write a random pair into `folder`, a draft that is often right; prompts are sums in words."""
    tokenizer = character_tokenizer(ALPHABET)
    paths = PairPaths(target=folder / "target", draft=folder / "draft")
    model = _random_model(len(tokenizer))
    model.save_pretrained(paths.target)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight += torch.randn_like(weight) * weight.std() * 0.2
    model.save_pretrained(paths.draft)
    for path in (paths.target, paths.draft):
        tokenizer.save_pretrained(path)
    random = np.random.default_rng(BENCH_SEED)
    texts = [f"{a}+{b} is <<{a}+{b}=" for a, b in random.integers(1, 1000, (num_episodes, 2))]
    return Workload(
        name="calculator",
        paths=paths,
        tokenizer=tokenizer,
        prompts=[
            Prompt(prompt_id=number, token_ids=np.array(tokenizer.encode(text)), text=text)
            for number, text in enumerate(texts)
        ],
        # no end token: `=` alone ends a turn
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
    )


def calculator_config(workload: Workload, **environment: object) -> Config:
    """The config of its environment."""
    return config_from_dict(
        {
            "data": {"task": "chain"},
            "models": {"target": str(workload.paths.target), "draft": str(workload.paths.draft)},
            "reward": {"kind": "environment"},
            "environment": {
                "kind": "calculator",
                "options": {"answer_all": True, "turn_reward": 0.1},
                "max_turns": MAX_TURNS,
            }
            | environment,
        }
    )


def play_alone(
    engine: Engine,
    requests: Sequence[SampleRequest],
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[SampleKey, Completion]:
    """Play every episode on one engine, each answer at once: what a pool must equal bit by bit."""
    make = environment_maker(config.environment)
    renderer = ObservationRenderer(tokenizer, max_tokens=config.environment.max_observation_tokens)
    limits = EpisodeLimits(
        max_turns=config.environment.max_turns,
        max_turn_tokens=config.environment.max_turn_tokens,
        stop_token_ids=ending_with(tokenizer, stop_texts(make())),
    )
    playing: dict[SampleKey, tuple[Episode, Environment]] = {}
    done: dict[SampleKey, Completion] = {}
    for request in requests:
        episode, environment = playing[request.key] = (Episode(request, limits), make())
        environment.reset(request.prompt)
        engine.submit(episode.first())
    while engine.has_work:
        for completion in engine.step():
            episode, environment = playing[completion.key.sample]
            text = written_text(tokenizer, episode.new_tokens(completion), stopped=True)
            episode.responses.append(text)
            step = environment.step(text)
            given = renderer.give(
                step.observation, prompt=episode.request.prompt, last_token=int(completion.token_ids[-1])
            ).token_ids
            then = episode.goes_on(completion, given, reward=step.reward, done=step.done)
            if isinstance(then, SampleRequest):
                engine.submit(then)
            else:
                done[then.key] = then
    return done


def _random_model(vocab_size: int) -> LlamaForCausalLM:
    torch.manual_seed(BENCH_SEED)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.1,
        # a character token ends nothing
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()
