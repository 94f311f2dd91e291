"""Stop strings end a response behind the first token that completes one, whatever is drafted, batched or cut."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
import tiny_pool
from tokenizers import Tokenizer, decoders, models

from rlhfspec.core.errors import ConfigError
from rlhfspec.core.records import Completion, FinishReason, SampleKey, SampleRequest
from rlhfspec.engine.decoding.stop_strings import StopStrings
from tests.engine.test_cut import play

STOP = ("ab", "€", "f\n")
LETTERS = [*"abcdefgh"]
BYTE_LEVEL = [*LETTERS, "âĤ", "¬", "Ĥ¬", "â", "Ċ", "Ġa", "fĊf", "cabc", "Ġ", "ba", "<s>"]
"GPT-2's letters for bytes: â Ĥ ¬ are those of €."
META = [*LETTERS, "<0xE2>", "<0x82>", "<0xAC>", "\n", "▁", "▁a", "▁b", "f\nf", "cabc", "€h", "<s>"]


def tokenizer(words: list[str], decoder: decoders.Decoder) -> Tokenizer:
    """One of VOCAB_SIZE ids; those beyond the words are letters that no stop string has."""
    names = [*words, *(chr(0x4E00 + i) for i in range(tiny_pool.VOCAB_SIZE - len(words)))]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[-1]))
    made.decoder = decoder
    made.add_special_tokens(["<s>"])
    return made


def sentencepiece() -> Tokenizer:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return tokenizer(META, decoders.Sequence(parts))


TOKENIZERS = {
    "byte level": lambda: tokenizer(BYTE_LEVEL, decoders.ByteLevel()),
    "metaspace": lambda: tokenizer(META, decoders.Metaspace()),
    "sentencepiece": sentencepiece,
}


def end_by_whole_text(made: Tokenizer, ids: list[int], stop: tuple[str, ...], hides: bool) -> int | None:
    """How many tokens there are when the whole text has a stop string for the first time, or what is shown of it."""
    for count in range(1, len(ids) + 1):
        texts = [made.decode(ids[:count], skip_special_tokens=skips) for skips in {False, hides}]
        if any(one in text for one in stop for text in texts):
            return count
    return None


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("stop", [STOP, ("a",), (" a",), ("bca",), (" ",), ("never that",)])
@pytest.mark.parametrize("hides", [False, True])
def test_the_first_end_is_that_of_the_whole_text_however_the_tokens_come(name, stop, hides):
    made, chance = TOKENIZERS[name](), random.Random(len(name))
    # as an instance gets them
    found = pickle.loads(pickle.dumps(StopStrings(made, tiny_pool.VOCAB_SIZE, hides_special=hides)))
    num_ended = 0
    for _ in range(60):
        ids = np.array([chance.randrange(21) for _ in range(40)])
        expected = end_by_whole_text(made, ids.tolist(), stop, hides)
        num_ended += expected is not None
        at = 0
        while at < len(ids):
            step = chance.randint(1, 6)
            end = found.first_end(ids[:at], ids[at : at + step], stop)
            if end is not None:
                assert at + end + 1 == expected
                break
            at += step
        else:
            assert expected is None
    assert (num_ended > 0) == (stop != ("never that",))


def stopping(requests: list[SampleRequest], stop: tuple[str, ...]) -> list[SampleRequest]:
    return [replace(one, sampling=replace(one.sampling, stop=stop)) for one in requests]


def expected_of(made: Tokenizer, requests: list[SampleRequest]) -> dict[SampleKey, tuple[object, ...]]:
    """Plain decoding without stop strings, cut afterwards."""
    out = {}
    for key, whole in tiny_pool.reference(requests).items():
        count = end_by_whole_text(made, whole.token_ids.tolist(), STOP, hides=False)
        reason = whole.finish_reason if count is None else FinishReason.STOP
        count = whole.num_tokens if count is None else count
        out[key] = (
            reason,
            whole.token_ids[:count].tolist(),
            whole.policy_logprobs[:count].tobytes(),
            whole.sampling_logprobs[:count].tobytes(),
        )
    return out


def shown(one: Completion) -> tuple[object, ...]:
    logprobs = one.policy_logprobs.tobytes(), one.sampling_logprobs.tobytes()
    return (one.finish_reason, one.token_ids.tolist(), *logprobs)


@pytest.mark.parametrize("plan", ["off", "tree8", "chain4", "suffix"])
def test_a_response_ends_where_plain_decoding_completes_a_stop_string(plan):
    made, requests = TOKENIZERS["byte level"](), tiny_pool.requests(12, group_size=2)
    expected = expected_of(made, requests)
    engine = tiny_pool.engine(plan, slots=5)
    engine.stop_strings = StopStrings(made, tiny_pool.VOCAB_SIZE)
    done = engine.generate(stopping(requests, STOP))
    assert {one.key: shown(one) for one in done} == expected
    assert sum(reason is FinishReason.STOP for reason, *_ in expected.values()) >= 4
    if plan in ("tree8", "chain4"):
        # the end of some came before a step's last token
        assert any(one.num_tokens < one.num_decode_steps + one.num_accepted_tokens for one in done)


@pytest.mark.parametrize("plan", ["off", "tree8"])
def test_a_response_that_was_cut_within_a_stop_string_ends_where_it_is_complete(plan):
    made, requests = TOKENIZERS["byte level"](), tiny_pool.requests(12, group_size=2)
    engine = tiny_pool.engine(plan, slots=3)
    engine.stop_strings = StopStrings(made, tiny_pool.VOCAB_SIZE)
    done = play(engine, stopping(requests, STOP), random.Random(3), keeps=True)
    assert {key: shown(one) for key, one in done.items()} == expected_of(made, requests)


def test_stop_strings_without_texts_are_refused():
    (request,) = stopping(tiny_pool.requests(1), STOP)
    with pytest.raises(ConfigError, match="engine knows no texts"):
        tiny_pool.engine("off").submit(request)
