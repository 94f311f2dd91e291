"""Several sources: what an epoch is, in any weights, and after any interruption."""

import json
from collections import Counter

import numpy as np
from data_rows import write_rows
from pytest import fixture, mark, raises

from rlhfspec.core.config import DataConfig
from rlhfspec.core.errors import DataError
from rlhfspec.core.records import SamplingParams
from rlhfspec.learning.data.cursor import PromptCursor
from rlhfspec.learning.data.prompts import EpochOrder, load_prompts, repeats_of
from rlhfspec.learning.models.tokenization import train_bpe


@fixture(scope="module")
def tokenizer():
    return train_bpe(["Tom has 12 apples."], vocab_size=300)


def write(path, prompts):
    return write_rows(path, [{"question": text, "answer": ""} for text in prompts])


def drawn(cursor, count):
    return [
        (r.prompt.prompt_id, r.key.sample_index) for r in cursor.next_requests(count, 1, SamplingParams())
    ]


@mark.parametrize("shuffle", [True, False])
@mark.parametrize("stop_at", [1, 13, 20, 39, 47])
def test_two_identical_sources_give_each_prompt_once_an_epoch_and_after_a_resume(
    tmp_path, tokenizer, shuffle, stop_at
):
    path = write(tmp_path / "a.jsonl", [f"{n}?" for n in range(10)])
    data = DataConfig(sources=({"path": path}, {"path": path}), shuffle=shuffle)
    whole = PromptCursor(load_prompts(data, tokenizer, seed=0), run_seed=3, shuffle=shuffle)
    expected = drawn(whole, 80)
    assert len(whole.dataset) == 20

    first = PromptCursor(load_prompts(data, tokenizer, seed=0), run_seed=3, shuffle=shuffle)
    before = drawn(first, stop_at)
    state = json.loads(json.dumps(first.state()))
    second = PromptCursor(load_prompts(data, tokenizer, seed=0), run_seed=3, shuffle=shuffle)
    second.restore(state)
    got = before + drawn(second, 80 - stop_at)
    assert got == expected
    for epoch in range(4):
        ids = [prompt_id for prompt_id, _ in got[20 * epoch : 20 * (epoch + 1)]]
        assert sorted(ids) == list(range(20))
        texts = Counter(whole.dataset.prompts[number].text for number in ids)
        assert set(texts.values()) == {2} and len(texts) == 10
    assert [index for _, index in got] == list(range(80))


@mark.parametrize(
    ("stop_at", "weight", "ahead"), [(4, 1.0, 17), (20, 1.0, 1), (24, 1.0, 17), (1, 2.0, 1), (15, 1.0, 6)]
)
def test_a_cursor_knows_whether_its_prompts_come_again(tmp_path, tokenizer, stop_at, weight, ahead):
    data = DataConfig(
        sources=(
            {"path": write(tmp_path / "a.jsonl", [f"{n}?" for n in range(10)]), "weight": weight},
            {"path": write(tmp_path / "b.jsonl", [f"{n}!" for n in range(10)])},
        )
    )
    cursor = PromptCursor(load_prompts(data, tokenizer, seed=0), run_seed=3, shuffle=True)
    drawn(cursor, stop_at)
    assert cursor.comes_again(ahead)
    assert not cursor.comes_again(0)
    if weight == 1.0:
        left_of_epoch = -stop_at % 20
        assert ahead == left_of_epoch + 1 and not cursor.comes_again(left_of_epoch)


