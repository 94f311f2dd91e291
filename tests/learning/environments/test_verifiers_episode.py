"""Environments of the package `verifiers`: its rollouts are played in our turns, its rubric's sum is the reward."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlhfspec.benchmarks.peers.build import library_folder
from rlhfspec.core.errors import ConfigError, DataError, EpisodeError
from rlhfspec.core.named_code import IMPORT_FOLDER
from rlhfspec.core.records import Prompt
from rlhfspec.learning.data.verifiers_package import load, schemas, table
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


def test_a_rollout_that_our_limits_cut_is_scored_as_it_is(played):
    assert played["cut"][-1] == ["", 0.1, True, {"right": 0.0, "tries": 1.0, "num_turns": 1.0}]


def test_what_cannot_be_given_is_refused_and_the_process_s_signals_stay(played):
    assert "rubric scores groups" in played["group"]
    assert "set data.reward_fields: [info]" in played["no info"]
    assert played["signals"]


class Environment:
    """What of the package's is asked of one, without the package."""

    tool_defs = (SimpleNamespace(name="add", description="adds", parameters={"type": "object"}, strict=None),)
    rubric, requires_group_rollouts, eval_dataset = object(), False, None
    dataset = SimpleNamespace(column_names=["prompt", "answer", "info"])

    def __init__(self, error: str = "") -> None:
        self._error = error

    async def run_rollout(self, row, client, model, sampling):
        assert row == {
            "example_id": 5,
            "prompt": [{"role": "user", "content": "2+2"}],
            "answer": "4",
            "info": {},
        }
        return {"error": self._error, "reward": 1.0, "metrics": None}


def test_a_rollout_that_fails_or_asks_nothing_is_no_episode(monkeypatch):
    types = SimpleNamespace(ClientConfig=lambda **given: given)
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace(types=types))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "verifiers.types", types)  # type: ignore[arg-type]
    for error, what in (
        ("SandboxError()", r"rollout failed: SandboxError\(\)"),
        ("", "ended before its first question"),
    ):
        with pytest.raises(EpisodeError, match=what):
            VerifiersEpisode(Environment(error)).reset(PROMPT)


def test_prompts_without_turns_or_columns_are_refused():
    episode = VerifiersEpisode(Environment())
    episode.require_prompt(PROMPT)
    with pytest.raises(DataError, match="expected a conversation"):
        episode.require_prompt(Prompt(prompt_id=0, token_ids=np.arange(2), fields={"info": 1}))
    with pytest.raises(DataError, match=r"set data\.reward_fields: \[info\]"):
        episode.require_prompt(Prompt(prompt_id=0, token_ids=np.arange(2), messages=(("user", "x"),)))


def test_what_is_no_such_environment_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("no_env.py").write_text(
        "def load_environment(size=1):\n    return size / 0 if size == 2 else object()\n"
    )
    with pytest.raises(ConfigError, match=r"a taskset of verifiers.v1 is none|cannot import"):
        load("not-there", key="data.path")
    with pytest.raises(ConfigError, match=r'with \{"size": 2\} raised ZeroDivisionError'):
        load("no_env.py?size=2", key="data.path")
    with pytest.raises(ConfigError, match=r"expected an Environment of verifiers .*, got object"):
        load("no_env.py", key="data.path")


def test_tools_are_shown_as_its_client_sends_them(monkeypatch):
    function = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
    assert schemas(Environment()) == [{"type": "function", "function": function}]
    found = SimpleNamespace(get_dataset=None, get_eval_dataset=None)
    monkeypatch.setattr("rlhfspec.learning.data.verifiers_package.load", lambda *_, **__: found)
    with pytest.raises(ConfigError, match=r"data\.split dev: verifiers:x has train and test"):
        table("verifiers:x", "dev", "data.path")
