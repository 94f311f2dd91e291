"""Conversations with tools by a random model that calls often: a token is a whole call, right or wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from ...core.config import Config, DataConfig
from ...core.config_io import config_from_dict
from ...core.records import Completion, Prompt, SamplingParams
from ...learning.data.chat.chat_format import render_chat
from ...learning.data.chat.written_text import written_text
from ...learning.environments.environment_protocol import environment_maker
from ...learning.environments.observations import ObservationRenderer
from ...learning.environments.tools import call_parser, tool_schemas
from ...learning.models.make import PairPaths
from ...learning.models.tokenization import character_tokenizer
from .workload import BENCH_SEED, Workload

MAX_TURNS = 6
ALPHABET = "0123456789+-*/=<>#.:; abcdefghijklmnopqrstuvwxyzE"
CALLS = [
    f"<tool_call>{text}</tool_call>"
    for text in (
        '{"name": "add", "arguments": {"a": 3}}',
        '{"name": "add", "arguments": {"a": 3, "b": 4}}',
        '{"name": "add", "arguments": {}}',
        '{"name": "add"',
    )
]
"Two that are answered, one that misses an argument, one that does not parse."
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function|tojson }}</tool_call>{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
_TOOL = '''"""A tool that takes its time; a file beside it lets the next call kill the process."""

import contextlib
import os
import time
from pathlib import Path


def add(a: int, b: int = 1) -> int:
    """Add.

    Args:
        a: one
        b: the other
    """
    with contextlib.suppress(FileNotFoundError):
        Path({sign!r}).unlink()
        os.kill(os.getpid(), 9)
    time.sleep({seconds})
    return a + b
'''


def save_often_right_pair(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, paths: PairPaths
) -> None:
    """Write a target, and its own weights with noise as a draft that is often right; the model is changed."""
    model.save_pretrained(paths.target)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight += torch.randn_like(weight) * weight.std() * 0.2
    model.save_pretrained(paths.draft)
    for path in (paths.target, paths.draft):
        tokenizer.save_pretrained(path)


def tools_workload(
    folder: Path, num: int, *, tool_s: float, shape: Mapping[str, int], max_turn_tokens: int | None
) -> tuple[Workload, Config]:
    """Write a pair and its tool, which takes so many seconds, into `folder`; `shape`: of the target's config."""
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.add_tokens(CALLS)
    tokenizer.chat_template = TEMPLATE
    paths = PairPaths(target=folder / "target", draft=folder / "draft")
    torch.manual_seed(BENCH_SEED)
    end: Any = tokenizer.eos_token_id
    described: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "eos_token_id": end,
        "pad_token_id": tokenizer.pad_token_id,
        **shape,
    }
    model = LlamaForCausalLM(LlamaConfig(**described)).eval()
    save_often_right_pair(model, tokenizer, paths)
    file = folder / f"tool_of_{tool_s * 1e3:.0f}_ms.py"
    file.write_text(_TOOL.format(sign=str(sign_of(folder)), seconds=tool_s))
    asked = [f"{a}+{b}=" for a, b in np.random.default_rng(BENCH_SEED).integers(1, 1000, (num, 2))]
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": one, "answer": ""}) + "\n" for one in asked))
    config = config_from_dict(_settings(paths, rows, file, max_turn_tokens))
    tools = tuple(tool_schemas(config.environment))
    prompts = []
    for number, text in enumerate(asked):
        said = ({"role": "user", "content": text},)
        ids = tokenizer.encode(render_chat(tokenizer, said, ask=True, tools=tools), add_special_tokens=False)
        messages = (("user", text),)
        prompts.append(
            Prompt(prompt_id=number, token_ids=np.array(ids), text=text, messages=messages, tools=tools)
        )
    sampling = SamplingParams(max_new_tokens=400, stop_token_ids=(end,))
    return Workload(
        name="tools", paths=paths, known_tokenizer=tokenizer, prompts=prompts, sampling=sampling
    ), config


def _settings(paths: PairPaths, rows: Path, file: Path, max_turn_tokens: int | None) -> dict[str, Any]:
    return {
        "run": {"iterations": 3, "seed": 5, "state_every": 1},
        "models": {"target": str(paths.target), "draft": str(paths.draft)},
        "data": {"path": str(rows), "chat": True},
        "reward": {"kind": "format", "pattern": ".*7.*"},
        "environment": {
            "kind": "tools",
            "tools": f"{file}:add",
            "max_turns": MAX_TURNS,
            "max_turn_tokens": max_turn_tokens,
            "max_observation_tokens": 16,
        },
        "sampling": {"max_new_tokens": 400},
        "speculation": {"policy": "fixed", "num_nodes": 8, "depth": 4, "branching": 2},
        "rollout": {"prompts_per_iteration": 48},
        "engine": {"max_running_samples": 16},
        "reallocation": {"interval_s": 0.02},
        "trainer": {"minibatch_size": 24, "learning_rate": 1e-3, "num_threads": 1},
        "cluster": {"trainer": {"num_cpus": 0.25}},
    }


def sign_of(folder: Path) -> Path:
    """The file whose being there kills the process of the next call."""
    return folder / "the-next-call-dies"


def num_turns(completion: Completion) -> int:
    """The policy's, of which results stand between."""
    sampled = completion.is_sampled.astype(np.int8)
    return int((np.diff(sampled) == 1).sum()) + 1


def busy_share(looks: Sequence[tuple[float, float]], num_instances: int) -> float:
    """Of (clock, busy seconds of all) the instances' mean share of the time between first and last that is busy."""
    (first_s, first_busy), (last_s, last_busy) = looks[0], looks[-1]
    return (last_busy - first_busy) / (num_instances * max(last_s - first_s, 1e-9))


def turn_overhead_ms(tokenizer: PreTrainedTokenizerBase, config: Config, num: int) -> float:
    """CPU milliseconds of a turn with one call, beside the tool: its text, the call, the result's tokens."""
    parser = call_parser(config.environment, DataConfig(task="chain"), tokenizer)
    environment = environment_maker(config.environment, parser)()
    prompt = Prompt(
        prompt_id=0,
        token_ids=np.zeros(1, dtype=np.int64),
        text="-",
        messages=(("user", "-"),),
        tools=tuple(tool_schemas(config.environment)),
    )
    environment.reset(prompt)
    renderer = ObservationRenderer(tokenizer, max_tokens=256)
    ids = np.array([*tokenizer.encode(f"so {CALLS[1]}", add_special_tokens=False), tokenizer.eos_token_id])
    began_s = 0.0
    for number in range(num + 8):
        if number == 8:
            began_s = time.process_time()
        step = environment.step(written_text(tokenizer, ids, stopped=True))
        renderer.give(step.observation, prompt=prompt, last_token=int(ids[-1]))
    return (time.process_time() - began_s) / num * 1e3
