"""Environments of the package `verifiers`: its rollouts are played in our turns, its rubric's sum is the reward."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhfspec.benchmarks.peers.build import library_folder
from rlhfspec.core.config import EnvironmentConfig
from rlhfspec.core.errors import ConfigError, DataError, EpisodeError
from rlhfspec.core.named_code import IMPORT_FOLDER
from rlhfspec.core.records import Prompt
from rlhfspec.learning.data.verifiers_package import load, schemas, table
from rlhfspec.learning.environments import verifiers_episode
from rlhfspec.learning.environments.environment_protocol import Step, closed, environment_maker
from rlhfspec.learning.environments.verifiers_episode import VerifiersEpisode

HELPERS = Path(__file__).parents[2] / "helpers"
PROMPT = Prompt(
    prompt_id=5, token_ids=np.arange(2), reference="4", messages=(("user", "2+2"),), fields={"info": {}}
)


@pytest.fixture(scope="module")
def played() -> dict:
    folder = library_folder("verifiers")
    if folder is None:
        pytest.skip("verifiers is not there: python -m rlhfspec.benchmarks.peers.build --only verifiers")
    path = os.pathsep.join(map(str, (folder, IMPORT_FOLDER, HELPERS)))
    done = subprocess.run(
        [sys.executable, HELPERS / "verifiers_play.py"],
        env=os.environ | {"PYTHONPATH": path, "OPENAI_API_KEY": "none"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_rows_of_its_data_set_are_prompts(played):
    messages = [["system", "Guess."], ["user", "guess 2"]]
    assert len(played["rows"]) == 3 and played["rows"][2] == [
        messages,
        "2",
        {"question": "guess 2", "info": {"tries": 3}},
    ]


def test_its_rollouts_are_our_turns_and_its_rubric_the_reward(played):
    first, wrong, right = played["multi"]
    assert first == "" and wrong == [[{"role": "user", "content": "try 1 of 3"}], 0.0, False, {}]
    assert right == ["", 1.2, True, {"right": 1.0, "tries": 2.0, "num_turns": 2.0}]
    assert played["again"] == played["multi"]
    assert played["single"] == ["", ["", 1.0, True, {"right": 1.0, "num_turns": 1.0}]]


def test_its_tools_are_called_by_our_parser_and_answer_as_tool_turns(played):
    first, two, unknown, last = played["tools"]
    own = {"role": "tool", "tool_call_id": "call00000"}
    assert (first, two[0]) == ("", [own | {"name": "add", "content": "2"}])
    assert unknown[0] == [own | {"name": "none", "content": "'none'"}]
    assert last == [
        "",
        1.0,
        True,
        {"right": 1.0, "num_turns": 3.0, "total_tool_calls": 2.0, "add_calls": 1.0},
    ]


def test_a_rollout_that_our_limits_cut_is_scored_as_it_is(played):
    assert played["cut"][-1] == ["", 0.1, True, {"right": 0.0, "tries": 1.0, "num_turns": 1.0}]


def test_what_cannot_be_given_is_refused_and_the_process_s_signals_stay(played):
    assert "rubric scores groups" in played["group"]
    assert "set data.reward_fields: [info]" in played["no info"]
    assert played["signals"]


class Environment:
    """What of the package's is asked of one, without the package."""

    tool_defs = (SimpleNamespace(name="add", description="adds", parameters={"type": "object"}, strict=None),)
    requires_group_rollouts, eval_dataset = False, None
    dataset = SimpleNamespace(column_names=["prompt", "answer", "info"])

    def __init__(self, run: Callable[[Any, list], Awaitable[Any]]) -> None:
        self._run = run

    async def run_rollout(self, row, client, model, sampling):
        asked = [{"role": "user", "content": "2+2"}]
        assert row == {"example_id": 5, "prompt": asked, "answer": "4", "info": {}}

        async def ask(messages, tools=None, **sampling):
            response = await client.get_response(
                prompt=messages, model=model, sampling_args=sampling, tools=tools
            )
            return response.message

        said = await self._run(ask, asked)
        return {"error": None, "reward": 1.0, "metrics": {"said": len(said or ())}}


@pytest.fixture
def stub(monkeypatch):
    """The names of the package's that are used."""
    held = {
        "clients": SimpleNamespace(Client=object),
        "types": SimpleNamespace(Response=lambda **said: SimpleNamespace(**said)),
        "errors": SimpleNamespace(OverlongPromptError=OverflowError),
    }
    for name, module in held.items():
        monkeypatch.setitem(sys.modules, f"verifiers.{name}", module)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace(**held))  # type: ignore[arg-type]


def user(text: Any) -> dict:
    return {"role": "user", "content": text}


def test_questions_are_turns_and_texts_in_parts_are_one_text(stub):
    async def run(ask, said):
        for more in (user([{"type": "text", "text": "go"}, {"type": "text", "text": " on"}]), user("and on")):
            said = [*said, {"role": "assistant", **await ask(said)}, more]
        return [*said, await ask(said)]

    episode = VerifiersEpisode(Environment(run))
    assert episode.reset(PROMPT) == ""
    assert episode.step("one") == Step([user("go on")])
    assert episode.step("two") == Step([user("and on")])
    assert episode.step("three") == Step(reward=1.0, done=True, parts={"said": 6.0})


