"""QLoRA: linears below adapters in 4 bits; beside peft's own, gone on with to the bit, saved as what was learned."""

import sys
from typing import Any

import pytest
import torch
from supervised_items import items_of, learn, new_learner, tiny
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from rlhfspec.core.config import TrainerConfig
from rlhfspec.core.errors import ConfigError
from rlhfspec.core.settings.supervised import SftLossConfig, SupervisedModelConfig, SupervisedTrainerConfig
from rlhfspec.core.settings.trainer import LoraConfig, require_optim, require_trainer
from rlhfspec.learning.models.tokenization import character_tokenizer
from rlhfspec.learning.training.adapter import Adapter, quantise_below_adapters
from rlhfspec.learning.training.supervised_job import SupervisedJob, run_job

peft = pytest.importorskip("peft")
LORA = LoraConfig(rank=4, base_bits=4)
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("bitsandbytes")


def peft_s_own(library: Any, model: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """peft's QLoRA of a model, its adapters those of `tensors`."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            held = library.nn.Linear4bit(
                module.in_features,
                module.out_features,
                bias=module.bias is not None,
                compute_dtype=torch.float32,
                compress_statistics=False,
                quant_type="nf4",
            )
            held.load_state_dict(module.state_dict())
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, held.to("cpu"))
    model.is_loaded_in_4bit = True
    recipe = peft.LoraConfig(r=4, lora_alpha=LORA.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(model, recipe)
    names = {type(one).__module__ for one in theirs.modules()}
    assert "peft.tuners.lora.bnb" in names, "its own layers on 4 bits"
    theirs.base_model.model.load_state_dict(tensors, strict=False)
    return theirs


def test_loss_and_gradients_are_those_of_peft_s_own_qlora(library):
    learner, items = new_learner("sft", LORA), items_of("sft")[:3]
    # so that both of an adapter's matrices have gradients
    learner.step(items)
    own = {name: one for name, one in learner.model.named_parameters() if one.requires_grad}
    theirs = peft_s_own(library, tiny("sft"), {name: one.detach() for name, one in own.items()})
    batch = learner.batch(items)
    found = sum(batch.loss(learner.model, pack) for pack in batch.packs)
    found.backward()
    total, count = torch.zeros(()), 0
    for item in items:
        ids = torch.from_numpy(item.token_ids)
        logprobs = theirs(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        learned = logprobs[torch.from_numpy(item.is_learned)[1:]]
        total, count = total - learned.sum(), count + len(learned)
    (total / count).backward()
    torch.testing.assert_close(found.detach(), (total / count).detach(), rtol=1e-5, atol=1e-6)
    gradients = {name: one.grad for name, one in theirs.base_model.model.named_parameters()}
    assert len(own) == 2 * 7 * 2
    for name, one in own.items():
        torch.testing.assert_close(one.grad, gradients[name], rtol=1e-5, atol=1e-6)
        assert one.grad.abs().max() > 0


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_what_was_saved_is_gone_on_with_to_the_bit_whatever_the_base_there(library, kind, tmp_path):
    items = items_of(kind)
    weights, metrics = learn(new_learner(kind, LORA), items, tmp_path / "state")
    resumed = new_learner(kind, LORA)
    for module in resumed.model.modules():
        if isinstance(module, library.nn.Linear4bit):
            module.absmax.zero_()
            module.weight.data.zero_()
    resumed.load(tmp_path / "state")
    again, same = learn(resumed, items)
    assert metrics == same
    assert all((weights[name] == again[name]).all() for name in weights)
    with pytest.raises(ConfigError, match="does not fit this trainer"):
        new_learner(kind, LORA.model_copy(update={"base_bits": None})).load(tmp_path / "state")


def test_what_is_published_is_what_4_bits_and_adapters_say(library):
    learner = new_learner("sft", LORA)
    start = dict(tiny("sft").named_parameters())
    for name, tensor in learner.weights():
        if "_proj" in name:
            packed, state = library.functional.quantize_4bit(start[name].detach(), quant_type="nf4")
            assert torch.equal(tensor, library.functional.dequantize_4bit(packed, state)), name
            assert not torch.equal(tensor, start[name])
        else:
            assert torch.equal(tensor, start[name]), name
    below = learner.model.get_submodule(f"{UP}.base_layer")
    assert below.weight.nbytes + below.absmax.nbytes == start[f"{UP}.weight"].numel() * 9 // 16
    plain, base = tiny("sft"), tiny("sft")
    base.load_state_dict(dict(learner.weights()))
    learner.step(items_of("sft")[:3])
    plain.load_state_dict(dict(learner.weights()))
    ids = torch.arange(2, 18)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, learner.model(ids).logits, rtol=1e-4, atol=1e-5)
        with learner.adapter.switched_off():
            torch.testing.assert_close(base(ids).logits, learner.model(ids).logits, rtol=1e-5, atol=1e-6)


def test_biases_keep_the_values_that_products_in_bfloat16_have_of_them(library):
    config = Qwen2Config(
        vocab_size=20,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = Qwen2ForCausalLM(config).train()
    bias = model.model.layers[0].self_attn.q_proj.bias
    with torch.no_grad():
        bias.normal_(generator=torch.Generator().manual_seed(0))
    Adapter(model, LORA, seed=0)
    quantise_below_adapters(model, torch.bfloat16)
    held = model.model.layers[0].self_attn.q_proj.base_layer
    before = {name: one.clone() for name, one in model.state_dict().items()}
    assert torch.equal(held.bias, bias.to(torch.bfloat16))
    for is_training in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(is_training):
            model.train(is_training)(torch.arange(2, 18)[None])
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_a_job_saves_a_model_that_says_what_its_trainer_says(library, tmp_path):
    tiny("sft").save_pretrained(tmp_path / "start")
    job = SupervisedJob(
        kind="sft",
        model=SupervisedModelConfig(name=str(tmp_path / "start"), dtype="float32"),
        trainer=SupervisedTrainerConfig(max_steps=2, batch_size=4, lora=LORA, learning_rate=0.1),
        loss=SftLossConfig(),
        seed=0,
        tokenizer=character_tokenizer("abcdefghijklmnopq"),
        train=items_of("sft"),
        held_out=[],
        folder=tmp_path / "out",
    )
    # it is read again, and compared by log-probabilities, before it gets its name
    list(run_job(job, device=torch.device("cpu")))
    assert (tmp_path / "out" / "adapter").is_dir()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert not torch.equal(saved.get_submodule(UP).weight, tiny("sft").get_submodule(UP).weight)


def test_without_bitsandbytes_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"lora\.base_bits needs the package bitsandbytes.* or take it out"):
        new_learner("sft", LORA)


def test_what_is_no_plain_linear_is_refused(library):
    config = GPT2Config(vocab_size=19, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    model = GPT2LMHeadModel(config)
    Adapter(model, LORA, seed=0)
    with pytest.raises(ConfigError, match=r"attn\.c_attn is a Conv1D; take it out of trainer\.lora\.targets"):
        quantise_below_adapters(model, torch.float32)


def test_a_run_and_shards_are_refused():
    with pytest.raises(ValueError, match=r"base_bits is of sft, dpo and train-reward: a run's version 0"):
        require_trainer(TrainerConfig(lora=LORA), num_gpus=0, moves_reference=False)
    with pytest.raises(ValueError, match=r"base_bits holds whole weights, .*set trainer\.strategy: ddp"):
        require_optim(SupervisedTrainerConfig(lora=LORA), 2)
    require_optim(SupervisedTrainerConfig(lora=LORA, strategy="ddp"), 2)
