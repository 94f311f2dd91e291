"""Reward functions of others: each parameter is given what its name says, or the function is refused."""

import functools

import numpy as np
import torch
from pytest import mark, raises

from rlhfspec.core.surfaces.surface import surface
from rlhfspec.learning.rewards.call_forms import (
    BAD,
    EXTRAS,
    FOREIGN,
    NONE,
    PARTS,
    PLACES,
    CannotBeCalled,
    call_of,
)

SAMPLE = {
    "prompt": "2+2?",
    "response": "It is 4",
    "reference": "4",
    "messages": [{"role": "user", "content": "2+2?"}],
    "response_turns": [{"role": "assistant", "content": "It is 4"}],
    "prefill": "",
    "finish_reason": "stop",
    "num_tokens": 3,
    "sample_index": 7,
    "prompt_id": 1,
    "token_ids": [5, 6, 1],
    "iteration": 2,
}
TURN = [{"role": "assistant", "content": "It is 4"}]


def seen_by(function, **columns):
    """What the function returned, which is what it was given."""
    return call_of(function)({**columns, **SAMPLE})


def test_names_of_ours_are_bound_by_name_in_any_order():
    assert seen_by(lambda response, reference, prompt: (response, reference, prompt)) == (
        "It is 4",
        "4",
        "2+2?",
    )
    assert seen_by(lambda response: response) == "It is 4"
    assert seen_by(lambda reference, *, response: (reference, response)) == ("4", "It is 4")
    assert seen_by(lambda num_tokens, level: (num_tokens, level), level=3) == (3, 3)
    assert seen_by(lambda level, response, level2=5: (level, response, level2), level=3) == (3, "It is 4", 5)


def test_other_words_are_bound_by_their_place():
    assert seen_by(lambda x, y, z: (x, y, z)) == ("2+2?", "It is 4", "4")
    assert seen_by(lambda question, completion, answer: (question, completion, answer)) == (
        "2+2?",
        "It is 4",
        "4",
    )
    assert seen_by(lambda question, answer, reference: answer) == "It is 4"
    assert seen_by(lambda question, predicted_answer: predicted_answer) == "It is 4"
    assert seen_by(lambda prompt, response, target=None: target) == "4"
    assert seen_by(lambda p, *rest: (p, *rest)) == ("2+2?", "It is 4", "4")
    assert seen_by(lambda prompt, response, threshold=0.5: threshold) == 0.5

    def behind(a, b, c, /, **rest):
        return a, b, c, sorted(rest)

    assert seen_by(behind, level=3) == ("2+2?", "It is 4", "4", sorted([*EXTRAS, "level"]))


def test_all_columns_go_to_a_function_that_takes_them_and_those_of_a_partial_stay():
    assert seen_by(lambda **columns: sorted(columns)) == sorted(SAMPLE)
    assert seen_by(functools.partial(lambda k, prompt, response, reference: (k, response), 0.5)) == (
        0.5,
        "It is 4",
    )
    assert seen_by(functools.partial(lambda response, reference: reference, reference="mine")) == "mine"


def test_a_decorated_function_is_called_by_what_its_wrapper_takes():
    def inner(response, prompt):
        return response, prompt

    @functools.wraps(inner)
    def outer(a, b):
        return inner(a, b)

    assert seen_by(outer) == ("It is 4", "2+2?")


@mark.parametrize(
    ("function", "words"),
    [
        (
            lambda response_text, prompt_text, ref: 1.0,
            "'response_text', response as it seems, in the place of prompt",
        ),
        (
            lambda prompt, reference_text, y: 1.0,
            "'reference_text', reference as it seems, in the place of response",
        ),
        (lambda level, response, reference: 1.0, "'level', which is neither"),
        (lambda prompts, response, reference: 1.0, "'prompts', a list as it seems"),
        (lambda a, b, c, d: 1.0, "'d', which is neither"),
        (lambda prompt, reference: 1.0, "takes nothing of the response"),
        (lambda question, answer: 1.0, "'answer', which may be the response or the reference"),
        (lambda prompt, solution_text, **columns: 1.0, "'solution_text', which may be"),
        (lambda response, *rest: 1.0, "'response' in the place of prompt"),
        (lambda completions, answer: 1.0, "the column 'answer'"),
        (lambda completions, log_metric: 1.0, "only TRL's trainer has"),
        (lambda data_source, solution_str, ground_truth: 1.0, "the column 'data_source'"),
        (
            lambda queries, prompts, labels: queries[0].split("<|im_start|>assistant"),
            "'<|' of a chat template",
        ),
    ],
)
def test_what_nothing_is_there_for_is_refused(function, words):
    with raises(CannotBeCalled) as fault:
        call_of(function).plan((*PLACES, *EXTRAS))
    assert words in str(fault.value) and fault.value.advice