@pytest.mark.parametrize(
    ("named", "what"),
    [
        ({"temperature": 0.3}, r"asks with sampling \{'temperature': 0.3\}"),
        (
            {"tools": Environment.tool_defs},
            "and the tools add, expected sampling as the config says and none",
        ),
    ],
)
def test_a_question_for_what_no_turn_has_is_refused(stub, named, what):
    episode = VerifiersEpisode(Environment(lambda ask, said: ask(said, **named)))
    with pytest.raises(EpisodeError, match=what):
        episode.reset(PROMPT)
    closed(episode)


@pytest.mark.parametrize("further", ["something else", [{"type": "image_url"}]])
def test_a_conversation_that_is_made_anew_or_shows_pictures_is_refused(stub, further):
    async def run(ask, said):
        await ask(said)
        await ask([user(further)])

    episode = VerifiersEpisode(Environment(run))
    episode.reset(PROMPT)
    with pytest.raises(EpisodeError, match=r"does not go on from .* \(message 0 differs|shows pictures"):
        episode.step("one")
    closed(episode)


def test_an_answer_without_room_is_the_packages_overlong_prompt(stub):
    async def run(ask, said):
        with pytest.raises(OverflowError):
            await ask(said)

    episode = VerifiersEpisode(Environment(run))
    episode.reset(PROMPT)
    assert episode.score_cut() == Step(reward=1.0, done=True, parts={"said": 0.0})


def test_an_episode_that_is_let_go_is_cancelled_and_one_that_blocks_holds_up_no_later_one(stub, monkeypatch):
    monkeypatch.setattr(verifiers_episode, "_IS_HUNG_S", 0.05)
    ends, is_blocked, goes_on = (threading.Event() for _ in range(3))

    async def waits(ask, said):
        try:
            await ask(said)
        finally:
            ends.set()

    async def blocks(ask, said):
        await ask(said)
        is_blocked.set()
        goes_on.wait(60.0)

    waiting, blocking = VerifiersEpisode(Environment(waits)), VerifiersEpisode(Environment(blocks))
    waiting.reset(PROMPT)
    closed(waiting)
    assert ends.wait(20.0)
    blocking.reset(PROMPT)
    stepping = ThreadPoolExecutor(1).submit(blocking.step, "one")
    assert is_blocked.wait(20.0)
    closed(blocking)
    later = VerifiersEpisode(Environment(waits))
    assert later.reset(PROMPT) == "" and later.step("one").done
    goes_on.set()
    with pytest.raises(CancelledError):
        stepping.result()


def test_a_rollout_that_fails_or_asks_nothing_is_no_episode(stub):
    async def run(ask, said):
        raise KeyError("no such row")

    async def asks_nothing(ask, said): ...

    with pytest.raises(KeyError, match="no such row"):
        VerifiersEpisode(Environment(run)).reset(PROMPT)
    with pytest.raises(EpisodeError, match="ended before its first question"):
        VerifiersEpisode(Environment(asks_nothing)).reset(PROMPT)


def test_prompts_without_turns_or_columns_are_refused():
    episode = VerifiersEpisode(Environment(lambda ask, said: ask(said)))
    episode.require_prompt(PROMPT)
    with pytest.raises(DataError, match="expected a conversation"):
        episode.require_prompt(Prompt(prompt_id=0, token_ids=np.arange(2), fields={"info": 1}))
    with pytest.raises(DataError, match=r"set data\.reward_fields: \[info\]"):
        episode.require_prompt(Prompt(prompt_id=0, token_ids=np.arange(2), messages=(("user", "x"),)))


def test_what_is_no_such_environment_is_refused_in_one_line(stub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("no_env.py").write_text(
        "def load_environment(size=1):\n"
        "    return size / 0 if size == 2 else type('E', (), {'requires_group_rollouts': size == 3})()\n"
    )
    with pytest.raises(ConfigError, match="cannot import not_there"):
        load("verifiers:not-there", "{}", "data.path")
    with pytest.raises(ConfigError, match=r'with \{"size": 2\} raised ZeroDivisionError'):
        table("verifiers:no_env.py?size=2", "train", "data.path")
    for options, what in (({"size": 3}, "scores groups"), ({}, "expected no environment.max_turn_tokens")):
        config = EnvironmentConfig(kind="verifiers:no_env.py", options=options, max_turn_tokens=4)
        with pytest.raises(ConfigError, match=what):
            environment_maker(config)


def test_a_release_without_environments_is_told_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"expected the package verifiers .*; pip install 'verifiers<0.4'"):
        load("verifiers:wordle", "{}", "environment.kind")


def test_tools_are_shown_as_schemas_and_a_split_is_one_of_two(monkeypatch):
    function = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
    assert schemas(Environment.tool_defs) == ({"type": "function", "function": function},)
    found = SimpleNamespace(get_dataset=None, get_eval_dataset=None)
    monkeypatch.setattr("rlhfspec.learning.data.verifiers_package.load", lambda *_, **__: found)
    with pytest.raises(ConfigError, match=r"data\.split dev: verifiers:x has train and test"):
        table("verifiers:x", "dev", "data.path")
