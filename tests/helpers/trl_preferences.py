"""TRL's own preference losses and gradients, beside ours: what `test_direct_preferences.py` runs with TRL on the path.

Prints one JSON object: of each loss type the loss of both, and the difference of the gradients over the norm.
"""

from __future__ import annotations

import importlib
import json
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import torch
from supervised_items import PAD, VOCABULARY, feedback_items, tiny

from rlhfspec.core.settings.supervised import DpoLossConfig, DpoTrainerConfig
from rlhfspec.learning.training.objectives.direct_preferences import DirectPreferences
from rlhfspec.learning.training.supervised_job import SupervisedLearner

CASES = {
    "sigmoid": DpoLossConfig(beta=0.3),
    "hinge": DpoLossConfig(type="hinge", beta=0.3),
    "ipo": DpoLossConfig(type="ipo", beta=0.3),
    "kto": DpoLossConfig(type="kto", beta=0.3, desirable_weight=1.5, undesirable_weight=0.75),
    "orpo": DpoLossConfig(type="orpo", beta=0.3),
}
ACCELERATOR = SimpleNamespace(
    device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x, unwrap_model=lambda x: x
)


def padded(rows, value):
    """Rows of unlike lengths as [B, T]."""
    rows = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def inputs_of(responses, prefix=""):
    """A batch as TRL's collators make it."""
    return {
        f"{prefix}input_ids": padded([one.token_ids for one in responses], PAD),
        f"{prefix}attention_mask": padded([[1] * one.num_tokens for one in responses], 0),
        f"{prefix}completion_mask": padded([one.is_learned for one in responses], 0),
    }


def own_trainer(kind, loss, model):
    """A trainer of TRL without its set-up, which wants files and devices: what its loss reads."""
    module, name = {
        "kto": ("trainer.kto_trainer", "KTOTrainer"),
        "orpo": ("experimental.orpo.orpo_trainer", "ORPOTrainer"),
    }.get(kind, ("trainer.dpo_trainer", "DPOTrainer"))
    trainer = object.__new__(getattr(importlib.import_module(f"trl.{module}"), name))
    for name, value in {
        "model": model, "accelerator": ACCELERATOR, "aux_loss_enabled": False, "beta": loss.beta,
        "precompute_ref_logps": True, "ld_alpha": None, "f_divergence_type": "reverse_kl", "use_weighting": False,
        "loss_types": [kind], "loss_weights": [1.0], "label_smoothing": 0.0, "loss_type": kind,
        "calculate_KL": True, "desirable_weight": loss.desirable_weight, "_total_train_tokens": 0, "_tp_size": 1,
        "undesirable_weight": loss.undesirable_weight, "is_encoder_decoder": False, "padding_value": PAD,
        "_metrics": {mode: defaultdict(list) for mode in ("train", "eval")},
    }.items():  # fmt: skip
        setattr(trainer, name, value)
    return trainer


def theirs(kind, loss, model, items):
    """TRL's loss of a batch."""
    trainer = own_trainer(kind, loss, model)
    if kind == "orpo":
        batch = {}
        for side, index in (("chosen", 0), ("rejected", 1)):
            given = inputs_of([one.responses[index] for one in items], f"{side}_")
            mask = given.pop(f"{side}_completion_mask")
            labels = given[f"{side}_input_ids"].masked_fill(mask == 0, -100)
            batch |= {**given, f"{side}_labels": labels}
        return trainer.get_batch_loss_metrics(model, batch)[0]
    fields = ("log_probs", "entropy", "mean_logits", "is_top1")
    importlib.import_module("trl.trainer.utils").add_fused_lm_head(model, outputs=fields)
    if kind == "kto":
        batch = inputs_of([one.responses[0] for one in items]) | {
            **inputs_of([one.unrelated[0] for one in items], "KL_"),
            "label": torch.tensor([one.is_chosen[0] for one in items]),
            "ref_logps": torch.tensor([float(one.reference[0]) for one in items]),
            "ref_KL_logps": torch.tensor([float(one.reference[1]) for one in items]),
        }
    else:
        batch = inputs_of([one.responses[side] for side in (0, 1) for one in items])
        for side, name in enumerate(("ref_chosen_logps", "ref_rejected_logps")):
            batch[name] = torch.tensor([float(one.reference[side]) for one in items])
    return trainer._compute_loss(model, batch, False)


def mild():
    """Less far from uniform than the others' model, so that rounding stays below what is compared."""
    model = tiny("dpo")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    return model


def main():
    """Compare all."""
    found = {}
    for kind, loss in CASES.items():
        items = feedback_items(7, 1, single=kind == "kto", unrelated=kind == "kto")
        items = [replace(one, reference=()) for one in items] if kind == "orpo" else items
        model = mild().train()
        expected = theirs(kind, loss, model, items)
        expected.backward()
        settings = DpoTrainerConfig(max_tokens_per_forward=24)
        learner = SupervisedLearner(
            mild(), DirectPreferences(loss=loss, vocab_size=VOCABULARY), settings, total_steps=1, seed=0
        )
        batch = learner.batch(items)
        for pack in batch.packs:
            batch.loss(learner.model, pack).backward()
        batch.finish()
        theirs_of, ours_of = (
            torch.cat([one.grad.flatten() for one in of.parameters()]) for of in (model, learner.model)
        )
        gap = float((theirs_of - ours_of).norm() / theirs_of.norm())
        found[kind] = {"theirs": expected.item(), "ours": batch.means["loss"], "gradient": gap}
        found[kind]["packs"] = len(batch.packs)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
