"""The start-up probe: proves, for the model, dtype and device at hand, that logits are invariant (design 3.1).

One sequence is decoded plainly, one token at a time, alone. Then the same tokens are computed in other company:
in batches, as chains and trees with decoys, the widest that the policy may draft, in prefill, under views as long as
the cache, across reduction chunks. Every logit must be bitwise equal.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Iterator
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch import Tensor

from ...core.errors import NotInvariantError, NumericsError, StorageError
from ...core.files import write_whole
from ..attention.backends import CHUNK
from ..decoding.draft_tree import DraftTree, chain, drop_split_nodes
from ..weights.chunks import unique_tensors
from .comparison import is_rounding, tree_logits
from .llama_model import LlamaModel
from .prefill_plan import PrefillPiece, PrefillPlan
from .runner import ModelRunner

PATH_TOKENS = 4
PROBE_SEED = 20251
MOST_SAMPLES = 8
LONGEST_CONTEXT = 4 * CHUNK - 3
WIDEST_TOKENS = 256
"Of all samples' trees in the widest forward that is tried; prefill is tried with twice as many."


def check_invariance(runner: ModelRunner, *, max_nodes: int) -> list[str]:
    """Compare logits bitwise across batch, tree, prefill and view length; return the cases that passed.

    Uses the pool's slots and leaves junk in them: run it before the first sample.
    Raises NumericsError naming the first case that differs and by how much.
    """
    if runner.library_product is not None:
        # a router sends few or many tokens to an expert, and no probe sees all mixtures
        raise NumericsError(
            f"invariant numerics cannot be promised for {type(runner.model).__name__}: {runner.library_product} is "
            "multiplied by outside its linear layers, where rounding depends on the other tokens; set "
            "engine.numerics=fast, which promises the distribution but not every bit"
        )
    passed: list[str] = []
    longest = min(LONGEST_CONTEXT + PATH_TOKENS + max_nodes + 1, runner.pool.capacity)
    runner.pool.memory.hold(np.full(min(MOST_SAMPLES, runner.pool.num_slots), longest))
    for context in _contexts(runner.pool.capacity - max_nodes - PATH_TOKENS - 1):
        generator = torch.Generator().manual_seed(PROBE_SEED + context)
        ids = torch.randint(runner.vocab_size, (context + PATH_TOKENS,), generator=generator)
        ids = ids.to(runner.device)
        base = plain_logits(runner, ids, context)
        for case, logits in _variants(runner, ids, context, max_nodes):
            if not torch.equal(base.expand_as(logits), logits):
                raise _broken(runner, f"{case} at context {context}", base.expand_as(logits), logits)
            passed.append(f"{case} at context {context}")
    return passed


def _broken(runner: ModelRunner, case: str, plain: Tensor, logits: Tensor) -> NumericsError:
    """Fast numerics are offered only where what differs is rounding."""
    by_rounding = is_rounding(plain.flatten(0, -2), logits.flatten(0, -2), runner.model)
    advice = (
        "set engine.numerics=fast, which promises the distribution but not every bit"
        if by_rounding
        else "that is more than rounding, so engine.numerics=fast would be wrong too; take another model"
    )
    kind = NotInvariantError if by_rounding else NumericsError
    return kind(
        f"invariant numerics do not hold here: {case} differs from plain decoding by "
        f"{float((plain - logits).abs().max()):.2e} (model {type(runner.model).__name__}, {runner.model.dtype}, "
        f"{runner.device}); {advice}"
    )


def _contexts(longest: int) -> list[int]:
    """Short, around chunk boundaries, and as long as fits (512 at most: a probe, not a proof by exhaustion)."""
    wanted = [5, CHUNK - 2, CHUNK + 37, 2 * CHUNK - 1, LONGEST_CONTEXT]
    fitting = [context for context in wanted if context <= longest]
    return fitting or [max(longest, 1)]


def plain_logits(runner: ModelRunner, ids: Tensor, context: int) -> Tensor:
    """Logits [PATH, V] of the tokens behind `context`, one at a time in slot 0, prompt prefilled."""
    _prefill(runner, ids[:context], slot=0)
    nothing = chain(ids.new_empty(1, 0), torch.empty(1, 0))
    rows = [
        _logits_behind(runner, ids[position].view(1, 1), nothing, position)[0]
        for position in range(context, context + PATH_TOKENS)
    ]
    return torch.cat(rows)


def _variants(runner: ModelRunner, ids: Tensor, context: int, max_nodes: int) -> Iterator[tuple[str, Tensor]]:
    path = ids[context:]
    _prefill(runner, ids, slot=0, pieces=3)
    yield "prefill in pieces", _logits_by_prefill(runner, ids, context)
    batches = sorted({1, min(3, runner.pool.num_slots), min(MOST_SAMPLES, runner.pool.num_slots)})
    for batch in batches:
        _prefill(runner, ids[:context], slot=0)
        for slot in range(1, batch):
            runner.pool.copy_slot(0, slot, context)
        tree = chain(path[1:].expand(batch, -1), torch.ones(batch, PATH_TOKENS - 1))
        root = path[:1].expand(batch, 1)
        logits = _logits_behind(runner, root, tree, context)
        yield f"chain of {PATH_TOKENS - 1} in a batch of {batch}", logits
        if max_nodes >= PATH_TOKENS:
            extra = runner.pool.capacity - context - PATH_TOKENS
            longer = _logits_behind(runner, root, tree, context, extra_view=extra)
            yield f"the same under a view {extra} tokens longer", longer
            most = max(WIDEST_TOKENS // batch - 1, PATH_TOKENS)
            # the narrow ones at every context, the widest where context costs least
            widths = {min(2 * PATH_TOKENS, max_nodes)} | (
                {min(most, max_nodes)} if context < CHUNK else set()
            )
            for num_nodes in sorted(widths):
                decoyed, numbers = _with_decoys(path, batch, num_nodes)
                kept = decoyed
                if runner.rounds_by_chunk:
                    kept = drop_split_nodes(decoyed, torch.full((batch,), context, device=path.device))
                alive = int((kept.token_ids[0, numbers[1:] - 1] >= 0).long().cumprod(0).sum()) + 1
                logits = _logits_behind(runner, root, decoyed, context)[:, numbers]
                # nodes past a chunk boundary are dropped by the engine: take plain logits in their place
                logits[:, alive:] = longer[:, alive:]
                yield f"tree of {decoyed.num_nodes} with decoys in a batch of {batch}", logits
        if batch > 1:
            _prefill_together(runner, ids[:context], batch)
            logits = _logits_behind(runner, root, tree, context)
            # slots between the first and the last got shorter prompts: their logits mean nothing
            yield f"prompts of {batch} lengths prefilled together", logits[[0, -1]]


def _with_decoys(path: Tensor, batch: int, max_nodes: int) -> tuple[DraftTree, Tensor]:
    """A tree of decoy siblings and the path; returns the numbers of the path's nodes, root first."""
    parents, depth, ids, numbers = [], [], [], [0]
    spare = max_nodes - (PATH_TOKENS - 1)
    for level in range(1, PATH_TOKENS):
        parent, left = numbers[-1], PATH_TOKENS - level
        # before the path's node, so that it is stored the further behind its parent
        for decoy in range(-(-spare // left)):
            ids.append((int(path[level]) + 1 + decoy) % (int(path.max()) + 1))
            parents.append(parent)
            depth.append(level)
            spare -= 1
        ids.append(int(path[level]))
        parents.append(parent)
        depth.append(level)
        numbers.append(len(ids))

    def rows(values: list[int]) -> Tensor:
        return torch.tensor(values, device=path.device).expand(batch, -1)

    tree = DraftTree(
        token_ids=rows(ids),
        parents=rows(parents),
        depth=rows(depth),
        rank=torch.ones_like(rows(ids)),
        scores=torch.ones(batch, len(ids), device=path.device),
        draft_slots=-torch.ones_like(rows(ids)),
        is_chain=False,
    )
    return tree, torch.tensor(numbers, device=path.device)


def _logits_behind(
    runner: ModelRunner, root: Tensor, tree: DraftTree, context: int, *, extra_view: int = 0
) -> Tensor:
    base = torch.full((root.shape[0],), context, device=root.device)
    return tree_logits(runner, root, tree, base, view=context + tree.num_nodes + 1 + extra_view)


def _prefill(runner: ModelRunner, ids: Tensor, *, slot: int, pieces: int = 1) -> None:
    size = -(-len(ids) // pieces)
    for start in range(0, len(ids), size):
        run = ids[start : start + size]
        plan = PrefillPlan(
            pool=runner.pool,
            attention=runner.attention,
            pieces=[PrefillPiece(slot=slot, start=start, length=len(run))],
        )
        runner.fill(run, torch.arange(start, start + len(run), device=ids.device), plan)


def _prefill_together(runner: ModelRunner, ids: Tensor, batch: int) -> None:
    """The whole prompt in the first and the last slot, shorter ones between, in one forward."""
    lengths = [len(ids), *(min(len(ids), 3 * slot) for slot in range(1, batch - 1)), len(ids)]
    pieces = [PrefillPiece(slot=slot, start=0, length=length) for slot, length in enumerate(lengths)]
    plan = PrefillPlan(pool=runner.pool, attention=runner.attention, pieces=pieces)
    positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths])
    runner.fill(ids[positions], positions, plan)


def _logits_by_prefill(runner: ModelRunner, ids: Tensor, context: int) -> Tensor:
    piece = PrefillPiece(slot=0, start=0, length=len(ids))
    plan = PrefillPlan(pool=runner.pool, attention=runner.attention, pieces=[piece])
    return runner.logits(ids, torch.arange(len(ids), device=ids.device), plan)[context:]


Verdict = Literal["holds", "holds_unpacked"]
"The second with plain products, where prepacked ones do not round alike."
_VERDICTS = ("holds", "holds_unpacked")
_PACKAGES = ("torch", "transformers", "numpy", "llvmlite")
logger = logging.getLogger(__name__)


class KeptVerdicts:
    """A folder of verdicts, one file each."""

    def __init__(self, folder: Path) -> None:
        """The folder is made when the first verdict is kept."""
        self._folder = folder

    def read(self, facts: dict[str, Any]) -> Verdict | None:
        """Return what was said of the same facts; None: nothing, or nothing that can be read."""
        try:
            kept = json.loads(self._file(facts).read_text())
            verdict = kept["verdict"]
            if kept["facts"] == facts and verdict in _VERDICTS and kept["digest"] == _digest(facts, verdict):
                return verdict
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass
        return None

    def keep(self, facts: dict[str, Any], verdict: Verdict) -> None:
        """Write a verdict, whole or not at all; where nothing can be written the next start checks again."""
        kept = {"verdict": verdict, "digest": _digest(facts, verdict), "facts": facts}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._file(facts), json.dumps(kept, indent=1))
        except (OSError, ValueError, StorageError) as error:
            logger.info("a start-up verdict is not kept in %s: %s", self._folder, error)

    def _file(self, facts: dict[str, Any]) -> Path:
        return self._folder / f"{_digest(facts, '')}.json"


