"""The side that asks a reward server: what is down is asked again, what is wrong is said at once. No Ray."""

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy as np
import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from rlhfspec.actors.reward_server.reward_client import ServedReward
from rlhfspec.actors.reward_server.reward_deployment import http
from rlhfspec.actors.reward_server.score_schema import ScoreBody, from_answer, from_body, to_answer, to_body
from rlhfspec.cluster.ray_start.ray_init import free_ports
from rlhfspec.core.errors import RewardError, RewardServerLost
from rlhfspec.core.records import FinishReason, Prompt, ResponseFacts, Reward, Unscored
from rlhfspec.core.settings.reward import RewardServerConfig, Scorer
from rlhfspec.learning.rewards.score_request import score_requests

SETTINGS = RewardServerConfig(retries=3, backoff_s=1.0, timeout_s=30.0)
CHAT = (("user", "hi"), ("assistant", "ho"), ("user", "hm"))


def requests(count: int):
    prompts = [
        Prompt(prompt_id=i, token_ids=np.arange(3), text="p", reference="r", messages=CHAT)
        for i in range(count)
    ]
    facts = [
        ResponseFacts(
            sample_index=2**63 + i,
            num_tokens=7,
            finish_reason=FinishReason.LENGTH,
            turns=(("assistant", "a"), ("user", "b"), ("assistant", "c")),
            num_given_tokens=2,
            token_ids=(5, 6, 1),
            weight_version=4,
        )
        for i in range(count)
    ]
    return score_requests(prompts, [f"response {i}" for i in range(count)], facts)


@contextmanager
def answering(script: list[tuple[int, bytes]]) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives the answers of a script, the last one for ever; what it was asked."""
    asked: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.rfile.read(int(self.headers["Content-Length"])))
            status, body = script[min(len(asked), len(script)) - 1]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/score", asked
    finally:
        server.shutdown()
        server.server_close()


def rewards_of(*values: float) -> bytes:
    return to_answer([Reward(value=value) for value in values]).model_dump_json().encode()


def test_what_travels_comes_out_as_it_went_in_but_for_the_token_ids():
    sent = requests(2)
    received = from_body(ScoreBody.model_validate_json(to_body(sent).model_dump_json()))
    for one, other in zip(sent, received, strict=True):
        assert one.facts == other.facts and one.response == other.response
        for name in ("prompt_id", "text", "reference", "messages"):
            assert getattr(one.prompt, name) == getattr(other.prompt, name)
    outcomes = [Reward(value=0.1 + 0.2, parts={"a": 1e-17}), Unscored(reason="why")]
    assert (
        from_answer(type(to_answer([])).model_validate_json(to_answer(outcomes).model_dump_json()))
        == outcomes
    )


def test_facts_of_a_response_that_are_half_given_are_refused_and_not_dropped():
    whole = {"response": "a", "sample_index": 1, "num_tokens": 2, "finish_reason": "stop"}
    body = {"samples": [{**whole, "turns": [{"role": "assistant", "content": "a"}]}, {"response": "b"}]}
    assert [one.facts is None for one in from_body(ScoreBody.model_validate(body))] == [False, True]
    for lacks in ("sample_index", "num_tokens", "finish_reason"):
        half = {key: value for key, value in whole.items() if key != lacks}
        with pytest.raises(ValidationError, match="come together"):
            ScoreBody.model_validate({"samples": [half]})
    with pytest.raises(ValidationError, match="turns and num_given_tokens with them"):
        ScoreBody.model_validate({"samples": [{"response": "b", "num_given_tokens": 2}]})


def test_a_server_that_is_down_is_an_error_after_its_retries_with_growing_waits():
    waits: list[float] = []
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(
        RewardServerLost, match=r"did not answer in 4 tries .*refused.*rlhfspec serve reward"
    ) as lost:
        ServedReward(Scorer(kind="serve", url=url), SETTINGS, sleep=waits.append)
    assert lost.value.exit_code == 1
    assert [round(wait / 2**i) for i, wait in enumerate(waits)] == [1, 1, 1]


def test_a_server_that_comes_back_is_asked_again_with_the_same_samples():
    script = [(200, rewards_of()), (503, b"no replica"), (500, b"replica died")]
    script += [(404, b"the application is on its way out, or in"), (200, rewards_of(0.5, 1.5))]
    with answering(script) as (url, asked):
        reward = ServedReward(Scorer(kind="serve", url=url), SETTINGS, sleep=lambda _: None)
        assert reward.outcomes(requests(2)) == [Reward(value=0.5), Reward(value=1.5)]
    assert asked[1] == asked[2] == asked[3] == asked[4] and len(json.loads(asked[3])["samples"]) == 2


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((403, b"not you"), "refused with HTTP 403: not you"),
        ((422, b"what?"), "refused with HTTP 422"),
        ((200, b"hello"), "answered 'hello'; expected an object with rewards"),
        ((200, b'{"rewards": [], "masks": []}'), "has 'masks', which nothing here reads"),
        ((200, b'{"rewards": [{"value": 1, "advantage": 2}]}'), "reward 0 of .* has 'advantage'"),
        ((200, rewards_of(1.0)), "was given 2 samples and returned 1 rewards"),
    ],
)
def test_a_server_that_speaks_another_language_is_said_at_once(answer, words):
    with answering([(200, rewards_of()), answer]) as (url, asked):
        reward = ServedReward(Scorer(kind="serve", url=url), SETTINGS, sleep=lambda _: None)
        with pytest.raises(RewardError, match=words):
            reward.outcomes(requests(2))
    assert len(asked) == 2


def test_an_address_that_nobody_ever_answered_at_is_refused_at_once():
    words = r"refused with HTTP 404: nothing here.*fix reward\.url"
    with answering([(404, b"nothing here")]) as (url, asked), pytest.raises(RewardError, match=words):
        ServedReward(Scorer(kind="serve", url=url), SETTINGS, sleep=lambda _: None)
    assert len(asked) == 1


def test_a_sample_that_the_server_could_not_score_is_unscored_here():
    answer = to_answer([Unscored(reason="sample 3 hangs"), Reward(value=1.0)]).model_dump_json().encode()
    with answering([(200, rewards_of()), (200, answer)]) as (url, _):
        reward = ServedReward(Scorer(kind="serve", url=url), SETTINGS)
        assert reward.outcomes(requests(2)) == [Unscored(reason="sample 3 hangs"), Reward(value=1.0)]


def test_a_wrong_body_is_answered_422_even_where_it_holds_what_json_does_not():
    fault = {
        "type": "finite_number",
        "loc": ("body", "samples", 0, "prompt_id"),
        "msg": "no",
        "input": math.inf,
    }
    handler: Any = http.exception_handlers[RequestValidationError]
    answer = asyncio.run(handler(None, RequestValidationError([fault])))
    assert answer.status_code == 422 and json.loads(answer.body)["detail"][0]["loc"][-1] == "prompt_id"
