"""LoRA: only adapters learn, the reference is the model without them, what is published is merged."""

import importlib
import json
from functools import partial
from typing import Literal

import pytest
import torch
from supervised_items import items_of, new_learner, tiny
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    YoutuConfig,
    YoutuForCausalLM,
)

from rlhfspec.core.config import AlgorithmConfig, TrainerConfig
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.settings.trainer import LoraConfig
from rlhfspec.engine.weights.chunks import load_into, unique_tensors
from rlhfspec.learning.training import adapter as adapters
from rlhfspec.learning.training.adapter import Adapter, count_adapter_params
from rlhfspec.learning.training.learner import Learner

peft = pytest.importorskip("peft")
LORA = LoraConfig(rank=4, alpha=8.0)


def learner_of(
    model, *, kind: Literal["ppo", "grpo"] = "grpo", kl_coef=0.05, lora=LORA, **settings
) -> Learner:
    return Learner(
        model,
        algorithm=AlgorithmConfig(kind=kind, kl_coef=kl_coef),
        trainer=TrainerConfig(learning_rate=1e-2, minibatch_size=3, lora=lora, **settings),
        temperature=1.0,
        seed=5,
        pad_token_id=0,
    )


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=19, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    return GPT2LMHeadModel(config).eval()


def latent() -> YoutuForCausalLM:
    """Keys and values of all heads come out of a linear that takes [B, 1, tokens, latent]."""
    torch.manual_seed(0)
    sizes = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config = YoutuConfig(
        vocab_size=19, hidden_size=32, intermediate_size=64, **heads, **dict.fromkeys(sizes, 4)
    )
    return YoutuForCausalLM(config).eval()


def copied(weights):
    return {name: tensor.detach().clone() for name, tensor in weights}


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids).logits


IDS = torch.arange(2, 18)[None]


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_only_adapters_learn_and_only_they_have_optimizer_state(make_model, make_rollouts, kind):
    model = make_model()
    before = copied(unique_tensors(model))
    learner = learner_of(model, kind=kind)
    metrics = learner.update(make_rollouts(model, group_size=6)).metrics
    after = {name.replace(".base_layer", ""): tensor for name, tensor in learner.model.named_parameters()}
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    stepped = {id(p) for group in learner.optimizer.param_groups for p in group["params"]}
    assert stepped == {id(p) for name, p in learner.model.named_parameters() if ".lora_" in name}
    assert ("value_loss" in metrics) == (kind == "ppo")
    assert copied(learner.weights()).keys() == before.keys()
    assert not all(torch.equal(tensor, before[name]) for name, tensor in learner.weights())


