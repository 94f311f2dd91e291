"""A judge over HTTP: what it is asked, what is read of its answers, and that nothing is asked twice."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhfspec.cluster.observe.summary import unread_line
from rlhfspec.cluster.plan.reward_plan import check_reward, scoring_timeout_s
from rlhfspec.core.config import RewardConfig
from rlhfspec.core.errors import ConfigError, RewardError, RewardServerLost
from rlhfspec.core.records import FinishReason, Prompt, ResponseFacts, Reward, Unscored
from rlhfspec.learning.rewards.reward_function import build_reward

PAIR = "<{response}|{other}>"


class Asked(ThreadingHTTPServer):
    """Scores by length: a single one by a tenth a letter, a pair by which is longer."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self.refusals: list[tuple[int, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Asked

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.headers.append(self.headers.get("Authorization"))
        if self.server.refusals:
            status, text = self.server.refusals.pop()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())
            return
        self.server.bodies.append(body)
        answer = json.dumps({"choices": [said(body)]}).encode()
        self.send_response(200 if self.path == "/v1/chat/completions" else 404)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def said(body: dict[str, Any]) -> dict[str, Any]:
    text = body["messages"][0]["content"]
    if body.get("logprobs"):
        top = [("Yes", 0.6), (" No", 0.2), ("Maybe", 0.2)]
        entries = [{"token": word, "logprob": math.log(p)} for word, p in top]
        return {"logprobs": {"content": [{"top_logprobs": entries}]}}
    if "odd" in text:
        return {"message": {"content": "I would rather not."}}
    if found := re.search(r"<(\w+)\|(\w+)>", text):
        first, second = map(len, found.groups())
        return {
            "message": {
                "content": f"Score: 7. No: Score: {0.5 if first == second else float(first > second)}"
            }
        }
    return {"message": {"content": f"Score: {len(text.split('>')[1].split('<')[0]) / 10}"}}


@pytest.fixture
def judge() -> Iterator[Asked]:
    server = Asked()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def config(judge: Asked, folder: Path, **settings: Any) -> RewardConfig:
    own = {
        "template": '{prompt}>{response}<{reference}{"n": 1}',
        "cache": str(folder / "new" / "judge.jsonl"),
    }
    server = {"retries": 1, "backoff_s": 0.001}
    made = {"kind": "judge", "url": judge.url, "model": "m", "server": server, **own, **settings}
    return RewardConfig.model_validate({name: value for name, value in made.items() if value is not None})


def scores(reward: RewardConfig, *texts: str, group: int | None = 0) -> list[Reward | Unscored]:
    prompts = [Prompt(prompt_id=3, token_ids=np.array([1]), text="q", reference="r")] * len(texts)
    facts = [
        ResponseFacts(sample_index=at, num_tokens=1, finish_reason=FinishReason.STOP, group_id=group)
        for at in range(len(texts))
    ]
    return build_reward(reward).score_each(prompts, texts, facts)


def test_each_text_is_asked_once_for_all_runs_of_one_server(judge: Asked, tmp_path: Path) -> None:
    reward = config(judge, tmp_path)
    first = scores(reward, "abc", "a", "abc", "{prompt}")
    assert first == [Reward(value=0.3), Reward(value=0.1), Reward(value=0.3), Reward(value=0.8)]
    assert sorted(body["messages"][0]["content"] for body in judge.bodies) == [
        'q>a<r{"n": 1}',
        'q>abc<r{"n": 1}',
        'q>{prompt}<r{"n": 1}',
    ]
    assert {(body["model"], body["temperature"], body["max_tokens"]) for body in judge.bodies} == {
        ("m", 0.0, 512)
    }
    elsewhere = reward.model_copy(update={"url": "http://127.0.0.1:9"})
    assert scores(reward, "abc", "a", "abc", "{prompt}") == first and len(judge.bodies) == 3
    # what another server calls so may be another model
    with pytest.raises(RewardServerLost, match="did not answer in 2 tries"):
        scores(elsewhere, "abc")


