"""`rollout_func` keeps TRL's contract, by its documented arguments alone: TRL need not be installed."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from byte_chat import save_byte_pair
from tiny_heads import tiny_head
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from trl_like import trl_like

from rlhfspec.core.config import EngineConfig, EnvironmentConfig, SpeculationConfig
from rlhfspec.core.errors import ConfigError, DataError, ModelError
from rlhfspec.core.records import Prompt, SampleKey, SampleRequest, SamplingParams, Stream
from rlhfspec.engine.build import build_engine
from rlhfspec.engine.drafters.head.head_weights import save_head
from rlhfspec.engine.weights.chunks import unique_tensors
from rlhfspec.engine.weights.loading import load_causal_lm
from rlhfspec.integrations import trl
from rlhfspec.integrations.trl import TrlRollouts
from rlhfspec.integrations.whole_weights import whole_weights

CHATS = [[{"role": "user", "content": text}] for text in ("one", "one", "a longer one", "a longer one")]
TEXTS = ["one", "one", "a longer one"]
ENGINE = EngineConfig(max_running_samples=3, probe=False)
LOOK_UP = SpeculationConfig(drafter="suffix", policy="fixed", num_nodes=4, depth=4)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    save_byte_pair(folder)
    return folder


@pytest.fixture
def model(pair):
    return AutoModelForCausalLM.from_pretrained(pair / "target")


@pytest.fixture
def tokenizer(pair):
    return AutoTokenizer.from_pretrained(pair / "target")


def rollouts(draft: Path | None = None, speculation: SpeculationConfig | None = LOOK_UP) -> TrlRollouts:
    return TrlRollouts(draft, speculation, ENGINE, EnvironmentConfig(), max_prompt_tokens=64)


def alone(model, prompt_ids, *, first: int = 0, stream: Stream = Stream.TRAIN, stop: int = 1):
    """The same responses by a plain engine: tokens and log-probabilities."""
    engine = build_engine(
        deepcopy(model).eval(),
        None,
        engine=ENGINE,
        speculation=SpeculationConfig(policy="off"),
        max_total_tokens=128,
    )
    sampling = SamplingParams(temperature=0.8, max_new_tokens=12, stop_token_ids=(stop,))
    with torch.no_grad():
        done = engine.generate(
            SampleRequest(
                key=SampleKey(run_seed=7, stream=stream, sample_index=first + number),
                prompt=Prompt(prompt_id=0, token_ids=np.array(ids)),
                sampling=sampling,
            )
            for number, ids in enumerate(prompt_ids)
        )
    return [one.token_ids.tolist() for one in done], [one.policy_logprobs.tolist() for one in done]


def moved(model, by: float = 0.05) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by * torch.randn_like(parameter))


@pytest.mark.parametrize("prompts", [CHATS, TEXTS])
@pytest.mark.parametrize("drafter", ["model", "suffix"])
def test_responses_are_those_of_our_engine_alone(pair, model, tokenizer, prompts, drafter):
    speculation = SpeculationConfig(drafter=drafter, policy="fixed", num_nodes=4, depth=4)
    got = rollouts(pair / "draft", speculation)(prompts, trl_like(model, tokenizer))
    texts = (
        [f"<user>{chat[0]['content']}<end><assistant>" for chat in prompts] if prompts is CHATS else prompts
    )
    assert got["prompt_ids"] == [tokenizer(text)["input_ids"] for text in texts]
    assert (got["completion_ids"], got["logprobs"]) == alone(model, got["prompt_ids"])
    assert got["completion_ids"][0] != got["completion_ids"][1], "one prompt's samples have keys of their own"


def test_what_drafting_costs_is_measured_once(model, tokenizer, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trl, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(trl, "PROFILE_S", 0.5)
    got = rollouts(None, None)(CHATS, trl_like(model, tokenizer))
    assert (got["completion_ids"], got["logprobs"]) == alone(model, got["prompt_ids"])
    (kept,) = tmp_path.glob("profiles/*/profile.json")
    tree = json.loads(kept.read_text())
    kept.write_text(
        json.dumps(tree | {"cost": tree["cost"] | {"verify": [-1.0] * len(tree["cost"]["verify"])}})
    )
    rollouts(None, None)(CHATS, trl_like(model, tokenizer))
    assert caplog.text.count("what was measured before is damaged: ") == 1
    assert caplog.text.count("is measured once: about 0 s") == 2, "and is measured anew"
    monkeypatch.setattr(trl, "measured_profile", lambda *_, **__: pytest.fail("measured again"))
    moved(model)  # other weights cost the same
    got = rollouts(None, None)(CHATS, trl_like(model, tokenizer))
    assert (got["completion_ids"], got["logprobs"]) == alone(model, got["prompt_ids"])


def test_what_cannot_be_measured_or_kept_is_said_and_costs_no_key(
    model, tokenizer, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(trl, "PROFILE_S", 0.1)
    monkeypatch.setattr(trl, "_cache", lambda: None)
    ours = TrlRollouts(None, None, ENGINE, EnvironmentConfig(), max_prompt_tokens=4)
    trainer = trl_like(model, tokenizer, max_completion_length=1)
    monkeypatch.setattr(trl, "build_engine", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ours(["abcd"], trainer)
    monkeypatch.undo()
    monkeypatch.setattr(trl, "_cache", lambda: None)
    got = ours(["abcd"], trainer)
    expected = alone(model, got["prompt_ids"])
    assert got["completion_ids"][0] == expected[0][0][:1]
    assert "are too short; set speculation.policy to bandit or off" in caplog.text


def test_a_profile_of_something_else_is_named(model, tokenizer, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trl, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(trl, "PROFILE_S", 0.1)
    rollouts(None, None)(CHATS, trl_like(model, tokenizer))
    (kept,) = tmp_path.glob("profiles/*/profile.json")
    named = SpeculationConfig(drafter="suffix", profile=str(kept.parent))
    caplog.clear()
    rollouts(None, named)(CHATS[:1], trl_like(model, tokenizer))
    assert not caplog.text, "a smaller batch is what it was measured for, too"
    kept.write_text(kept.read_text().replace('"dtype": "float32"', '"dtype": "float16"'))
    got = rollouts(None, named)(CHATS, trl_like(model, tokenizer))
    assert (got["completion_ids"], got["logprobs"]) == alone(model, got["prompt_ids"])
    assert "dtype is 'float32', measured with 'float16'" in caplog.text


def test_a_draft_that_cannot_be_measured_is_tried(pair, model, tokenizer, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trl, "CACHE_DIR", str(tmp_path))
    trainer = trl_like(model, tokenizer)
    got = rollouts(pair / "draft", None)(CHATS, trainer)
    assert (got["completion_ids"], got["logprobs"]) == alone(model, got["prompt_ids"])
    assert "by trying (bandit): the profile of this pair needs drafts to measure" in caplog.text


def test_log_probabilities_are_those_of_the_trainers_forward(model, tokenizer):
    got = rollouts()(CHATS, trl_like(model, tokenizer))
    for prompt, response, logprobs in zip(*got.values(), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / 0.8
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-5, rtol=0.0)


def test_weights_are_published_when_the_step_changes_and_not_before(model, tokenizer):
    trainer, ours, before = trl_like(model, tokenizer), rollouts(), deepcopy(model)
    first = ours(CHATS, trainer)
    moved(model)
    again = ours(CHATS, trainer)
    assert (again["completion_ids"], again["logprobs"]) == alone(before, first["prompt_ids"], first=4)
    trainer.state.global_step = 1
    after = ours(CHATS, trainer)
    assert (after["completion_ids"], after["logprobs"]) == alone(model, first["prompt_ids"], first=1 << 32)
    trainer.is_in_train = False
    for number in (1, 2):
        moved(model)  # as load_best_model_at_end does, at the last step, or a user between two evaluations
        best = ours(CHATS, trainer)
        assert (best["completion_ids"], best["logprobs"]) == alone(
            model, first["prompt_ids"], first=4 * number + (1 << 32)
        )


def test_bfloat16_is_decoded_where_trl_computes_in_it_and_what_differs_is_said(
    pair, model, tokenizer, caplog
):
    trainer, ours = trl_like(model, tokenizer, bf16=True), rollouts()
    for step in (0, 1):
        trainer.state.global_step = step
        got = ours(CHATS, trainer)
        rounded = load_causal_lm(str(pair / "target"), "bfloat16")
        assert (got["completion_ids"], got["logprobs"]) == alone(rounded, got["prompt_ids"], first=step << 32)
    assert caplog.text.count("bf16=False makes log-probabilities equal") == 1
    rollouts()(CHATS, trl_like(model.bfloat16(), tokenizer))
    assert "the model was loaded in it" in caplog.text


def test_a_family_without_a_forward_of_ours_is_decoded_by_a_copy_of_its_module(tokenizer):
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))
    trainer, ours = trl_like(model, tokenizer), rollouts()
    for step in (0, 1):
        trainer.state.global_step = step
        got = ours(CHATS, trainer)
        assert (got["completion_ids"], got["logprobs"]) == alone(model, got["prompt_ids"], first=step << 32)
        moved(model)
    assert model.training and model.config._attn_implementation == "sdpa"


def test_a_second_trainer_gets_an_engine_of_its_own_weights(model, tokenizer):
    ours, other = rollouts(), deepcopy(model)
    moved(other)
    ours(CHATS, trl_like(model, tokenizer))
    got = ours(CHATS, trl_like(other, tokenizer))
    assert got["completion_ids"] == alone(other, got["prompt_ids"], first=4)[0]


def test_ranks_and_evaluations_share_no_key(model, tokenizer):
    trainer = trl_like(model, tokenizer, rank=1, ranks=2)
    first, ours = 1 << 20, rollouts()
    got = ours(CHATS, trainer)
    assert got["completion_ids"] == alone(model, got["prompt_ids"], first=first)[0]
    got = ours(TEXTS, trainer)
    assert got["completion_ids"] == alone(model, got["prompt_ids"], first=first + len(CHATS))[0]
    model.eval()
    got = rollouts()(CHATS, trainer)
    assert got["completion_ids"] == alone(model, got["prompt_ids"], first=first, stream=Stream.EVAL)[0]
    assert not model.training


@pytest.mark.parametrize("names", [["default"], ["mine", "ref"]])
def test_adapters_are_merged_beside_the_weights_which_keep_their_bits(model, tokenizer, names):
    from peft import LoraConfig, get_peft_model

    recipe = {"r": 2, "modules_to_save": ["norm"], "task_type": "CAUSAL_LM"}
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], **recipe), names[0])
    for other in names[1:]:
        adapted.add_adapter(other, LoraConfig(target_modules=["q_proj", "o_proj"], **recipe))
    moved(adapted)
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    got = rollouts()(CHATS, trl_like(adapted, tokenizer))
    assert all(torch.equal(before[name], tensor) for name, tensor in adapted.state_dict().items())
    merged = deepcopy(adapted).merge_and_unload()
    assert (got["completion_ids"], got["logprobs"]) == alone(merged, got["prompt_ids"])


def test_adapters_that_cannot_be_merged_are_refused(model, tokenizer):
    from peft import LoHaConfig, LoraConfig, get_peft_model

    one = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    two = get_peft_model(deepcopy(model), one)
    two.add_adapter("second", one)
    two.base_model.set_adapter(["default", "second"])
    with pytest.raises(ConfigError, match="active adapters are default, second, expected one"):
        rollouts()(CHATS, trl_like(two, tokenizer))
    with pytest.raises(
        ConfigError, match="'peft_type': expected none or 'LORA', got 'LOHA'; only LoRA is merged"
    ):
        rollouts()(
            CHATS, trl_like(get_peft_model(model, LoHaConfig(r=2, target_modules=["q_proj"])), tokenizer)
        )


@pytest.mark.parametrize("more", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens"]}])
def test_an_adapter_that_parts_a_tied_weight_is_refused(model, tokenizer, more):
    from peft import LoraConfig, get_peft_model

    model.lm_head.weight, model.config.tie_word_embeddings = model.model.embed_tokens.weight, True
    recipe = LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | more)
    with pytest.raises(ConfigError, match=r"changes .*, whose weight is also that of"):
        rollouts()(CHATS, trl_like(get_peft_model(model, recipe), tokenizer))


@pytest.mark.filterwarnings("ignore:.*NO_SHARD")
@pytest.mark.parametrize("first", [False, True])
def test_shards_are_gathered(model, tokenizer, first):
    model.lm_head.weight = model.model.embed_tokens.weight
    expected = {name: tensor.clone() for name, tensor in unique_tensors(model)}
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        if first:
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        else:
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        got = whole_weights(trl_like(model, tokenizer))
    finally:
        torch.distributed.destroy_process_group()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


PARROT = {"kind": "sample_environments:Parrot", "options": {"longest": 3, "turns": 3}, "max_turns": 3}


@pytest.mark.parametrize("prompts", [CHATS, TEXTS])
def test_an_environments_tokens_are_marked_and_between_turns_that_are_ours_alone(model, tokenizer, prompts):
    trainer = trl_like(model, tokenizer, max_completion_length=60)
    environment = EnvironmentConfig(**PARROT, max_turn_tokens=5)
    got = TrlRollouts(None, LOOK_UP, ENGINE, environment, max_prompt_tokens=64)(prompts, trainer)
    assert got["environment_reward"] == [0.75] * len(prompts)
    for number, (prompt, ids, mask, logprobs) in enumerate(
        zip(*(got[key] for key in ("prompt_ids", "completion_ids", "env_mask", "logprobs")), strict=True)
    ):
        assert len(ids) == len(mask) == len(logprobs)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / 0.8
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        sampled = torch.tensor(mask, dtype=torch.bool)
        torch.testing.assert_close(torch.tensor(logprobs)[sampled], expected[sampled], atol=1e-5, rtol=0.0)
        turns = "".join(map(str, mask)).strip("0").split("0")
        assert len([turn for turn in turns if turn]) == 3 and max(map(len, turns)) <= 5
        # the first turn is that of a sample without an environment
        first = mask.index(0)
        assert ids[:first] == alone(model, [prompt], first=number, stop=1)[0][0][:first]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fp16": True}, "fp16 is True"),
        ({"top_p": 0.0}, r"^GRPOConfig\.top_p must be"),
        ({"max_completion_length": 0}, r"^max_completion_length must be an integer of at least 1"),
        ({"max_completion_length": None}, "max_completion_length is None, expected the most tokens"),
    ],
)
def test_what_is_not_served_is_refused_by_name(model, tokenizer, changes, message):
    with pytest.raises(ConfigError, match=message):
        rollouts()(CHATS, trl_like(model, tokenizer, **changes))


@pytest.mark.parametrize("prompts", [CHATS, TEXTS])
def test_a_variable_that_the_template_does_not_read_is_refused(model, tokenizer, prompts):
    trainer = trl_like(model, tokenizer)
    trainer.chat_template = "{% if enable_thinking %}+{% endif %}{{ messages[0].content }}"
    trainer.chat_template_kwargs = {"enable_thinking": True}
    assert len(trl.tokenized(prompts, trainer)) == len(prompts)
    trainer.chat_template_kwargs = {"enable_thinkin": True}
    said = r"^GRPOConfig\.chat_template_kwargs has 'enable_thinkin'.*did you mean 'enable_thinking'"
    with pytest.raises(DataError, match=said):
        rollouts()(prompts, trainer)


def test_end_tokens_that_a_release_of_trl_does_not_read_are_told(model, tokenizer, caplog):
    trainer, own = trl_like(model, tokenizer), tokenizer.eos_token_id
    model.generation_config.eos_token_id = [own, 99, 98]
    assert trl.sampling_of(trainer).stop_token_ids == (own,)
    assert "ends responses at [99, 98] too" in caplog.text
    caplog.clear()
    trainer.eos_token_ids = [own, 99, 98]
    assert trl.sampling_of(trainer).stop_token_ids == (own, 99, 98) and not caplog.text


def test_prompts_of_any_length_are_taken_up_to_the_context_or_to_what_was_said(model, tokenizer, caplog):
    with pytest.raises(
        DataError, match=r"a prompt has 100 tokens, expected at most 64.*max_prompt_tokens=100"
    ):
        rollouts()(["x" * 100], trl_like(model, tokenizer))
    model.config.max_position_embeddings = 1024
    ours, trainer = TrlRollouts(None, LOOK_UP, ENGINE, EnvironmentConfig(), None), trl_like(model, tokenizer)
    assert len(ours(["x" * 20], trainer)["logprobs"][0]) > 0 and ours._room == 512
    built = ours.engine
    for length, room in ((512, 512), (700, 1012), (1012, 1012)):
        assert len(ours(["x" * length], trainer)["prompt_ids"][0]) == length and ours._room == room
        assert (ours.engine is built) == (room == 512), "it is built anew only where it must"
    with pytest.raises(
        DataError, match=r"1013 tokens and max_completion_length is 12, expected at most the 1024"
    ):
        ours(["x" * 1013], trainer)
    said = TrlRollouts(None, LOOK_UP, ENGINE, EnvironmentConfig(), 2000)
    with pytest.raises(ModelError, match=r"lower rollout_func's max_prompt_tokens or max_completion_length$"):
        said(["x"], trainer)


def test_no_prompt_has_no_response(model, tokenizer):
    nothing = rollouts()([], trl_like(model, tokenizer))
    assert nothing == {"prompt_ids": [], "completion_ids": [], "logprobs": []}


def test_a_folder_of_a_head_drafts_as_one_and_a_draft_without_tokenizer_is_named(tmp_path, model, tokenizer):
    (tmp_path / "head").mkdir()
    save_head(tmp_path / "head", tiny_head(model, 2))
    bandit = SpeculationConfig(policy="bandit")
    got = rollouts(tmp_path / "head", bandit)(CHATS, trl_like(model, tokenizer))
    assert (got["completion_ids"], got["logprobs"]) == alone(model, got["prompt_ids"])
    model.save_pretrained(tmp_path / "draft")
    with pytest.raises(ModelError, match=r"tokenizer") as told:
        rollouts(tmp_path / "draft", bandit)(CHATS, trl_like(model, tokenizer))
    assert "models." not in str(told.value)


@pytest.mark.parametrize("release", ["0.29.1", "1.0.0"])
def test_releases_with_another_contract_are_refused(monkeypatch, release):
    monkeypatch.setattr(trl, "version", lambda name: release)
    if release == "1.0.0":
        assert trl.rollout_func().engine is None
        with pytest.raises(ConfigError, match="draft was not given"):
            trl.rollout_func(speculation=SpeculationConfig(policy="fixed"))
        return
    with pytest.raises(ConfigError, match=r"needs TRL 1.0 or later.*TRL 0.29.1 is installed"):
        trl.rollout_func()


def test_a_missing_trl_is_named(monkeypatch):
    def none(name: str) -> str:
        raise trl.PackageNotFoundError(name)

    monkeypatch.setattr(trl, "version", none)
    with pytest.raises(ConfigError, match=r"the package trl is not installed; pip install 'trl>=1.0'"):
        trl.rollout_func()
