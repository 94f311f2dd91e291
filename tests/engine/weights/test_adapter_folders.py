"""An adapter's folder in a model's place is named as one, with the model to name instead."""

from pytest import mark, raises

from rlhfspec.core.errors import ModelError
from rlhfspec.engine.weights.loading import load_hf_config, load_tokenizer


@mark.parametrize("load", [load_hf_config, load_tokenizer])
def test_an_adapter_is_named_with_the_merged_model_beside_it(tmp_path, load):
    adapter, merged = tmp_path / "adapter_0003", tmp_path / "target_0003"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with raises(ModelError, match=r"adapter_0003 is an adapter alone; expected a whole model; merge it"):
        load(str(adapter))
    merged.mkdir()
    (merged / "config.json").write_text("{}")
    with raises(ModelError, match=r"is an adapter alone; .*beside it, .*/target_0003"):
        load(str(adapter))