def test_pairs_of_a_prompt_are_asked_in_both_orders_and_a_share_of_wins_is_the_score(
    judge: Asked, tmp_path: Path
) -> None:
    reward = config(judge, tmp_path, template=PAIR, scope="group")
    assert [one.value for one in scores(reward, "abcd", "ab", "ab") if isinstance(one, Reward)] == [
        1.0,
        0.25,
        0.25,
    ]
    assert len(judge.bodies) == 3, "equal texts are one question: ab|ab, abcd|ab, ab|abcd"
    alone = scores(reward.model_copy(update={"on_error": "skip"}), "abcd")[0]
    assert isinstance(alone, Unscored) and "sample 0 (prompt 3) has nothing to compare" in alone.reason
    assert check_reward(reward).in_groups
    assert "pairs of a prompt's responses, in both orders" in check_reward(reward).functions[0]


def test_a_choice_is_weighed_by_its_probabilities(judge: Asked, tmp_path: Path) -> None:
    reward = config(judge, tmp_path, choice={"Yes": 1.0, "No": -1.0})
    [one] = scores(reward, "abc")
    assert isinstance(one, Reward) and one.value == pytest.approx(0.5)
    assert judge.bodies[0] | {"logprobs": True, "top_logprobs": 20, "max_tokens": 1} == judge.bodies[0]
    refused = scores(config(judge, tmp_path, choice={"A": 1.0}, on_error="skip"), "abc")[0]
    assert isinstance(refused, Unscored) and "none is of reward.choice ['A']" in refused.reason


def test_what_cannot_be_read_is_refused_or_has_the_declared_score_and_is_counted(
    judge: Asked, tmp_path: Path
) -> None:
    with pytest.raises(
        RewardError, match=r"judge m for sample 1 \(prompt 3\) answered 'I would rather not.', in which"
    ):
        scores(config(judge, tmp_path), "abc", "odd")
    declared = scores(config(judge, tmp_path, default=-1.0), "abc", "odd")
    assert declared == [
        Reward(value=0.3, parts={"unread": 0.0}),
        Reward(value=-1.0, parts={"unread": 1.0}),
    ]
    line = unread_line([one for one in declared if isinstance(one, Reward)])
    told = "answered 'I would rather not.', in which 'Score:\\s*(-?\\d+(?:\\.\\d+)?)' finds no number"
    assert line == f"50.0% of the judge's answers count as reward.default; the first {told}"
    assert len(judge.bodies) == 2, "an answer that cannot be read is kept, too"


def test_a_refusal_ends_the_run_whatever_is_declared_and_is_not_kept(judge: Asked, tmp_path: Path) -> None:
    declared = config(judge, tmp_path, default=-1.0, on_error="skip")
    judge.refusals = [(400, json.dumps({"error": {"message": "x" * 20 + " " + "y" * 190 + " too long"}}))]
    with pytest.raises(
        RewardServerLost, match=r"judge m at http\S+/completions refused .* HTTP 400: .*too long"
    ):
        scores(declared, "abc")
    judge.refusals = [(404, "<html>" + "z " * 150)]
    with pytest.raises(RewardServerLost, match=r"HTTP 404: <html>[z ]{194};"):
        scores(declared, "abc")
    for odd in ("<html>hello</html>", "{}", '{"choices": []}'):
        judge.refusals = [(200, odd)]
        with pytest.raises(RewardServerLost, match=f"HTTP 200: '{re.escape(odd)}', which is no chat"):
            scores(declared, "abc")
    judge.refusals = [(200, '{"choices": [{"logprobs": null}]}')]
    with pytest.raises(RewardServerLost, match="with top_logprobs, which"):
        scores(config(judge, tmp_path, choice={"Yes": 1.0}, default=0.0), "abc")
    assert scores(declared, "abc") == [Reward(value=0.3, parts={"unread": 0.0})]