def test_a_function_of_trl_gets_lists_of_one_with_columns_by_name():
    def score(prompts, completions, answer, **kwargs):
        assert (prompts, completions, answer) == ([SAMPLE["messages"]], [TURN], ["four"])
        return [float(kwargs["level"][0])]

    call = call_of(score)
    assert call.answer(call({"answer": "four", "level": 3, **SAMPLE})) == (PARTS, {"value": 3.0})
    names = ["completion_ids", "iteration", "level", "prompts", "token_ids", "trainer_state"]
    assert seen_by(lambda completions, **kwargs: sorted(kwargs), level=3) == names
    assert seen_by(lambda completions, reference: (completions, reference)) == ([TURN], ["4"])
    assert seen_by(lambda completions, log_metric=None: log_metric) is None


def test_token_ids_and_the_iteration_are_there_by_name_as_trl_has_them_too():
    assert seen_by(lambda response, token_ids, iteration: (token_ids, iteration)) == ([5, 6, 1], 2)
    assert seen_by(lambda completions, completion_ids: completion_ids) == [[5, 6, 1]]
    assert seen_by(lambda completions, trainer_state: trainer_state.global_step) == 2
    assert seen_by(lambda completions, **kwargs: kwargs["trainer_state"].global_step) == 2


def test_a_function_of_trl_gets_messages_where_the_prompt_is_a_chat_and_else_text():
    def as_it_comes(prompts, completions: list[str], **kwargs):
        return [(prompts[0], completions[0])]

    class Scorer:
        def __call__(self, completions, **kwargs):
            return [completions[0], kwargs["prompts"][0]]

    plain = {**SAMPLE, "messages": []}
    assert call_of(as_it_comes)(SAMPLE) == [(SAMPLE["messages"], TURN)]
    assert call_of(as_it_comes)(plain) == [("2+2?", "It is 4")]
    assert call_of(Scorer())(SAMPLE) == [TURN, SAMPLE["messages"]]
    assert call_of(functools.partial(Scorer()))(plain) == ["It is 4", "2+2?"]
    assert "(messages where the prompt is a chat" in call_of(Scorer()).describe([])


def test_a_function_of_trl_gets_every_turn_of_an_episode_as_trl_does():
    called, answered, said = (
        {"role": role, "content": role[0]} for role in ("assistant", "tool", "assistant")
    )
    asked = SAMPLE["messages"]
    episode = {**SAMPLE, "messages": [*asked, called, answered], "response_turns": [called, answered, said]}
    given = call_of(lambda prompts, completions: (prompts, completions))(episode)
    assert given == ([asked], [[called, answered, said]])


def test_a_function_of_verl_gets_its_columns_and_its_score_is_the_reward():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        assert (solution_str, ground_truth, kwargs) == ("It is 4", "4", {})
        return {"score": 0.5, "acc": True, "pred": "4", "source": data_source, "extra": extra_info}

    call = call_of(compute_score)
    result = call({"data_source": "gsm8k", **SAMPLE})
    assert (result["source"], result["extra"]) == ("gsm8k", None)
    assert call.answer(result) == (PARTS, {"value": 0.5, "acc": 1.0})
    assert call.answer(0.25) == (PARTS, {"value": 0.25})
    assert call.answer({"acc": 1.0})[0] == BAD
    assert call.answer({"score": 0.5, "value": 1.0})[1].startswith("returned 'value' beside 'score'")
    assert call.answer({"score": 0.5, "acc": [1.0, 0.0]}) == (BAD, "returned for 'acc' [1.0, 0.0]")
    assert call.answer({"score": None}) == (NONE, "returned None under 'score'")
    assert seen_by(lambda solution_str, extra_info: extra_info) == {}

    def in_lists(data_sources, solution_strs, ground_truths, extra_infos):
        return [{"score": float(len(solution_strs)), "source": data_sources[0], "extra": extra_infos[0]}]

    batched = call_of(in_lists)
    assert batched.answer(batched({"data_source": 3, **SAMPLE})) == (PARTS, {"value": 1.0, "source": 3.0})


