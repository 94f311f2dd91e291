"""The engine server over HTTP on real Ray: its answers are the engine's to the bit, whatever happens meanwhile."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
from byte_chat import save_byte_pair
from served_engine import TIMEOUT_S, TOKEN, ServedEngine, bits, serve_pair, told
from transformers import LlamaForCausalLM

from rlhfspec.benchmarks.peers.build import TRL_RELEASES, library_folder
from rlhfspec.benchmarks.support.malformed import malformed
from rlhfspec.benchmarks.support.result import ROOT
from rlhfspec.core.records import Prompt, Reward
from rlhfspec.core.settings.reward import RewardServerConfig, Scorer
from rlhfspec.learning.rewards.judge import Judge
from rlhfspec.learning.rewards.score_request import ScoreRequest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MAX_OPEN = 64
ASKED = {"logprobs": 0, "return_token_ids": True}
CHAT = {"messages": [{"role": "user", "content": "hé"}], "logprobs": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    save_byte_pair(folder)
    return folder


def save_changed(model: Path, folder: Path) -> None:
    """A model's weights, each a little moved."""
    torch.manual_seed(9)
    changed = LlamaForCausalLM.from_pretrained(model)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    changed.save_pretrained(folder)


@pytest.fixture(scope="module")
def server(local_ray: None, pair: Path) -> Iterator[ServedEngine]:
    yield from serve_pair(pair, max_open=MAX_OPEN)


def joined(events: list[dict[str, Any]], num_choices: int, *, chat: bool) -> list[dict[str, Any]]:
    """Choices as a whole answer has them, of a stream's parts."""
    made: list[dict[str, Any]] = [{"text": "", "token_ids": [], "logprobs": []} for _ in range(num_choices)]
    for event in events:
        for choice in event["choices"]:
            one = made[choice["index"]]
            assert "finish_reason" not in one, "something came behind the end"
            one["text"] += choice["delta"].get("content", "") if chat else choice["text"]
            one["token_ids"] += choice["token_ids"]
            one["logprobs"] += (
                [row["logprob"] for row in choice["logprobs"]["content"]]
                if chat
                else choice["logprobs"]["token_logprobs"]
            )
            if choice["finish_reason"]:
                one["finish_reason"] = choice["finish_reason"]
    return made


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": ["one", "two", "two"], "n": 2, "max_tokens": 20},
        {"prompt": [[7, 8, 9], [200]], "temperature": 0.7, "top_p": 0.9, "top_k": 40, "max_tokens": 30},
        {"prompt": "greedy", "temperature": 0, "max_tokens": 30, "ignore_eos": True},
        {"prompt": "stops", "stop": ["a", "e", "~"], "max_tokens": 200, "ignore_eos": True},
    ],
    ids=["texts", "ids", "greedy", "stop"],
)
def test_completions_are_the_engines(server: ServedEngine, pair: Path, more: dict[str, Any]):
    answer = server.generate(ASKED | more | {"seed": 11})
    expected = server.expected(pair / "target", ASKED | more, seed=11)
    assert told(answer) == bits(expected)
    assert [one["finish_reason"] for one in answer["choices"]] == [c.finish_reason for c in expected]
    assert answer["usage"]["completion_tokens"] == sum(c.num_tokens for c in expected)


def test_a_chat_is_the_engines_and_a_fresh_seed_is_told(server: ServedEngine, pair: Path):
    first, second = (
        server.generate(CHAT | {"n": 2, "max_completion_tokens": 24}, chat=True) for _ in range(2)
    )
    assert first["seed"] != second["seed"] and told(first) != told(second)
    body = CHAT | {"n": 2, "max_completion_tokens": 24}
    assert told(first) == bits(server.expected(pair / "target", body, seed=first["seed"], chat=True))
    tokenizer = server.plan.inputs.tokenizer
    assert tokenizer.decode(first["prompt_token_ids"]) == "<user>hé<end><assistant>"
    assert first["choices"][0]["message"]["role"] == "assistant"


