"""Tools through the whole loop, on a tiny random pair whose tokens are whole calls, and two instances."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from random_pair import save_random_pair

from rlhfspec.cluster.folder.layout import RunDir
from rlhfspec.cluster.observe.console import Reporter
from rlhfspec.cluster.plan.inputs import read_inputs
from rlhfspec.cluster.plan.run_check import check_run
from rlhfspec.cluster.ray_start.ray_session import RaySession
from rlhfspec.cluster.run.loop import train
from rlhfspec.cluster.system.system import running_system
from rlhfspec.cluster.verify.verify_run import verify_run
from rlhfspec.core.config import Config
from rlhfspec.core.config_io import config_from_dict
from rlhfspec.core.metrics import read_metrics
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.weights.loading import load_causal_lm
from rlhfspec.integrations.engine_episodes import EngineEpisodes
from rlhfspec.learning.data.cursor import PromptCursor
from rlhfspec.learning.data.prompts import sampling_params
from rlhfspec.learning.models.tokenization import character_tokenizer

SAMPLES = 8
CALLS = [
    f"<tool_call>{text}</tool_call>"
    for text in (
        '{"name": "add", "arguments": {"a": 3}}',
        '{"name": "add", "arguments": {"a": 3, "b": 4}}',
        '{"name": "add", "arguments": {}}',
        '{"name": "add"',
    )
]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function|tojson }}</tool_call>{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("callers")
    tokenizer = character_tokenizer("addtuo:;=+34567 Er")
    tokenizer.add_tokens(CALLS)
    tokenizer.chat_template = TEMPLATE
    save_random_pair(folder, tokenizer, positions=512)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n}+3=", "answer": ""}) + "\n" for n in range(3, 8)))
    return config_from_dict(
        {
            "run": {"iterations": 2, "seed": 5},
            "models": {"target": str(folder / "target"), "draft": str(folder / "draft")},
            "data": {"path": str(rows), "chat": True},
            "reward": {"kind": "format", "pattern": ".*7.*"},
            "environment": {
                "kind": "tools",
                "tools": "sample_tools:add",
                "max_turns": 6,
                "max_turn_tokens": 20,
                "max_observation_tokens": 16,
            },
            "sampling": {"max_new_tokens": 160},
            "speculation": {"policy": "fixed", "num_nodes": 8, "depth": 4, "branching": 2},
            "rollout": {"prompts_per_iteration": SAMPLES},
            "engine": {"max_running_samples": 4},
            "reallocation": {"interval_s": 0.01},
            "trainer": {"minibatch_size": 4, "learning_rate": 1e-3, "num_threads": 1},
            "cluster": {"trainer": {"num_cpus": 0.25}},
        }
    )


@pytest.fixture(scope="module")
def run_dir(local_ray, config, tmp_path_factory) -> Iterator[RunDir]:
    folder = RunDir.create(config, tmp_path_factory.mktemp("runs") / "tools")
    session = RaySession(namespace="test-loop-tools", is_local=False, dashboard_url=None)
    with running_system(check_run(config, output_dir=Path.cwd()), session) as system:
        train(system, folder, Reporter())
        yield folder


@pytest.mark.ray
@pytest.mark.slow
def test_conversations_with_tools_are_those_of_one_engine_without_speculation(config, run_dir):
    inputs = read_inputs(config)
    engine = build_engine(
        load_causal_lm(config.models.target, "float32"),
        None,
        engine=config.engine.model_copy(update={"probe": False, "turn_cache_mb": 0.0}),
        speculation=config.speculation.model_copy(update={"policy": "off"}),
        max_total_tokens=inputs.max_total_tokens,
        vocab_size=len(inputs.tokenizer),
    )
    cursor = PromptCursor(inputs.dataset, run_seed=config.run.seed, shuffle=config.data.shuffle)
    requests = cursor.next_requests(SAMPLES, 1, sampling_params(config.sampling, inputs.tokenizer))
    alone = EngineEpisodes(config.environment, inputs.tokenizer).run(engine, requests)
    rows = pq.read_table(run_dir.rollouts_file(0)).to_pylist()
    by_index = {completion.key.sample_index: completion for _, completion, _ in alone}
    assert [row["sample_index"] for row in rows] == sorted(by_index)
    for row in rows:
        completion = by_index[row["sample_index"]]
        assert row["response_token_ids"] == completion.token_ids.tolist()
        assert row["response_sampled"] == completion.is_sampled.tolist()
        assert np.array_equal(np.float32(row["policy_logprobs"]), completion.policy_logprobs)


@pytest.mark.ray
@pytest.mark.slow
def test_calls_are_counted_and_answered(run_dir):
    metrics = read_metrics(run_dir.metrics_file)
    texts = [row["response"] for i in range(2) for row in pq.read_table(run_dir.rollouts_file(i)).to_pylist()]
    for name in ("tool_calls", "tool_calls_unparsed", "tool_calls_failed"):
        assert sum(row[f"rollout/{name}"] for row in metrics) > 0, name
    assert any(f"{CALLS[1]}t:7a:" in text for text in texts), texts


@pytest.mark.ray
@pytest.mark.slow
def test_verify_proves_the_conversations_from_the_record(run_dir):
    verification = verify_run(run_dir.path, share=1.0, num_engines=1)
    assert verification.holds, verification.differences
    assert verification.num_regenerated == SAMPLES