def test_a_function_of_openrlhf_gets_prompts_with_responses_and_gives_tensors():
    def reward_func(queries, prompts, labels, **kwargs):
        assert queries[0][len(prompts[0]) :] == "It is 4" and labels == ["4"]
        rewards = torch.tensor([0.5])
        return {
            "rewards": rewards,
            "scores": rewards,
            "extra_logs": {"length": torch.tensor([7.0]), "why": "x"},
        }

    call = call_of(reward_func)
    assert call.answer(call(SAMPLE)) == (PARTS, {"value": 0.5, "scores": 0.5, "length": 7.0})
    assert call.answer(torch.tensor([1.5])) == (PARTS, {"value": 1.5})
    assert call.answer(torch.tensor(1.5))[0] == BAD
    assert "'extra_logs' [1.0], expected a dict" in call.answer({"rewards": [1.0], "extra_logs": [1.0]})[1]
    assert "'loss_mask'" in call.answer({"rewards": [1.0], "extra_logs": {"loss_mask": 1.0}})[1]


def test_what_a_function_is_told_with_and_without_is_said():
    """Where a list form is given one response, a function that compares a group has nothing to compare."""
    alone = "; it sees one response at a time, and cannot compare those of a prompt"
    together = "in lists of all samples of a prompt"
    for function in (
        lambda completions: [1.0],
        lambda queries, prompts: [1.0],
        lambda solution_strs, ground_truths: [1.0],
        lambda responses: [1.0],
    ):
        assert call_of(function).describe((), in_groups=False).endswith(alone)
        assert together in call_of(function).describe(())
    for function in (lambda solution_str, ground_truth: 1.0, lambda prompt, response: 1.0):
        assert "one response" not in call_of(function).describe((), in_groups=False)
    assert call_of(lambda response, temperature=1.0: 1.0).describe(()) == (
        "with response; left at their defaults: temperature"
    )


def test_a_function_with_lists_gets_every_argument_of_all_responses_and_its_numbers_go_back_in_order():
    rows = [{**SAMPLE, "response": text, "num_tokens": len(text), "level": 3} for text in ("a", "bcd")]

    def own(responses, references, level, num_tokens, **rest):
        assert (responses, references, level, num_tokens) == (["a", "bcd"], ["4", "4"], [3, 3], [1, 3])
        assert rest["prompts"] == ["2+2?"] * 2
        return np.array([1.0, 2.0])

    def openrlhf(queries, prompts, labels):
        rewards = torch.tensor([float(len(query) - len(prompts[0])) for query in queries])
        return {"rewards": rewards, "extra_logs": {"length": rewards, "whole": torch.tensor(2.0)}}

    def verl(solution_strs, ground_truths):
        return [{"score": float(len(text))} for text in solution_strs]

    call = call_of(own)
    result = call(*rows)
    assert [call.answer(result, at, 2) for at in (0, 1)] == [(PARTS, {"value": 1.0}), (PARTS, {"value": 2.0})]
    call = call_of(openrlhf)
    assert call.answer(call(*rows), 1, 2) == (PARTS, {"value": 3.0, "length": 3.0, "whole": 2.0})
    call = call_of(verl)
    assert call.answer(call(*rows), 1, 2) == (PARTS, {"value": 3.0})
    assert call.answer([1.0], 1, 2) == (
        BAD,
        "returned [1.0] for a list of 2 responses, and a function of verl's returns a list with one number for each "
        "response",
    )


def test_arguments_that_a_function_may_have_are_those_of_the_table():
    table = surface("reward.arguments")
    theirs = {name for form in FOREIGN for name in (*form.values, *form.empty)}
    assert {*PLACES, *EXTRAS, "data_source"} | theirs == set(table.used)


def test_a_list_must_hold_one_number():
    call = call_of(lambda completions: None)
    assert call.answer([np.float32(0.5)]) == (PARTS, {"value": 0.5})
    assert call.answer([None]) == (NONE, "returned None")
    for wrong in (0.5, [], [0.5, 0.5], "1", None, {"value": 1.0}, ["1"], [float("nan")]):
        kind, words = call.answer(wrong)
        assert kind == BAD and words.startswith("returned ")
