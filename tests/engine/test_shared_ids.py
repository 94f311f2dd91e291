"""A draft whose tokenizer has a token more or less: shared ids suffice, the others are never drafted."""

import copy
import json

import pytest
import torch
from transformers import AutoConfig

from rlhfspec.core.errors import ModelError
from rlhfspec.core.records import SamplingParams
from rlhfspec.engine.drafters.drafter import part_of
from rlhfspec.engine.drafters.model_drafter import ModelDrafter
from rlhfspec.engine.weights.llama_config import LlamaConfig
from rlhfspec.engine.weights.loading import build_causal_lm
from rlhfspec.engine.weights.shared_ids import fit_draft, foreign_ids, foreign_of
from rlhfspec.learning.models.tokenization import character_tokenizer
from tests.engine.conftest import VOCAB_SIZE, Pair

LETTERS = "abcdefgh"
MISSING = [7, 33, 34, 60, 61, 62, 63]
"what the draft lacks: inside its rows and behind them"
LENGTHS = (3, 17, 40, 60, 1)


def grown(*tokens):
    tokenizer = character_tokenizer(LETTERS)
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def test_ids_that_only_one_tokenizer_has_are_foreign_up_to_the_target_s_last():
    plain, num = grown(), len(grown())
    assert foreign_ids(plain, grown()) == []
    assert foreign_ids(grown("<one>", "<x>"), plain) == [num, num + 1]
    assert foreign_ids(plain, grown("<one>")) == []


def test_tokenizers_that_disagree_at_a_shared_id_are_refused_with_the_first_ids():
    with pytest.raises(
        ModelError, match=rf"differ first at id {len(grown())} \('<one>' and '<two>'\), 1 ids in all"
    ):
        foreign_ids(grown("<one>"), grown("<two>"))
    with pytest.raises(ModelError, match=r"differ first at id 3 .* 5 ids in all"):
        foreign_ids(character_tokenizer("abcde"), character_tokenizer("vwxyz"))


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def fitted(pairs, request) -> Pair:
    """The pair whose draft has 60 rows, and lacks two of these."""
    draft = copy.deepcopy(pairs["float32"].draft)
    if request.param:
        draft.config.tie_word_embeddings = True
        draft.get_input_embeddings().weight.data.copy_(draft.get_output_embeddings().weight.data)
        draft.tie_weights()
    draft.resize_token_embeddings(60, mean_resizing=False)
    before = torch.get_rng_state()
    fit_draft(draft, MISSING, num_ids=VOCAB_SIZE)
    assert torch.equal(before, torch.get_rng_state())
    return Pair(target=pairs["float32"].target, draft=draft)


def test_a_draft_with_too_few_rows_gets_the_mean_of_its_own_and_equal_tokenizers_change_nothing(
    fitted, pairs
):
    assert fitted.draft.config.vocab_size == VOCAB_SIZE and not fitted.draft.lm_head.weight.requires_grad
    for layer in (fitted.draft.get_input_embeddings(), fitted.draft.get_output_embeddings()):
        assert len(layer.weight) == VOCAB_SIZE
        torch.testing.assert_close(layer.weight[60], layer.weight[:60].mean(0))
    own = pairs["float32"].draft
    assert fit_draft(own, [], num_ids=VOCAB_SIZE + 9) is own and own.config.vocab_size == VOCAB_SIZE
    assert foreign_of(own.config, VOCAB_SIZE) is None


@pytest.mark.parametrize("plan", ["chain4", "tree8", "tree16", "model pair"])
@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(max_new_tokens=14), SamplingParams(temperature=0.7, top_k=5, max_new_tokens=14)],
    ids=["T=1", "top-k"],
)
def test_tokens_are_those_of_plain_decoding_and_no_foreign_one_is_drafted(
    fitted, plan, sampling, make_engine, make_requests
):
    requests = make_requests(LENGTHS, sampling)
    plain = make_engine("off").generate(requests)
    engine = make_engine(plan, pair=fitted)
    drafter, drafted = part_of(engine.drafter, ModelDrafter), set()
    assert drafter is not None
    propose = drafter.propose

    def noted(*arguments, **named):
        tree = propose(*arguments, **named)
        drafted.update(tree.token_ids.unique().tolist())
        return tree

    drafter.propose = noted
    done = engine.generate(requests)
    for ours, theirs in zip(done, plain, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.policy_logprobs.tobytes() == theirs.policy_logprobs.tobytes()
    assert not drafted & set(MISSING) and len(drafted) > 10
    said = {token for completion in plain for token in completion.token_ids.tolist()}
    assert said & set(MISSING), "the target says none of them: the case proves nothing"
    assert engine.stats.num_accepted_tokens > 10


def test_what_is_never_drafted_goes_with_the_draft_s_config(fitted, tmp_path):
    published = fitted.draft.config.to_json_string(use_diff=False)
    fitted.draft.save_pretrained(tmp_path)
    for config in (
        build_causal_lm(published, "float32").config,
        LlamaConfig.of(published),
        AutoConfig.from_pretrained(tmp_path),
    ):
        found = foreign_of(config, VOCAB_SIZE)
        assert found is not None and found.tolist() == MISSING
    assert json.loads(published)["foreign_token_ids"] == [[7, 8], [33, 35], [60, 64]]
