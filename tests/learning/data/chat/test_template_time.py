"""Chat templates: they write what conversation and run say, whatever clock, zone and chance do."""

from __future__ import annotations

import re
import time
from datetime import datetime

import pytest
from moved_clock import move_clock
from word_chat import MARKED, word_chat

from rlhfspec.core.config import DataConfig
from rlhfspec.core.errors import DataError
from rlhfspec.core.records import Prompt
from rlhfspec.learning.data.chat.chat_format import render_chat
from rlhfspec.learning.data.chat.chat_masks import conversation_tokens
from rlhfspec.learning.data.chat.template_time import keep_time
from rlhfspec.learning.data.prompt_rows import Row
from rlhfspec.learning.data.prompt_tokens import PromptEncoder
from rlhfspec.learning.environments.observations import ObservationRenderer
from rlhfspec.learning.rewards.reward_model import ModelText
from rlhfspec.learning.rewards.score_request import score_requests
from tests.test_layers import LAYERS, ROOT

BEGAN = "2026-01-31T23:59:50+01:00"
DATED = "{{ strftime_now('%A %d %B %Y') }} | " + MARKED
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "fine"}]


def test_one_module_renders_all_templates() -> None:
    asking = re.compile(r"\.apply_chat_template\(|import render_jinja_template")
    found = [
        str(path.relative_to(ROOT))
        for layer in LAYERS
        for path in sorted((ROOT / layer).rglob("*.py"))
        if asking.search(path.read_text())
    ]
    # TRL renders the prompts of its own trainer
    assert found == ["learning/data/chat/chat_format.py", "integrations/trl.py"]


def test_a_kept_time_is_told_on_every_day(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = keep_time(word_chat(DATED), BEGAN)
    first = render_chat(tokenizer, TURNS, ask=False)
    assert first.startswith("Saturday 31 January 2026 | ")
    move_clock(monkeypatch, days=40)
    assert render_chat(tokenizer, TURNS, ask=False) == first
    given = render_chat(tokenizer, TURNS, ask=False, at=datetime(2020, 2, 3))
    assert given.startswith("Monday 03 February 2020"), "a request's own time goes before the tokenizer's"
    assert not render_chat(word_chat(DATED), TURNS, ask=False).startswith("Saturday 31 January 2026")


@pytest.mark.parametrize("form", ["%c", "%x %X", "%-d.%-m.%y", "%j %U %w", "%H%%", "%d/%h", "%Z%z|"])
def test_a_kept_time_is_written_as_transformers_writes_it(form: str) -> None:
    tokenizer = keep_time(word_chat("{{ strftime_now('" + form + "') }}"), BEGAN)
    moment = datetime.fromisoformat(BEGAN).replace(tzinfo=None)
    assert render_chat(tokenizer, TURNS, ask=False) == moment.strftime(form)


def test_the_zone_of_the_process_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = keep_time(word_chat("{{ strftime_now('%A %B %p %c %s') }}"), BEGAN)
    first = render_chat(tokenizer, TURNS, ask=False)
    assert first == "Saturday January PM Sat Jan 31 23:59:50 2026 1769900390"
    try:
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("TZ", "Asia/Tokyo")
            time.tzset()
            assert render_chat(tokenizer, TURNS, ask=False) == first
    finally:
        time.tzset()


@pytest.mark.parametrize("template", ["{{ ['a', 'b'] | random }}", "{% set x = lipsum(1) %}{{ x }}"])
def test_a_template_that_draws_at_random_is_refused(template: str) -> None:
    with pytest.raises(DataError, match="draws at random"):
        render_chat(word_chat(MARKED + template), TURNS, ask=False)


def test_a_template_that_speaks_of_random_is_not_refused() -> None:
    tokenizer = word_chat("a random | random word, lipsum() too: {{ messages[0].content }}")
    assert render_chat(tokenizer, TURNS, ask=True).endswith("too: hi")


def test_prompts_rows_observations_and_rewards_are_told_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def everything() -> list[object]:
        tokenizer = keep_time(word_chat("{{ strftime_now('%M') | int * ' you' }}" + MARKED), BEGAN)
        row = Row(prompt="hi", reference="", origin="x:1", index=0)
        rendered = PromptEncoder(DataConfig(path="x", chat=True), tokenizer).render(row)
        prompt = Prompt(prompt_id=0, token_ids=[], text="hi", reference="", messages=rendered.messages)  # type: ignore[arg-type]
        observations = ObservationRenderer(tokenizer, max_tokens=64, chat_template=DATED)
        (request,) = score_requests([prompt], ["fine"], None, datetime.fromisoformat(BEGAN))
        return [
            rendered.text,
            conversation_tokens(tokenizer, TURNS, origin="x:1")[0].tolist(),
            observations.with_text(prompt, " there").token_ids.tolist(),
            ModelText(word_chat("{{ strftime_now('%M') | int * ' you' }}" + MARKED), None).token_ids(request),
        ]

    first = everything()
    assert str(first[0]).count("you") == 59
    move_clock(monkeypatch, days=1, minutes=7)
    assert everything() == first