def test_an_evaluation_reads_what_a_continuation_is_worth(server: ServedEngine, pair: Path):
    """As lm-eval 0.4.13's local-completions asks and reads (lm_eval/models/openai_completions.py)."""
    contexts, ends = [[70, 71, 72], [80, 81]], [[90, 91], [99]]
    prompts = [context + end for context, end in zip(contexts, ends, strict=True)]
    body = {
        "model": "tiny",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "echo": True,
    }
    choices = server.generate(body | {"seed": 1234})["choices"]
    model = LlamaForCausalLM.from_pretrained(pair / "target")
    for context, prompt, choice in zip(contexts, prompts, choices, strict=True):
        said, begin = choice["logprobs"], len(context)
        assert said["token_logprobs"][0] is None and len(said["tokens"]) == len(prompt) + 1
        with torch.inference_mode():
            dense = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)
        expected = [float(dense[at - 1, prompt[at]]) for at in range(1, len(prompt))]
        assert said["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)
        is_greedy = [max(top.values()) for top in said["top_logprobs"][begin:-1]]
        assert is_greedy == pytest.approx(dense[begin - 1 : -1].max(-1).values.tolist(), abs=1e-4)
    # the prompt by itself, and in a stream
    alone = server.generate(body | {"max_tokens": 0, "seed": 1})["choices"][0]["logprobs"]["token_logprobs"]
    assert alone == choices[0]["logprobs"]["token_logprobs"][:-1]
    (event,) = server.stream(body | {"prompt": prompts[0]})
    assert event["choices"][0]["logprobs"] == choices[0]["logprobs"]


def test_the_likeliest_tokens_change_nothing_and_a_judge_reads_them(
    server: ServedEngine, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    body = ASKED | {"prompt": "tops", "n": 3, "seed": 6, "max_tokens": 40, "temperature": 0.8, "top_k": 9}
    plain, told_more = server.generate(body), server.generate(body | {"logprobs": 3})
    assert told(told_more) == told(plain) == bits(server.expected(pair / "target", body, seed=6))
    text = "Judge x of q"
    chat = {"messages": [{"role": "user", "content": text}], "temperature": 0.0, "max_tokens": 1}
    asked = server.generate(chat | {"logprobs": True, "top_logprobs": 20}, chat=True)
    (said,) = asked["choices"][0]["logprobs"]["content"]
    shares = {one["token"]: math.exp(one["logprob"]) for one in said["top_logprobs"]}
    assert len(said["top_logprobs"]) == 20 and said["token"] == said["top_logprobs"][0]["token"]
    yes, no = [word for word in shares if word == word.strip() and word.isascii() and word.isprintable()][:2]
    monkeypatch.setenv("KEY", TOKEN)
    url = f"{server.url}/v1"
    template, choice = "Judge {response} of {prompt}", {yes: 1.0, no: 0.0}
    scorer = Scorer(kind="judge", url=url, model="tiny", template=template, choice=choice, key_env="KEY")
    request = ScoreRequest(prompt=Prompt(prompt_id=0, token_ids=np.array([1]), text="q"), response="x")
    (reward,) = Judge(scorer, RewardServerConfig(retries=0), tmp_path / "scores").outcomes([request])
    assert reward == Reward(value=pytest.approx(shares[yes] / (shares[yes] + shares[no])))


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_joins_to_the_whole_answer(server: ServedEngine, chat: bool):
    body = (CHAT if chat else ASKED | {"prompt": "stream"}) | {"n": 3, "seed": 5, "ignore_eos": True}
    body |= {"max_tokens": 300, "stop": "zq"}
    whole = server.generate(body, chat=chat)
    events = list(server.stream(body | {"stream_options": {"include_usage": True}}, chat=chat))
    assert events.pop()["usage"] == whole["usage"]
    made = joined(events, 3, chat=chat)
    assert [(one["token_ids"], one["logprobs"]) for one in made] == told(whole)
    for one, choice in zip(made, whole["choices"], strict=True):
        assert one["text"] == (choice["message"]["content"] if chat else choice["text"])
        assert one["finish_reason"] == choice["finish_reason"]
    # parts come while responses are generated; on a busy machine one may end before it is looked at
    asked = ({**body, "seed": seed} for seed in range(20))
    assert any(len(list(server.stream(one, chat=chat))) > 3 for one in asked)


def test_a_stop_token_is_told_and_is_no_text(server: ServedEngine):
    body = ASKED | {
        "prompt": "stop",
        "seed": 7,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "max_tokens": 8,
    }
    ids = server.generate(body)["choices"][0]["token_ids"]
    body |= {"stop_token_ids": [ids[-1]]}
    at = ids.index(ids[-1])
    decode = server.plan.inputs.tokenizer.decode
    for included, text in ((False, decode(ids[:at])), (True, decode(ids[: at + 1]))):
        choice = server.generate(body | {"include_stop_str_in_output": included})["choices"][0]
        assert (choice["token_ids"], choice["text"], choice["finish_reason"]) == (ids[: at + 1], text, "stop")


def test_what_trl_sends_is_answered_as_it_reads_it(server: ServedEngine):
    sampling = {"repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    asked = {
        "model": "tiny",
        "n": 2,
        "max_tokens": 8,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    choices = server.generate(asked | sampling | {"prompt": ["a", "b"], "logprobs": 0})["choices"]
    assert [one["prompt_token_ids"] for one in choices[::2]] == [
        server.plan.inputs.tokenizer.encode(text) for text in ("a", "b")
    ]
    for one in choices:
        assert one["logprobs"]["tokens"] == [f"token_id:{token}" for token in one["token_ids"]]
        assert [list(top.values()) for top in one["logprobs"]["top_logprobs"]] == [
            [value] for value in one["logprobs"]["token_logprobs"]
        ]
    chat = server.generate(
        asked | sampling | {"messages": CHAT["messages"], "logprobs": True, "top_logprobs": 0}, chat=True
    )
    assert chat["prompt_token_ids"] and all(
        row["token"] == f"token_id:{token}"
        for one in chat["choices"]
        for row, token in zip(one["logprobs"]["content"], one["token_ids"], strict=True)
    )
    assert server.get("/get_world_size").json() == {"world_size": 2}
    refused = server.post("/init_weight_transfer_engine", {"init_info": {"master_port": 1}})
    assert refused.status_code == 400 and "NCCL" in refused.json()["error"]["message"]


def run_client(script: str, library: str, *arguments: object) -> dict[str, Any]:
    """What a script of tests/helpers prints with a library on its path."""
    folder = library_folder(library)
    if folder is None:
        pytest.skip(f"{library} is not there: python -m rlhfspec.benchmarks.peers.build")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "tests" / "helpers" / script), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_openais_client_reads_every_answer(server: ServedEngine):
    got = run_client("openai_client_run.py", "openai", server.url, TOKEN, MAX_OPEN)
    server.wait_until_none_is_open()  # it has left a full room
    whole = server.generate(ASKED | {"prompt": "a", "max_tokens": 12, "seed": 3})
    ((_, logprobs),) = told(whole)
    assert (got["text"], got["text_logprobs"]) == (whole["choices"][0]["text"], logprobs)
    assert got["usage"] == whole["usage"]["completion_tokens"]
    chat = server.generate(CHAT | {"max_completion_tokens": 12, "seed": 3}, chat=True)
    ((_, logprobs),) = told(chat)
    assert got["chat"] == got["streamed"] == chat["choices"][0]["message"]["content"]
    assert got["chat_logprobs"] == logprobs and got["streamed_usage"] == len(logprobs)
    assert {name: one[:2] for name, one in got["refused"].items()} == {
        "token": ["AuthenticationError", 401],
        "model": ["NotFoundError", 404],
        "key": ["BadRequestError", 400],
        "room": ["RateLimitError", 429],
    }
    assert "the body has 'presence_penalty'" in got["refused"]["key"][2]


def test_trls_own_client_class_drives_it(server: ServedEngine):
    got = run_client("trl_client_run.py", f"trl-{TRL_RELEASES[-1]}", server.url, TOKEN)
    assert (got["model"], got["world_size"]) == ("tiny", 2)
    # what GRPOTrainer and AsyncGRPOTrainer look up in it
    model = {"model": "tiny", "dtype": "torch.float32", "max_model_len": 512}
    assert got["info"]["model_config"] == model | {"logprobs_mode": "processed_logprobs"}
    assert got["info"]["weight_transfer_config"] is got["info"]["lora_config"] is None
    sampling = {"n": 2, "max_tokens": 10, "seed": 5}
    expected = told(server.generate(ASKED | sampling | {"prompt": ["a", "b"], "temperature": 0.9}))
    for made, answers in (
        (got["generated"], expected),
        (
            got["chatted"],
            [
                one
                for text in "ab"
                for one in told(
                    server.generate(
                        CHAT | sampling | {"messages": [{"role": "user", "content": text}]}, chat=True
                    )
                )
            ],
        ),
    ):
        assert made["completion_ids"] == [ids for ids, _ in answers]
        assert made["logprobs"] == [[[one] for one in values] for _, values in answers]
        assert made["logprob_token_ids"] == [[[one] for one in ids] for ids, _ in answers]
        assert len(made["prompt_ids"]) == 2
    assert got["refused"][0] == 400 and "NCCL broadcast" in got["refused"][1]


def test_malformed_requests_are_each_refused_with_a_reason(server: ServedEngine):
    bodies = malformed(250, seed=1, vocab_size=261, context_tokens=512, max_open=MAX_OPEN)
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda one: server.post(f"/v1/{one[0]}", one[1]), bodies))
    for (route, body), answer in zip(bodies, answers, strict=True):
        assert 400 <= answer.status_code < 500, (route, body[:200], answer.status_code, answer.text)
        assert answer.json()["error"]["message"], (route, body[:200])
    assert server.post("/v1/completions", b" " * ((1 << 20) + 1)).status_code == 413
    for path in ("/v1/nothing", "/v1/completions/x"):
        assert server.post(path, {}).json()["error"]["type"] == "not_found_error"
    assert server.get("/v1/completions").status_code == 405


