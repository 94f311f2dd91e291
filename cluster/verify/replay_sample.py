"""One sample of a run, generated again alone, decode step by decode step: what was drafted, what was accepted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...core.checkpoint_manifest import has_manifest
from ...core.errors import DataError, ModelError, WeightsError
from ...core.records import Completion
from ...core.settings.generation import SpeculationConfig
from ...engine.decoding.draft_tree import DEAD, DraftTree
from ...engine.decoding.running_batch import RunningBatch
from ...engine.decoding.verify import Verdict
from ...engine.drafters.drafter import Drafter
from ...engine.drafters.head.head_weights import HeadWeights
from ...engine.weights.causal_lm import CausalLM
from ...learning.data.prompts import sampling_params
from ...policies.drafting.baselines import FixedPolicy
from ...policies.drafting.draft_policy import DraftPolicy
from ..folder.layout import RunDir
from ..folder.rollouts import Recorded, read_recorded
from ..plan.drafts import MtpLayer, what_drafts
from ..plan.inputs import read_tokenizer
from .choice import RecordedRun, all_locations, why_not_here
from .kept_weights import KeptWeights, find_weights
from .regeneration import Regenerator, Work
from .verification import Difference, Verification, completion_differences


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One decode step that verified a draft."""

    begins: int
    "response tokens before it"
    token_ids: np.ndarray
    "of the draft's N nodes, int64; DEAD: not verified"
    parents: np.ndarray
    "node numbers, 0 is the root"
    accepted: frozenset[int]
    "node numbers, from 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A sample and, where it could be generated again, how it came about."""

    sample: Recorded
    file: str
    "relative to the run folder"
    tokenizer: PreTrainedTokenizerBase
    again: Completion | None
    steps: tuple[Step, ...]
    drafted_by: str
    "drafter and policy of these steps, in words"
    why_not: str
    "why it was not generated again; empty where it was"
    differences: tuple[Difference, ...] = ()


def replay_sample(run: RecordedRun, sample_index: int) -> Replayed:
    """Find a sample by its index and generate it again, alone, with the run's drafter.

    Raises DataError: the run has no such sample, or its file cannot be read; ModelError for a tokenizer.
    """
    verification, config = Verification(seed=0), run.config
    found = [
        location for location in all_locations(run, verification) if location.key.sample_index == sample_index
    ]
    if not found:
        unread = "; ".join(str(one) for one in verification.differences if one.sample is None)
        raise DataError(
            f"{run.folder} has no sample {sample_index} in its {verification.num_recorded} recorded ones; "
            "indices count from 0" + (f" ({unread})" if unread else "")
        )
    (sample,) = read_recorded(found)
    tokenizer = read_tokenizer(config.models, config.run.template_time)
    file = run.relative(sample.location.file)
    weights = find_weights(run.folder, config.models.target)
    lacking = (_without_weights(weights, version) for version in sample.location.weight_versions)
    why_not = why_not_here(run) or next(filter(None, lacking), "")
    if why_not:
        return _only_recorded(sample, file, tokenizer, why_not)
    try:
        again, steps, drafted_by = _generate(run, tokenizer, weights, sample)
    except (WeightsError, ModelError, DataError) as error:
        return _only_recorded(sample, file, tokenizer, str(error))
    recorded = sample.rollout.completion
    return Replayed(
        sample=sample,
        file=file,
        tokenizer=tokenizer,
        again=again,
        steps=steps,
        drafted_by=drafted_by,
        why_not="",
        differences=tuple(completion_differences(file, recorded, again, ends=recorded.sampled is None)),
    )


def _only_recorded(sample: Recorded, file: str, tokenizer: PreTrainedTokenizerBase, why_not: str) -> Replayed:
    return Replayed(
        sample=sample,
        file=file,
        tokenizer=tokenizer,
        again=None,
        steps=(),
        drafted_by="",
        why_not=why_not,
    )