def test_a_check_asks_one_question_and_ends_where_nobody_is_there(judge: Asked, tmp_path: Path) -> None:
    prompt, reward = (
        Prompt(prompt_id=0, token_ids=np.array([1]), text="q", reference="abcd"),
        config(judge, tmp_path),
    )
    line = check_reward(reward, first=prompt).functions[1]
    assert line == "judge m of 'abcd', a stand-in: score 0.4; it said 'Score: 0.4'"
    assert check_reward(reward, first=prompt).functions[1].endswith("score 0.4; kept from before")
    assert len(judge.bodies) == 1
    [chosen] = check_reward(config(judge, tmp_path, choice={"Yes": 1.0}), first=prompt).functions[1:]
    assert chosen.endswith("score 1; it said 'Yes 0.60, No 0.20, Maybe 0.20'")
    judge.refusals = [(503, "")]
    busy = check_reward(config(judge, tmp_path, model="n"), first=prompt).functions[1]
    assert "gave no answer to a first question: the judge at" in busy and "in 1 tries" in busy
    with pytest.raises(RewardServerLost, match="in 1 tries; the last one: URLError"):
        check_reward(reward.model_copy(update={"url": "http://127.0.0.1:9"}), first=prompt)


def test_a_busy_server_is_asked_again(judge: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    reward = config(judge, tmp_path, key_env="JUDGE_KEY", on_error="skip")
    judge.refusals = [(503, "")]
    assert scores(reward, "abc") == [Reward(value=0.3)] and judge.headers == ["Bearer secret"] * 2
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="JUDGE_KEY is no environment variable"):
        build_reward(reward)


def test_a_file_that_holds_no_scores_is_refused(judge: Asked, tmp_path: Path) -> None:
    reward = config(judge, tmp_path)
    scores(reward, "abc")
    with Path(reward.cache).open("a") as file:
        file.write("{}\n")
    with pytest.raises(
        ConfigError, match=r"line 2 of .*judge.jsonl is no judge's \[key, score\]: \{\}; remove"
    ):
        build_reward(reward)


def test_braces_of_latex_and_of_json_are_no_names(judge: Asked, tmp_path: Path) -> None:
    rubric = r'{"score": 1} {1} { } as \boxed{x} and \frac{a}{b}, like {reference}'
    assert config(judge, tmp_path, template=None, rubric=rubric).rubric == rubric


def test_a_batch_may_take_as_long_as_its_questions() -> None:
    server = {"timeout_s": 10.0, "retries": 1, "backoff_s": 1.0}
    own = {"kind": "judge", "url": "http://h", "model": "m", "server": server, "batch_size": 8}
    alone = RewardConfig.model_validate({**own, "rubric": "Be brief."})
    pairs = RewardConfig.model_validate({**own, "rubric": "Be brief.", "scope": "group"})
    assert scoring_timeout_s(alone, 100.0) == 122.0
    assert scoring_timeout_s(pairs, 100.0, 16) == 100.0 + 8 * 22.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url": None}, "needs reward.url"),
        ({"rubric": "short"}, "reward.template or reward.rubric, not both"),
        ({"template": None}, "one of reward.template and reward.rubric"),
        ({"template": "{prompt}"}, "reward.template needs {response}"),
        ({"scope": "group"}, "{other} with reward.scope group alone"),
        ({"pattern": "Score"}, "reward.pattern of a judge needs a group"),
        ({"choice": {"Yes": 1.0}, "pattern": "(x)"}, "choice and reward.pattern both read the answer"),
        ({"choice": {}}, "reward.choice needs words"),
        (
            {"template": "{response}{refrence}"},
            "{refrence}, which nothing fills in; known are {prompt}, {response}",
        ),
        ({"template": None, "rubric": "{other}"}, "reward.rubric names {other}"),
        ({"template": PAIR, "scope": "group", "default": -1.0}, "are from 0 to 1"),
        ({"kind": "gsm8k"}, "reward.model is of kind model or judge, this is gsm8k"),
    ],
)
def test_what_does_not_go_together_is_refused(
    judge: Asked, tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        config(judge, tmp_path, **settings)