def test_pages_and_the_token(server: ServedEngine):
    assert server.get("/health").status_code == 200
    models = server.get("/v1/models").json()["data"]
    assert [one["id"] for one in models] == ["tiny"] and server.get("/v1/models/tiny").json() == models[0]
    assert server.get("/v1/models/a/b").json()["error"]["code"] == "model_not_found"
    assert "rlhfspec_serve_tokens_total" in server.get("/metrics").text
    for token in (None, "other", TOKEN + "x"):
        refused = server.post("/v1/completions", {"prompt": "a"}, token=token)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"


def test_more_than_the_limit_is_to_be_sent_again(server: ServedEngine):
    body = {"prompt": "x", "n": MAX_OPEN, "max_tokens": 400, "ignore_eos": True}
    # on a busy machine all may have ended before the next request comes
    for _ in range(20):
        running = server.stream(body)
        next(running)
        refused = server.post("/v1/completions", {"prompt": "x"})
        if refused.status_code == 429:
            break
        list(running)
    assert refused.status_code == 429 and refused.headers["Retry-After"]
    assert f"of {MAX_OPEN} at once" in refused.json()["error"]["message"]
    assert sum(1 for event in running if event["choices"][0]["finish_reason"]) == MAX_OPEN
    assert server.post("/v1/completions", body | {"n": MAX_OPEN + 1}).status_code == 400