def _without_weights(weights: KeptWeights, version: int) -> str:
    if version in weights.targets:
        return ""
    if version in weights.damaged:
        return f"the weights of version {version} are damaged"
    return f"the weights of version {version} are not kept; run.checkpoint_every=1 keeps every one"


def _generate(
    run: RecordedRun,
    tokenizer: PreTrainedTokenizerBase,
    weights: KeptWeights,
    sample: Recorded,
) -> tuple[Completion, tuple[Step, ...], str]:
    versions = tuple(dict.fromkeys(sample.location.weight_versions))
    config = run.config
    policy, said = _policy(config.speculation)
    draft, whose = _draft(run, sample.location.iteration)
    sampling = sampling_params(config.sampling, tokenizer, model=config.models.target)
    regenerator = Regenerator(
        run,
        tokenizer,
        sampling,
        {version: weights.targets[version] for version in versions},
        max_total_tokens=len(sample.rollout.prompt.token_ids) + sampling.max_new_tokens,
        draft=draft,
        policy=policy,
    )
    watched: _WatchedDrafter | None = None
    if regenerator.engine.drafter is not None:
        watched = _WatchedDrafter(regenerator.engine.drafter)
        regenerator.engine.drafter = cast(Drafter, watched)
    again = sample.rollout.completion
    for version in versions:
        so_far = replace(sample, rollout=replace(sample.rollout, completion=again))
        done = regenerator.run(Work(weight_version=version, samples=[so_far]))
        if done.completions[0] is None:
            raise DataError("; ".join(done.refused.values()))
        again = done.completions[0]
    return again, tuple(watched.steps) if watched else (), f"{whose}, {said}"


def _policy(speculation: SpeculationConfig) -> tuple[DraftPolicy, str]:
    """The run's policy where it decides by nothing but its settings, else a fixed one."""
    if not speculation.drafts:
        return FixedPolicy(num_nodes=0, depth=0, branching=1), "plain decoding"
    shape = {name: getattr(speculation, name) for name in ("num_nodes", "depth", "branching")}
    words = f"{shape['num_nodes']} nodes a step"
    if speculation.policy != "fixed":
        words += f" ({speculation.policy} chose by the whole batch)"
    return FixedPolicy(**shape), words


def _draft(run: RecordedRun, iteration: int) -> tuple[CausalLM | HeadWeights | None, str]:
    """The draft model, or the head, that iteration had, where it is kept, else the first one; an MTP layer stays."""
    config = run.config
    drafts = what_drafts(config) if config.speculation.has_draft else None
    if drafts is None:
        return None, f"drafter {config.speculation.drafter}"
    if isinstance(drafts, MtpLayer):
        return drafts.read(), "the target's MTP layer"
    folder = RunDir(path=run.folder).checkpoint_dir("draft", iteration - 1)
    is_kept = iteration > 0 and has_manifest(folder)
    weights = drafts.read(str(folder) if is_kept else None)
    if is_kept or not iteration:
        return weights, f"the iteration's {drafts.title}"
    return weights, f"the first {drafts.title} (the iteration's is not kept)"