def test_adapters_start_as_the_model_itself(make_model, make_rollouts):
    model = make_model()
    plain = logits_of(model, IDS)
    rollouts = make_rollouts(model)
    learner = learner_of(model)
    assert torch.equal(logits_of(learner.model, IDS), plain)
    assert learner.update(rollouts).metrics["ratio_at_first_minibatch"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("family", [partial(tiny, "llama"), gpt2, latent], ids=["llama", "gpt2", "latent"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_an_adapter_adds_what_peft_adds_with_its_gradients(family, compute):
    def adapted() -> torch.nn.Module:
        torch.manual_seed(0)
        model = family()
        Adapter(model, LORA, seed=1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        return model

    def logits_and_gradients(model):
        with torch.autocast("cpu", compute, enabled=compute != torch.float32):
            logits = model(IDS).logits
        logits.float().square().mean().backward()
        return logits.float(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}

    ours, theirs = adapted(), adapted()
    layers = [module for module in theirs.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        del layer.forward
    close = {"rtol": 1e-4, "atol": 1e-5} if compute == torch.float32 else {"rtol": 0.1, "atol": 0.1}
    (got, gradients), (expected, their_gradients) = logits_and_gradients(ours), logits_and_gradients(theirs)
    torch.testing.assert_close(got, expected, **close)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, their_gradients[name], **close)


def test_before_the_first_step_merged_weights_are_the_models_bit_for_bit(make_model):
    """-0.0 too, which a sum with 0.0 would not keep: the first checksum covers it."""
    model = make_model()
    model.model.layers[0].self_attn.q_proj.weight.data[0, :3] = -0.0
    before = copied(unique_tensors(model))
    for name, tensor in learner_of(model).weights():
        assert torch.equal(tensor.view(torch.int32), before[name].view(torch.int32)), name


def test_the_reference_is_the_model_without_its_adapters(make_model, make_rollouts):
    model = make_model()
    rollouts = make_rollouts(model, group_size=6)
    learner = learner_of(model)
    assert learner.reference is None, "no second model is held"
    first = learner.update(rollouts).metrics["reference_kl"]
    again = learner.update(rollouts).metrics["reference_kl"]
    assert first == pytest.approx(0.0, abs=1e-6)
    assert again == first, "the same tokens under the same reference, whatever was learned meanwhile"
    moved = make_rollouts(learner.model, seed=1)
    assert learner.update(moved).metrics["reference_kl"] > 1e-4


@pytest.mark.parametrize("family", ["llama", "llama, tied", "gpt2"])
def test_merged_weights_are_the_adapted_model_and_merging_changes_nothing(family, make_model, make_rollouts):
    def new_model():
        if family == "gpt2":
            return gpt2()
        model = make_model()
        if family == "llama, tied":
            model.config.tie_word_embeddings = True
            model.tie_weights()
        return model

    learner = learner_of(new_model())
    learner.update(make_rollouts(learner.model, group_size=6))
    merged = copied(learner.weights())
    again = copied(learner.weights())
    assert all(torch.equal(tensor, again[name]) for name, tensor in merged.items())
    fresh = new_model()
    assert (logits_of(fresh, IDS) - logits_of(learner.model, IDS)).abs().max() > 1e-2
    load_into(fresh, merged)
    assert torch.allclose(logits_of(fresh, IDS), logits_of(learner.model, IDS), atol=1e-5)


def test_peft_loads_the_saved_adapter_to_the_same_logits(make_model, make_rollouts, tmp_path):
    base = make_model()
    base.save_pretrained(tmp_path / "base")
    learner = learner_of(make_model())
    learner.update(make_rollouts(learner.model, group_size=6))
    (tmp_path / "adapter").mkdir()
    assert learner.adapter is not None
    for name, content in learner.adapter_files(base_model=str(tmp_path / "base")).items():
        (tmp_path / "adapter" / name).write_bytes(content)
    config = peft.PeftConfig.from_pretrained(tmp_path / "adapter")
    assert config.base_model_name_or_path == str(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.allclose(logits_of(loaded, IDS), logits_of(learner.model, IDS), atol=1e-5)
    merged = make_model(seed=3)
    load_into(merged, copied(learner.weights()))
    assert torch.allclose(logits_of(loaded, IDS), logits_of(merged, IDS), atol=1e-5)


def test_equal_seeds_give_equal_adapters_and_leave_the_generator_alone(make_model, make_rollouts):
    models = [make_model() for _ in range(2)]
    learners = []
    for number, model in enumerate(models):
        torch.manual_seed(number)
        state = torch.get_rng_state()
        learners.append(learner_of(model))
        assert torch.equal(torch.get_rng_state(), state)
    rollouts = make_rollouts(make_model(), group_size=6)
    for learner in learners:
        learner.update(rollouts)
    one, other = (copied(learner.weights()) for learner in learners)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_resumed_learner_goes_on_bitwise(make_model, make_rollouts, tmp_path):
    straight = learner_of(make_model())
    first, second = make_rollouts(straight.model), make_rollouts(straight.model, seed=1)
    straight.update(first)
    straight.save(tmp_path / "state")
    straight.update(second)
    resumed = learner_of(make_model(seed=9))
    resumed.load(tmp_path / "state")
    resumed.update(second)
    one, other = copied(straight.weights()), copied(resumed.weights())
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_gradient_checkpointing_gives_the_same_update(make_model, make_rollouts):
    plain, saving = learner_of(make_model()), learner_of(make_model(), gradient_checkpointing=True)
    rollouts = make_rollouts(make_model(), group_size=6)
    plain.update(rollouts)
    saving.update(rollouts)
    other = dict(saving.weights())
    assert all(torch.equal(tensor, other[name]) for name, tensor in plain.weights())


def test_a_bfloat16_base_keeps_its_type_and_adapters_learn_in_float32(make_model, make_rollouts):
    model = make_model().bfloat16()
    learner = learner_of(model)
    learned = [p for p in learner.model.parameters() if p.requires_grad]
    assert {p.dtype for p in learned} == {torch.float32}
    weights = dict(learner.weights())
    assert weights["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32
    assert weights["model.norm.weight"].dtype == torch.bfloat16


def test_parameters_are_counted_without_memory(make_model):
    with torch.device("meta"):
        shapes = LlamaForCausalLM(LlamaConfig(**make_model().config.to_dict()))
    assert count_adapter_params(shapes, LORA) == Adapter(make_model(), LORA, seed=0).num_params() > 0


@pytest.mark.parametrize(
    ("targets", "message"),
    [(("no_such_proj",), "cannot be used with this model"), (("lm_head",), "whose weight is also that of")],
)
def test_targets_that_cannot_be_merged_are_refused(make_model, targets, message):
    model = make_model()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    with pytest.raises(ConfigError, match=message):
        learner_of(model, lora=LoraConfig(targets=targets))


def test_an_untied_head_may_learn(make_model, make_rollouts):
    learner = learner_of(make_model(), lora=LoraConfig(targets=("lm_head", "q_proj")))
    before = copied(learner.weights())
    learner.update(make_rollouts(make_model(), group_size=6))
    changed = {name for name, tensor in learner.weights() if not torch.equal(tensor, before[name])}
    assert changed == {"lm_head.weight", *(f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1))}


def test_without_peft_the_extra_is_named(make_model, monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"trainer\.lora needs the package peft.*rlhfspec\[lora\]"):
        adapters.require_peft()


def saved_adapter(folder, *, lora=LORA, base="base"):
    """A folder with an adapter that has learned; what was published of it."""
    learner = new_learner("sft", lora)
    learner.step(items_of("sft")[:4])
    folder.mkdir(exist_ok=True)
    for name, content in learner.adapter_files(base_model=base).items():
        (folder / name).write_bytes(content)
    return copied(learner.weights())


@pytest.mark.parametrize("use_rslora", [False, True])
def test_learning_goes_on_from_an_adapter_at_peft_s_own_scale(tmp_path, use_rslora):
    lora = LORA.model_copy(update={"use_rslora": use_rslora})
    published = saved_adapter(tmp_path / "adapter", lora=lora)
    begun = new_learner("sft", lora.model_copy(update={"adapter_path": str(tmp_path / "adapter")}))
    for name, tensor in begun.weights():
        assert torch.equal(tensor, published[name]), name
    theirs = peft.PeftModel.from_pretrained(tiny("sft"), str(tmp_path / "adapter")).merge_and_unload()
    for name, tensor in theirs.named_parameters():
        torch.testing.assert_close(published[name], tensor, rtol=1e-6, atol=1e-7)
    scale = next(
        m.scaling["default"] for m in begun.model.modules() if isinstance(getattr(m, "scaling", None), dict)
    )
    assert scale == pytest.approx(4.0 if use_rslora else 2.0)
    begun.step(items_of("sft")[:4])
    assert any(not torch.equal(tensor, published[name]) for name, tensor in begun.weights())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rank": 8}, "has r 4, expected trainer.lora's 8"),
        ({"alpha": 4.0}, "has lora_alpha 8.0, expected trainer.lora's 4.0"),
        ({"use_rslora": True}, "has use_rslora None, expected trainer.lora's True"),
        ({"targets": ("q_proj",)}, r"is of other targets or another model: .*mlp\.down_proj"),
        ({"adapter_path": "elsewhere"}, "is no folder of an adapter"),
    ],
)
def test_another_adapter_than_the_settings_say_is_refused(tmp_path, changed, said):
    saved_adapter(tmp_path / "adapter")
    lora = LORA.model_copy(update={"adapter_path": str(tmp_path / "adapter")} | changed)
    with pytest.raises(ConfigError, match=said):
        new_learner("sft", lora)


def test_an_adapter_of_another_model_or_with_unknown_settings_is_refused(tmp_path, make_model):
    folder = tmp_path / "adapter"
    saved_adapter(folder)
    lora = LORA.model_copy(update={"adapter_path": str(folder)})
    deeper = make_model()
    deeper.model.layers = deeper.model.layers[:1]
    with pytest.raises(ConfigError, match=r"another model: .*layers\.1\."):
        Adapter(deeper, lora, seed=0)
    given = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(given | {"use_magic": True}))
    with pytest.raises(ConfigError, match="'use_magic'"):
        new_learner("sft", lora)
