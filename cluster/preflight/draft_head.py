"""What can be known to be wrong with a draft head or MTP layer before a run, and its sizes for the memory plan."""

from __future__ import annotations

from pathlib import Path

from transformers.configuration_utils import PretrainedConfig

from rlhfspec.cluster.placement.memory_plan import ModelShape
from rlhfspec.cluster.weights.first_weights import mtp_checkpoint, read_mtp
from rlhfspec.core.config import Config
from rlhfspec.engine.cache.kv_pool import KVShape, cell_size
from rlhfspec.engine.drafters.head.head_weights import HeadConfig, HeadWeights, load_head, require_fit
from rlhfspec.engine.weights.bare_llama import MODEL_TYPES


def check_head(folder: str, target: PretrainedConfig) -> tuple[ModelShape, str]:
    """Read the head in a folder and compare it with the target.

    Returns:
        Its sizes, and a line that describes it.

    Raises:
        ModelError: the folder holds no head, a tensor lacks or is not finite, or it is of another target.
    """
    head = load_head(
        Path(folder).expanduser(), num_target_layers=int(target.get_text_config().num_hidden_layers)
    )
    require_fit(head.config, target)
    return head_shape(head.config), _describe(folder, head)


def check_mtp(config: Config) -> tuple[ModelShape, str]:
    """Read the MTP layer that is to draft, as `check_head` does a head.

    Raises ModelError: the checkpoint has none, one of another form, or of another target.
    """
    found = read_mtp(config)
    others = f"; the first of {found.num_layers} drafts, over and over" if found.num_layers > 1 else ""
    line = (
        f"MTP layer of {mtp_checkpoint(config)}: {found.head.num_trained / 1e6:.2f}M parameters, on the output of the "
        f"target's last layer{others}; it stays as it is, the target's embedding and output go with the target; "
        "checkpoints of the run do not hold it, models.draft names this one to draft for them"
    )
    return head_shape(found.head.config), line


def head_shape(head: HeadConfig) -> ModelShape:
    """Sizes of a head: one layer, logits over its own vocabulary."""
    return ModelShape(
        num_params=head.num_trained,
        kv=KVShape(
            num_layers=1,
            num_kv_heads=head.num_kv_heads,
            num_heads=head.num_heads,
            head_size=cell_size(head.head_size),
        ),
        hidden_size=head.hidden_size,
        vocab_size=head.draft_vocab_size,
    )


def describe_training(config: Config, target: PretrainedConfig) -> str:
    """Say whether a head will be trained, and where not, why."""
    training, kind = config.drafter_training, target.get_text_config().model_type
    if config.trains_head and kind not in MODEL_TYPES:
        return f"the head stays as it is: a '{kind}' target teaches none ({', '.join(MODEL_TYPES)} do)"
    if config.trains_head:
        return (
            "the head is trained by instances that have no samples, from at most "
            f"{training.buffer_mb:g} MB of hidden states each, and published after an update where it is no worse"
        )
    why = "drafter_training.spot is off"
    if not training.refit:
        why = "drafter_training.refit is false"
    elif config.speculation.policy == "off":
        why = "speculation.policy is off"
    elif config.decodes_on_gpu:
        why = "instances on GPUs train none so far"
    return f"the head stays as it is: {why}"


def _describe(folder: str, head: HeadWeights) -> str:
    config = head.config
    taps = ", ".join(str(layer) for layer in config.tapped_layers)
    return (
        f"draft head {folder}: {head.num_trained / 1e6:.2f}M parameters, {config.draft_vocab_size:,} of the target's "
        f"{config.vocab_size:,} token ids, hidden states before layers {taps}"
    )
