"""Tools: schemas of functions, results in the calls' order, faults as observations, the template's tool turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhfspec.core.config import DataConfig, EnvironmentConfig
from rlhfspec.core.errors import ConfigError, DataError
from rlhfspec.core.records import Prompt
from rlhfspec.learning.data.chat.chat_format import render_chat
from rlhfspec.learning.data.chat.messages import num_shared
from rlhfspec.learning.data.prompts import load_prompts
from rlhfspec.learning.environments.environment_protocol import Step, environment_maker
from rlhfspec.learning.environments.observations import ObservationRenderer
from rlhfspec.learning.environments.tools import call_parser, require_tools, tool_functions, tool_schemas

PEER = Path.home() / ".cache/rlhfspec/peers/trl-1.16.0/trl/chat_templates"
TEMPLATE = (
    "{% if tools %}<|im_start|>tools{{ tools|tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<r>{{ m.content }}</r>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments}|tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SETTINGS = EnvironmentConfig(kind="tools", tools="sample_tools", timeout_s=0.5)


def byte_tokenizer(template: str, end: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={one: index for index, one in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, bos_token="<bos>")
    tokenizer.chat_template = template
    return tokenizer


def play(*responses: str, settings: EnvironmentConfig = SETTINGS) -> list[Step]:
    parser = call_parser(settings, DataConfig(task="chain"), byte_tokenizer(TEMPLATE))
    environment = environment_maker(settings, parser)()
    tools = tuple(tool_schemas(settings))
    environment.reset(Prompt(prompt_id=0, token_ids=np.arange(2), text="q", tools=tools))
    return [environment.step(one) for one in responses]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def contents(step: Step) -> list[str]:
    return [one["content"] for one in step.observation]  # type: ignore[index]


def test_results_come_in_the_order_of_the_calls_and_a_turn_without_one_is_the_last() -> None:
    both = call("add", a=2) + call("wait", unit="s", also=[1])
    first, last = play(f"let me see {both}", "it is 3")
    assert first.observation == [
        {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "3"},
        {
            "role": "tool",
            "name": "wait",
            "tool_call_id": "call00001",
            "content": '{"unit": "s", "also": [1]}',
        },
    ]
    assert first.counts == {"tool_calls": 2.0, "tool_calls_unparsed": 0.0, "tool_calls_failed": 0.0}
    assert (first.done, last.done, last.observation) == (False, True, "")
    assert set(last.counts.values()) == {0.0}


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (call("sub", a=2), "Error: there is no tool sub; expected one of add, wait, hang, leave"),
        (call("_private", a=2), "Error: there is no tool _private; expected one of add, wait, hang, leave"),
        (call("add"), "Error: add: missing a required argument: 'a'"),
        (call("add", a=1, c=2), "Error: add: got an unexpected keyword argument 'c'"),
        (call("add", a="x"), 'Error: add: a: expected "integer", got "x"'),
        (call("add", a=True), 'Error: add: a: expected "integer", got true'),
        (call("add", a=1.5), 'Error: add: a: expected "integer", got 1.5'),
        (call("wait", unit="h"), 'Error: wait: unit: expected ["s", "ms"], got "h"'),
        (call("wait", unit="s", also=["x"]), 'Error: wait: also: expected "array", got ["x"]'),
        (call("wait", unit="s", also=None), '{"unit": "s", "also": null}'),
        (call("leave"), "Error: SystemExit: bye and more"),
        (call("hang", text="x"), "Error: hang gave no answer in 0.5 s"),
    ],
)
def test_what_goes_wrong_is_an_observation(said: str, answer: str) -> None:
    (step,) = play(said)
    assert contents(step) == [answer]
    assert not step.done
    assert step.counts["tool_calls_failed"] == answer.startswith("Error")


def test_a_call_that_does_not_parse_is_answered_in_its_place() -> None:
    (step,) = play("<tool_call>{broken</tool_call>" + call("add", a=2) + "<tool_call>{")
    wrong = "Error: the call does not parse"
    assert [one[:30] for one in contents(step)] == [wrong, "3", wrong]
    assert step.counts == {"tool_calls": 3.0, "tool_calls_unparsed": 2.0, "tool_calls_failed": 0.0}


def test_behind_one_that_hangs_the_others_of_a_turn_are_not_called() -> None:
    (step,) = play(call("hang", text="x") + call("hang", text="y"))
    assert contents(step) == [
        "Error: hang gave no answer in 0.5 s",
        "Error: hang was not called: the calls before took all of 0.5 s",
    ]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("no_such_tools", "environment.tools no_such_tools:__dict__: cannot import"),
        (
            "sample_tools:sub",
            "expected a function sub in sample_tools, got None; it has add, wait, hang, leave",
        ),
        (["sample_tools:add", "sample_tools"], "environment.tools names add twice"),
        (
            "sample_tools:_private",
            "environment.tools _private: .*no docstring!; give every argument a type hint",
        ),
    ],
)
def test_tools_that_are_none_are_refused(tools: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tool_schemas(EnvironmentConfig(kind="tools", tools=tools))


def test_a_file_and_names_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_tools.py").write_text(
        "import os, functools\n@functools.cache\ndef one(): pass\ndef two(): pass\ndef _three(): pass\n"
    )
    for given, expected in (("own_tools.py", ["one", "two"]), ("own_tools.py: two,one", ["two", "one"])):
        found = tool_functions(EnvironmentConfig(kind="tools", tools=given))
        assert list(found) == expected
    assert tool_functions(EnvironmentConfig()) == {}


@pytest.mark.parametrize(
    "settings",
    [{"kind": "tools"}, {"tools": "x.py"}, {"kind": "tools", "tools": "x.py", "options": {"a": 1}}],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"environment\.(kind|options)"):
        EnvironmentConfig(**settings)


def test_prompts_are_told_of_the_tools_behind_their_own(tmp_path: Path) -> None:
    tokenizer, tools = byte_tokenizer(TEMPLATE), tool_schemas(SETTINGS)
    own = {"type": "function", "function": {"name": "mine", "parameters": {}}}
    file = tmp_path / "rows.jsonl"

    def load(chat: bool, *rows: dict[str, Any]) -> Any:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = DataConfig(path=str(file), chat=chat, max_prompt_tokens=5000)
        return load_prompts(data, tokenizer, seed=0, tools=tools).prompts

    messages = [{"role": "user", "content": "q"}]
    (prompt,) = load(False, {"messages": messages, "answer": "", "tools": [own]})
    assert [one["function"]["name"] for one in prompt.tools] == ["mine", "add", "wait", "hang", "leave"]
    assert '"name": "hang"' in tokenizer.decode(prompt.token_ids)
    (chat,) = load(True, {"question": "q", "answer": ""})
    assert len(chat.tools) == 4
    with pytest.raises(DataError, match=r"environment\.tools needs a conversation.*data\.chat"):
        load(False, {"question": "q", "answer": ""})
    twice = {**own, "function": {**own["function"], "name": "add"}}
    with pytest.raises(DataError, match=r"environment\.tools both have add"):
        load(False, {"messages": messages, "answer": "", "tools": [twice]})


@pytest.mark.parametrize(
    "template", [TEMPLATE, TEMPLATE.replace("{{ {'name'", "{{ '' + c.function.arguments }}{{ {'name'")]
)
def test_how_a_template_takes_arguments_is_found_out_once(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, renders = byte_tokenizer(template), list[int]()
    render = tokenizer.apply_chat_template
    monkeypatch.setattr(
        tokenizer, "apply_chat_template", lambda *args, **more: renders.append(1) or render(*args, **more)
    )
    renderer, prompt = (
        ObservationRenderer(tokenizer, max_tokens=64),
        Prompt(prompt_id=0, token_ids=np.arange(2), text="q", messages=(("user", "q"),)),
    )
    shown = []
    for _ in range(2):
        renders.clear()
        answer = [{"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "3"}]
        shown.append(renderer.give(answer, prompt=prompt, last_token=0).token_ids.tolist())
    assert renders == [1] and shown[0] == shown[1]


def test_results_follow_what_was_sampled_as_the_template_has_them() -> None:
    tokenizer = byte_tokenizer(TEMPLATE)
    renderer = ObservationRenderer(tokenizer, max_tokens=4)
    results = [
        {"role": "tool", "name": "add", "tool_call_id": f"call0000{number}", "content": text}
        for number, text in enumerate(("3", "too long"))
    ]
    prompt = Prompt(
        prompt_id=0, token_ids=np.arange(2), messages=(("user", "q"),), tools=tool_schemas(SETTINGS)
    )
    rest = "\n<|im_start|>user<r>3</r><r>too </r><|im_end|>\n<|im_start|>assistant\n"
    for last, expected in ((tokenizer.eos_token_id, rest), (5, f"<|im_end|>{rest}")):
        given = renderer.give(results, prompt=prompt, last_token=int(last))  # type: ignore[arg-type]
        assert tokenizer.decode(given.token_ids) == expected
        assert given.messages == (("tool", "3"), ("tool", "too "))


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE.replace("<r>{{ m.content }}</r>", ""),
        TEMPLATE.replace("{% if tools %}", "{% if false %}"),
        TEMPLATE.replace("m.tool_calls or []", "[]"),
        TEMPLATE.replace("{% if m.role == 'tool' %}", "{% if m.role == 'tool' %}{{ raise_exception('no') }}"),
    ],
)
def test_a_template_that_cannot_show_tools_is_refused_before_the_run(template: str) -> None:
    data = DataConfig(task="chain")
    require_tools(SETTINGS, data, byte_tokenizer(TEMPLATE))
    require_tools(EnvironmentConfig(), data, byte_tokenizer(template))
    with pytest.raises(
        ConfigError, match=r"environment.kind tools: the chat template cannot show tools: .*; name one"
    ):
        require_tools(SETTINGS, data, byte_tokenizer(template))


ENDS = {
    **dict.fromkeys(("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_6"), "<|im_end|>"),
    **dict.fromkeys(("llama3_1", "llama3_2"), "<|eot_id|>"),
    "glm4moe": "<|observation|>",
    "gptoss": "<|call|>",
    "gemma4": "<turn|>",
    "nemotron_3_nano": "<|im_end|>",
}
"Templates of TRL's folder that show tools, and what ends a turn."
ONE_CALL = ("llama3_1", "llama3_2", "gptoss")


@pytest.mark.skipif(not PEER.is_dir(), reason="TRL's chat templates are not here")
@pytest.mark.parametrize("name", ENDS)
def test_what_the_models_own_templates_write_is_read_again(name: str) -> None:
    tokenizer = byte_tokenizer((PEER / f"{name}.jinja").read_text(), ENDS[name])
    tools, data = tool_schemas(SETTINGS), DataConfig(task="chain")
    require_tools(SETTINGS, data, tokenizer)
    parser = call_parser(SETTINGS, data, tokenizer)
    assert parser is not None
    calls = [("add", {"a": 3, "b": -4}), ("wait", {"unit": "s", "also": [1, 2]})]
    for some in ([calls[0]], [calls[1]], calls)[: 2 if name in ONE_CALL else 3]:
        asked = [{"role": "user", "content": "q"}]
        said = [
            {"type": "function", "id": "123456789", "function": {"name": one, "arguments": arguments}}
            for one, arguments in some
        ]
        before = render_chat(tokenizer, asked, ask=True, tools=tools)
        turns = [*asked, {"role": "assistant", "content": "", "tool_calls": said}]
        whole = render_chat(tokenizer, turns, ask=False, tools=tools)
        turn = parser.parse(whole[num_shared(before, whole) :], prompt=before, tools=tools)
        assert [(one.name, one.arguments) for one in turn.calls] == some
        assert (turn.content, turn.unparsed) == ("", ())


def test_of_a_class_each_episode_has_an_instance_that_keeps_what_was_done(tmp_path: Path) -> None:
    file = tmp_path / "shops.py"
    file.write_text(
        "class Shop:\n"
        "    def reset(self, name, **more):\n        self.bought = [name]\n        return f'{name} sells'\n"
        "    def buy(self, what: str) -> str:\n"
        '        """Buy.\n\n        Args:\n            what: is bought\n        """\n'
        "        self.bought.append(what)\n        return ','.join(self.bought)\n"
        "    def _hidden(self):\n        pass\n"
    )
    settings = EnvironmentConfig(kind="tools", tools=f"{file}:Shop")
    assert [one["function"]["name"] for one in tool_schemas(settings)] == ["buy"]
    make = environment_maker(
        settings, call_parser(settings, DataConfig(task="chain"), byte_tokenizer(TEMPLATE))
    )
    for name in ("Ada", "Bo"):
        environment = make()
        assert getattr(environment, "replays") is True  # noqa: B009
        prompt = Prompt(prompt_id=0, token_ids=np.arange(2), text="q", fields={"name": name, "other": 1})
        assert environment.reset(prompt) == f"{name} sells"
        assert contents(environment.step(call("buy", what="tea"))) == [f"{name},tea"]
        assert contents(environment.step(call("buy", what="jam"))) == [f"{name},tea,jam"]


def test_a_class_without_tools_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text("class Bare:\n    def reset(self):\n        pass\n")
    with pytest.raises(ConfigError, match="expected public methods in Bare, got none"):
        tool_functions(EnvironmentConfig(kind="tools", tools=f"{tmp_path}/bare.py:Bare"))


def test_a_name_of_half_a_character_is_told_as_text() -> None:
    (step,) = play('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>')
    assert all(one.encode() for one in contents(step))
    assert step.counts["tool_calls_unparsed"] == 1.0