def test_an_instance_that_dies_costs_no_request(server: ServedEngine, pair: Path):
    body = ASKED | {"prompt": "killed", "n": 16, "max_tokens": 450, "ignore_eos": True, "seed": 3}
    events = server.stream(body)
    first = next(events)
    server.kill("gen-0")
    made = joined([first, *events], 16, chat=False)
    expected = bits(server.expected(pair / "target", body, seed=3))
    assert [(one["token_ids"], one["logprobs"]) for one in made] == expected
    server.wait_for_instances(2)
    assert "gen-0" not in server.instances()


def test_a_client_that_leaves_gives_its_responses_up(server: ServedEngine):
    decoded = server.metric("rlhfspec_serve_decoded_tokens")
    body = {"prompt": "left", "n": MAX_OPEN, "max_tokens": 500, "ignore_eos": True, "stream": True}
    with server.post("/v1/completions", body, stream=True) as answer:
        next(answer.iter_lines(chunk_size=1))
    server.wait_until_none_is_open()
    assert server.metric("rlhfspec_serve_decoded_tokens") - decoded < MAX_OPEN * 500
    # those that wait, too
    assert server.post("/pause?mode=keep", {}).status_code == 200
    with pytest.raises(requests.ReadTimeout):
        server.post("/v1/completions", {"prompt": "left", "n": 3}, timeout=(TIMEOUT_S, 1.0))
    server.wait_until_none_is_open()
    assert server.post("/resume", {}).status_code == 200


