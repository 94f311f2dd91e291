"""Switching a model's attention takes effect or is an error."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from rlhfspec.core.errors import ModelError
from rlhfspec.engine.model.support import switch_attention


def new_config() -> LlamaConfig:
    """Each model's own: switching writes to it."""
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    config._attn_implementation = "eager"
    return config


class Deaf(LlamaForCausalLM):
    """Keeps the attention it was made with."""

    def set_attn_implementation(self, attn_implementation, *args, **kwargs) -> None:
        pass


def test_attention_is_what_it_was_switched_to() -> None:
    model = LlamaForCausalLM(new_config())
    switch_attention(model, "sdpa")
    assert model.config._attn_implementation == "sdpa"


def test_attention_that_stays_is_an_error() -> None:
    model = Deaf(new_config())
    with pytest.raises(
        ModelError, match="its attention was to be 'sdpa', and is 'eager' after it was switched"
    ):
        switch_attention(model, "sdpa")