def test_duplicates_over_sources_are_left_out(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", ["1?", "2?"])
    other = write(tmp_path / "b.jsonl", ["2?", "3?"])
    data = DataConfig(sources=({"path": path}, {"path": other}, {"path": path}), deduplicate="exact")
    dataset = load_prompts(data, tokenizer, seed=0)
    assert [(p.prompt_id, p.text) for p in dataset.prompts] == [(0, "1?"), (1, "2?"), (3, "3?")]
    assert [source.num_prompts for source in dataset.sources] == [2, 1, 0]
    cursor = PromptCursor(dataset, run_seed=0, shuffle=True)
    assert sorted(number for number, _ in drawn(cursor, 3)) == [0, 1, 3]
    assert dataset.notes()[0] == "prompts left out: 3 duplicates"


@mark.parametrize(
    ("sizes", "weights", "weight_of", "stopping", "expected"),
    [
        ((10, 1000), (1, 1), "prompt", "all_exhausted", (1, 1)),
        ((10, 1000), (5, 5), "prompt", "first_exhausted", (1, 1)),
        ((10, 1000), (3, 1), "prompt", "all_exhausted", (3, 1)),
        ((10, 1000), (4, 1), "prompt", "first_exhausted", (1, 0.25)),
        ((10, 1000), (1, 1), "source", "all_exhausted", (100, 1)),
        ((10, 1000), (1, 1), "source", "first_exhausted", (1, 0.01)),
        ((10, 0, 20), (1, 9, 2), "prompt", "all_exhausted", (1, 0, 2)),
        ((0, 0), (1, 1), "prompt", "all_exhausted", (0, 0)),
    ],
)
def test_repeats_follow_the_weights(sizes, weights, weight_of, stopping, expected):
    got = repeats_of(sizes, [float(one) for one in weights], weight_of=weight_of, stopping=stopping)
    assert np.allclose(got, expected)


def test_an_epoch_beyond_all_memory_is_refused():
    with raises(DataError, match=r"first_exhausted"):
        repeats_of((1000, 1000), (1e6, 1e-3), weight_of="prompt", stopping="all_exhausted")


@mark.parametrize("shuffle", [True, False])
@mark.parametrize("repeats", [(1.0, 1.0), (2.0, 1.0), (1.5, 1.0), (1.0, 0.3), (2.0 / 3.0, 1.0)])
def test_visits_are_even_over_any_number_of_epochs(repeats, shuffle):
    sizes = (7, 12)
    epochs = EpochOrder(sizes, repeats, seed=5, shuffle=shuffle)
    counts = np.zeros(19, dtype=int)
    for epoch in range(30):
        order = epochs.order(epoch)
        counts += np.bincount(order, minlength=19)
        for place, (size, times) in zip(
            (counts[:7], counts[7:]), zip(sizes, repeats, strict=True), strict=True
        ):
            assert abs(place.sum() - (epoch + 1) * times * size) <= 1
            assert place.max() - place.min() <= 1
        assert np.array_equal(order, epochs.order(epoch))
        if repeats == (1.0, 1.0):
            assert sorted(order) == list(range(19))


def test_without_shuffling_sources_are_spread_evenly():
    order = EpochOrder((2, 4), (1.0, 1.0), seed=0, shuffle=False).order(0)
    assert order.tolist() == [2, 0, 3, 4, 1, 5]
    assert EpochOrder((4,), (1.0,), seed=0, shuffle=False).order(3).tolist() == [0, 1, 2, 3]


def test_seeds_and_epochs_order_differently():
    orders = [
        tuple(EpochOrder((20, 20), (1.0, 1.0), seed=seed, shuffle=True).order(epoch))
        for seed in (0, 1, 2**63 - 1)
        for epoch in (0, 1, 2)
    ]
    assert len(set(orders)) == 9


def test_prompts_come_by_a_column_in_every_epoch_each_source_s_by_its_own(tmp_path, tokenizer):
    rows = [{"question": f"{n}?", "answer": "", "level": level} for n, level in enumerate((3, 1.5, 2, 1.5))]
    path, plain = write_rows(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", ["x", "y"])
    data = DataConfig(path=str(path), order_by="level", shuffle=False)
    cursor = PromptCursor(load_prompts(data, tokenizer, seed=0), run_seed=3, shuffle=False)
    assert [prompt_id for prompt_id, _ in drawn(cursor, 8)] == [1, 3, 2, 0] * 2
    both = DataConfig(sources=({"path": str(path), "order_by": "level"}, {"path": str(plain)}), shuffle=False)
    dataset = load_prompts(both, tokenizer, seed=0)
    assert [prompt.prompt_id for prompt in dataset.prompts] == [1, 3, 2, 0, 4, 5]
    with raises(ValueError, match=r"set data\.shuffle to false"):
        DataConfig(path="a", order_by="level")
    write_rows(tmp_path / "a.jsonl", [{"question": "1?", "answer": "", "level": "hard"}])
    with raises(DataError, match=r"field 'level' must be a finite number, got 'hard'; see data\.order_by"):
        load_prompts(data, tokenizer, seed=0)


@mark.parametrize(
    ("change", "named"),
    [
        ({"prompts": ["a", "b", "d"]}, "prompts was"),
        ({"prompts": ["a", "b"]}, "num_prompts was 6, now 4"),
        ({"weight": 2.0}, "sources was 3x1.0 3x1.0, now 3x1.0 3x2.0"),
        ({"shuffle": False}, "shuffle was True, now False"),
    ],
)
def test_another_data_set_is_refused(tmp_path, tokenizer, change, named):
    def cursor(prompts=("a", "b", "c"), weight=1.0, shuffle=True):
        path = write(tmp_path / "a.jsonl", prompts)
        data = DataConfig(sources=({"path": path}, {"path": path, "weight": weight}))
        return PromptCursor(load_prompts(data, tokenizer, seed=0), run_seed=0, shuffle=shuffle)

    state = cursor().state()
    cursor().restore(state)
    with raises(DataError, match=named):
        cursor(**change).restore(state)


@mark.parametrize("change", [{"epoch": -1}, {"position": "x"}, {"next_group_id": None}])
def test_a_state_that_is_none_is_refused(tmp_path, tokenizer, change):
    path = write(tmp_path / "a.jsonl", ["a"])
    cursor = PromptCursor(load_prompts(DataConfig(path=path), tokenizer, seed=0), run_seed=0, shuffle=True)
    with raises(DataError, match="expected numbers from 0"):
        cursor.restore(cursor.state() | change)
    with raises(DataError, match="run_seed was None"):
        cursor.restore({})