def facts_of(runner: ModelRunner, *, max_nodes: int) -> dict[str, Any]:
    """What a verdict depends on, as JSON."""
    cuda = runner.device.type == "cuda"
    return {
        "model": _config(runner.model.config.to_json_string(use_diff=False)),
        "weights": [[name, *shape] for name, shape in _shapes(runner.model).items()],
        "dtype": str(runner.model.dtype),
        "forward": type(runner._forward).__name__,
        "attention": getattr(runner.attention, "__name__", type(runner.attention).__name__),
        "backend": runner.backend.name,
        "prepacked": runner.prepacked,
        "vocab_size": runner.vocab_size,
        "num_slots": runner.pool.num_slots,
        "capacity": runner.pool.capacity,
        "max_nodes": max_nodes,
        "device": torch.cuda.get_device_name(runner.device) if cuda else _processor(),
        "threads": torch.get_num_threads(),
        "ranks": 1 if runner.ranks is None else runner.ranks.share.ranks,
        "packages": {name: _version(name) for name in _PACKAGES},
        "code": _code(),
    }


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    if isinstance(model, LlamaModel):
        return model.shapes
    return {name: tuple(tensor.shape) for name, tensor in unique_tensors(model)}


def _config(hf_config_json: str) -> dict[str, Any]:
    """All of a config but where it was read from: the same model in another folder is the same."""
    return {key: value for key, value in json.loads(hf_config_json).items() if key != "_name_or_path"}


def _digest(facts: dict[str, Any], verdict: str) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([facts, verdict], sort_keys=True).encode())


@lru_cache(maxsize=1)
def _processor() -> str:
    """Model, stepping and instructions: library kernels are chosen by them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    keys = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")
    return "; ".join(line for line in lines if line.split(":")[0].strip() in keys)


@lru_cache(maxsize=1)
def _code() -> str:
    """Of every module of the package `engine`."""
    root = Path(__file__).resolve().parents[1]
    whole = xxhash.xxh3_128()
    for path in sorted(root.rglob("*.py")):
        whole.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return whole.hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