class _WatchedDrafter:
    """Passes everything on to a drafter and notes what became of its drafts of the only sample."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.steps: list[Step] = []

    def working(self) -> _WatchedDrafter:
        """See `Drafter`: itself."""
        return self

    def commit(self, batch: RunningBatch, tree: DraftTree, verdict: Verdict) -> object:
        """Note the verdict."""
        count = int(verdict.num_accepted[0])
        self.steps.append(
            Step(
                begins=int(batch.lengths[0] - batch.prompt_lengths[0]),
                token_ids=tree.token_ids[0].cpu().numpy(),
                parents=tree.parents[0].cpu().numpy(),
                accepted=frozenset(verdict.path[0, 1 : count + 1].tolist()),
            )
        )
        return self._drafter.commit(batch, tree, verdict)

    def __getattr__(self, name: str) -> object:
        return getattr(self._drafter, name)


def sample_lines(replayed: Replayed) -> Iterator[str]:
    """All that is known of the sample, then its decode steps."""
    where, rollout = replayed.sample.location, replayed.sample.rollout
    completion, reward = rollout.completion, rollout.reward
    parts = ", ".join(f"{name} {value:g}" for name, value in reward.parts.items())
    advantage = replayed.sample.advantage
    yield f"sample {where.key.sample_index} of iteration {where.iteration + 1} ({replayed.file}, row {where.row})"
    yield f"prompt {rollout.prompt.prompt_id} ({len(rollout.prompt.token_ids)} tokens): {rollout.prompt.text}"
    yield f"response ({completion.num_tokens} tokens, {completion.finish_reason}): {rollout.response_text}"
    yield f"reward {reward.value:g}" + (f" ({parts})" if parts else "")
    if advantage is not None:
        yield f"advantage {advantage:g}"
    yield (
        f"generated by {completion.instance} with {_versions_text(completion)}, in "
        f"{completion.num_decode_steps} decode steps; {completion.num_accepted_tokens} drafted tokens accepted"
    )
    if replayed.again is None:
        yield f"not generated again: {replayed.why_not}"
        return
    yield f"generated again, alone ({replayed.drafted_by}); drafted tokens that were accepted are in brackets"
    yield from _step_lines(replayed)
    yield from (f"DIFFERS {difference}" for difference in replayed.differences)
    if not replayed.differences:
        yield "tokens and log-probabilities are those of the file, bit for bit"


def _versions_text(completion: Completion) -> str:
    """Its weight version; of several, from which token on each."""
    spans = completion.weight_spans
    if len(spans) == 1:
        return f"weight version {spans[0].weight_version}"
    return "weight versions " + ", ".join(
        f"{span.weight_version} from token {span.first_position}" for span in spans
    )


def _step_lines(replayed: Replayed) -> Iterator[str]:
    """Each decode step in a line: what it emitted, and its draft, accepted nodes in brackets."""
    again = replayed.again
    assert again is not None
    by_begin = {step.begins: step for step in replayed.steps}
    begin, number = 0, 0
    while begin < again.num_tokens:
        number += 1
        step = by_begin.get(begin)
        end = min(begin + 1 + (len(step.accepted) if step else 0), again.num_tokens)
        emitted = _text(replayed.tokenizer, again.token_ids[begin:end])
        if step is None:
            yield f"step {number:3}: {emitted}  (nothing drafted)"
        else:
            live = int((step.token_ids != DEAD).sum())
            yield (
                f"step {number:3}: {emitted}  {len(step.accepted)} of {live} accepted: "
                f"{_drawn(replayed.tokenizer, step, 0)}"
            )
        begin = end


def _drawn(tokenizer: PreTrainedTokenizerBase, step: Step, parent: int) -> str:
    """The tree below a node: `[a] [b] c` a chain, `(... | ...)` where it branches, accepted nodes in brackets."""
    words: list[str] = []
    while True:
        children = [
            node
            for node in range(1, len(step.token_ids) + 1)
            if step.parents[node - 1] == parent and step.token_ids[node - 1] != DEAD
        ]
        if not children:
            return " ".join(words)
        if len(children) > 1:
            arms = " | ".join(
                " ".join(filter(None, (_word(tokenizer, step, child), _drawn(tokenizer, step, child))))
                for child in children
            )
            return " ".join([*words, f"( {arms} )"])
        (parent,) = children
        words.append(_word(tokenizer, step, parent))


def _word(tokenizer: PreTrainedTokenizerBase, step: Step, node: int) -> str:
    text = _text(tokenizer, step.token_ids[node - 1 : node])
    return f"[{text}]" if node in step.accepted else text


def _text(tokenizer: PreTrainedTokenizerBase, token_ids: np.ndarray) -> str:
    return repr(tokenizer.decode(token_ids.tolist(), clean_up_tokenization_spaces=False))