def test_a_version_that_is_published_meanwhile_costs_no_request(
    server: ServedEngine, pair: Path, tmp_path: Path
):
    save_changed(pair / "target", tmp_path / "next")
    bodies = [
        ASKED | {"prompt": f"v{number}", "n": 2, "seed": number, "max_tokens": 300, "ignore_eos": True}
        for number in range(12)
    ]
    with ThreadPoolExecutor(16) as threads:
        early = [threads.submit(server.generate, body) for body in bodies[:6]]
        published = threads.submit(
            server.post,
            "/update_weights",
            {"update_info": {"path": str(tmp_path / "next" / "model.safetensors")}},
        )
        answers = [one.result() for one in early]
        assert published.result().json() == {"status": "ok", "weight_version": 1}
        answers += threads.map(server.generate, bodies[6:])
    for body, answer in zip(bodies, answers, strict=True):
        (version,) = {version for one in answer["choices"] for version in one["weight_versions"]}
        weights = pair / "target" if version == 0 else tmp_path / "next"
        assert told(answer) == bits(server.expected(weights, body, seed=body["seed"]))
    assert answers[-1]["choices"][0]["weight_versions"] == [1]


def test_a_server_that_is_started_again_has_the_weights_that_it_had(
    server: ServedEngine, pair: Path, tmp_path: Path
):
    save_changed(pair / "target", tmp_path / "kept")
    info = {"update_info": {"path": str(tmp_path / "kept")}}
    version = server.post("/update_weights", info).json()["weight_version"]
    server.kill_replica()
    body = ASKED | {"prompt": "again", "n": 2, "max_tokens": 40, "seed": 4}
    answer = server.generate(body)
    assert told(answer) == bits(server.expected(tmp_path / "kept", body, seed=4))
    assert answer["choices"][0]["weight_versions"] == [version]
    # where they cannot be had again it says so
    (tmp_path / "kept").rename(tmp_path / "moved")
    server.kill_replica()
    refused = server.post("/v1/completions", body)
    assert refused.status_code == 503 and server.get("/health").status_code == 503
    assert f"cannot read weight version {version}: no folder or file of weights" in refused.text
    info = {"update_info": {"path": str(tmp_path / "moved")}}
    assert server.post("/update_weights", info).json() == {"status": "ok", "weight_version": version + 1}
    assert server.generate(body)["choices"][0]["weight_versions"] == [version + 1]


def test_tokens_of_two_versions_are_not_scored_by_one(server: ServedEngine, pair: Path):
    body = {"prompt": "scored", "n": MAX_OPEN, "max_tokens": 480, "ignore_eos": True, "logprobs": 2}
    decoded = server.metric("rlhfspec_serve_decoded_tokens")
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(server.post, "/v1/completions", body)
        server.wait_for(lambda: server.metric("rlhfspec_serve_decoded_tokens") > decoded)
        assert server.post("/pause?mode=keep", {}).status_code == 200
        info = {"update_info": {"path": str(pair / "target")}}
        assert server.post("/update_weights", info).status_code == 200
        assert server.post("/resume", {}).status_code == 200
        refused = asked.result()
    assert refused.status_code == 503 and "new weights came while a response ran" in refused.text
    server.wait_until_none_is_open()


def test_a_pause_that_keeps_cuts_no_response(server: ServedEngine, tmp_path: Path):
    body = ASKED | {"prompt": "kept", "n": 4, "max_tokens": 450, "ignore_eos": True, "seed": 2}
    whole = server.generate(body)
    events = server.stream(body)
    first = next(events)
    assert server.post("/pause?mode=keep", {}).status_code == 200
    assert server.get("/is_paused").json() == {"is_paused": True}
    assert server.post("/resume", {}).status_code == 200
    made = joined([first, *events], 4, chat=False)
    assert [(one["token_ids"], one["logprobs"]) for one in made] == told(whole)
    missing = server.post("/update_weights", {"update_info": {"path": str(tmp_path / "none")}})
    assert missing.status_code == 400 and "no folder or file" in missing.json()["error"]["message"]
