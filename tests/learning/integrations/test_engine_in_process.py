"""`rlhfspec.Engine` answers in this process with the tokens that the server gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from byte_chat import save_byte_pair

import rlhfspec
from rlhfspec.cluster.serving.engine_requests import RequestReader
from rlhfspec.cluster.serving.request_bodies import CompletionBody
from rlhfspec.core.errors import ConfigError, ModelError
from rlhfspec.core.surfaces.surface import note_once
from rlhfspec.engine.weights.loading import load_causal_lm, load_tokenizer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_byte_pair(folder)
    return folder


@pytest.fixture(scope="module")
def engine(pair: Path) -> rlhfspec.Engine:
    return rlhfspec.Engine(pair / "target", {"engine.probe": False})


def test_responses_are_a_function_of_seed_and_prompt_whoever_drafts(
    pair: Path, engine: rlhfspec.Engine
) -> None:
    drafting = rlhfspec.Engine(pair / "target", {"models.draft": str(pair / "draft"), "engine.probe": False})
    prompts = ["one", [{"role": "user", "content": "two"}], "one", [5, 6, 7]]
    found = engine.generate(prompts, n=2, max_tokens=12)
    assert [len(one) for one in found] == [2] * 4
    assert drafting.generate(prompts, n=2, max_tokens=12) == found
    # equal prompts have samples of their own, and those of one prompt alone
    assert found[0] + found[2] == engine.generate("one", n=4, max_tokens=12)[0] and found[0] != found[2]
    assert engine.generate("one", n=2, max_tokens=12, seed=1)[0] != found[0]
    reader = RequestReader(
        load_tokenizer(str(pair / "target")), model=str(pair / "target"), served_name="", max_total_tokens=512
    )
    asked = reader.read(CompletionBody(prompt="one", n=2, seed=0, max_tokens=12))
    assert [one.token_ids.tolist() for one in engine._engine.generate(asked.requests)] == [
        one.token_ids for one in found[0]
    ]


def test_log_probabilities_are_the_model_s(pair: Path, engine: rlhfspec.Engine) -> None:
    ((one,),) = engine.generate([[5, 6, 7]], max_tokens=8, temperature=0.5)
    model = load_causal_lm(str(pair / "target"), "float32")
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7, *one.token_ids]])).logits[0, 2:-1] / 0.5
    wanted = logits.log_softmax(-1)[torch.arange(len(one.token_ids)), torch.tensor(one.token_ids)]
    np.testing.assert_allclose(one.logprobs, wanted.numpy(), atol=1e-5)
    assert one.finish_reason in ("stop", "length") and isinstance(one.text, str)
    greedy = engine.generate("abc", n=2, max_tokens=6, temperature=0)[0]
    assert greedy[0].token_ids == greedy[1].token_ids
    stop = greedy[0].text[:1]
    assert engine.generate("abc", max_tokens=6, temperature=0, stop=stop)[0][0].text == stop


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"n": 0}, "n: Input should be greater"),
        (
            {"min_tokens": 1},
            r"generate does not read min_tokens \(not known\); it reads n, seed, max_tokens, ",
        ),
        ({"max_new_tokens": 1}, r"generate does not read max_new_tokens \(here max_tokens\)"),
        ({"temperature": -1.0}, "temperature"),
        ({"max_tokens": 1000}, "do not fit 512 tokens of context"),
    ],
)
def test_what_a_request_would_be_refused_for_is_refused(
    engine: rlhfspec.Engine, given: dict, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        engine.generate("one", **given)


def test_one_conversation_is_one_prompt_and_a_plain_text_to_a_chat_model_is_told(
    engine: rlhfspec.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    chat = [{"role": "user", "content": "two"}]
    note_once.cache_clear()
    assert engine.generate(chat, max_tokens=4) == engine.generate([chat], max_tokens=4)
    assert engine.generate([5, 6, 7], max_tokens=4) == engine.generate([[5, 6, 7]], max_tokens=4)
    assert not caplog.messages
    engine.generate(["<user>one<end><assistant>"], max_tokens=4)
    assert not caplog.messages
    engine.generate(["one", "two"], max_tokens=4)
    (told,) = caplog.messages
    assert told.startswith("plain prompts go without the chat template that the tokenizer has")


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        rlhfspec.Engine(tmp_path)
