"""Hand-made views of a pool: lengths by instance."""

from collections.abc import Iterable, Sequence

import numpy as np

from rlhfspec.core.records import SampleKey
from rlhfspec.policies.reallocation.gate import Gate
from rlhfspec.policies.reallocation.pool_records import InstanceView, Move, PoolView
from rlhfspec.policies.reallocation.rate_curve import RateCurve
from rlhfspec.profiles.transfer import PrefillModel, TransferModel

CURVE_POINTS = ((1, 2, 4, 8, 16, 32), (440.0, 700.0, 1000.0, 1250.0, 1440.0, 1570.0))
"Tokens per second of a small model on a CPU core with speculation: it saturates at about 8 samples."


def cpu_curve() -> RateCurve:
    return RateCurve(*CURVE_POINTS)


def cheap_gate() -> Gate:
    """Moves cost next to nothing."""
    return Gate(
        kv_bytes_per_token=1e3,
        transfer=TransferModel(latency_s=1e-3, bytes_per_s=1e10, open_s=0.0),
        prefill=PrefillModel(fixed_s=1.0),
    )


def pool_view(
    *lengths: Sequence[int],
    num_slots: int = 32,
    num_queued: int = 0,
    now_s: float = 0.0,
    max_new_tokens: int = 256,
    prompt_tokens: int = 10,
    arriving: Sequence[int] = (),
    leaving: Sequence[int] = (),
) -> PoolView:
    """Instances gen-0, gen-1, .. with samples of these lengths; sample 1000 k + i is the i-th of gen-k."""
    views = []
    for k, tokens in enumerate(lengths):
        response = np.array(tokens, dtype=np.int64)
        views.append(
            InstanceView(
                instance=f"gen-{k}",
                num_slots=num_slots,
                keys=tuple(SampleKey(run_seed=0, sample_index=1000 * k + i) for i in range(len(tokens))),
                response_tokens=response,
                context_tokens=response + prompt_tokens,
                num_arriving=arriving[k] if arriving else 0,
                num_leaving=leaving[k] if leaving else 0,
            )
        )
    return PoolView(now_s=now_s, instances=tuple(views), num_queued=num_queued, max_new_tokens=max_new_tokens)


def after(view: PoolView, moves: Iterable[Move], *, now_s: float, extra_tokens: int = 0) -> PoolView:
    """The view when these moves have been made and every sample has so many tokens more."""
    where = {move.key: move.destination for move in moves}
    rows: dict[str, list[tuple[SampleKey, int, int]]] = {i.instance: [] for i in view.instances}
    for instance in view.instances:
        lists = zip(instance.keys, instance.response_tokens, instance.context_tokens, strict=True)
        for key, response, context in lists:
            row = (key, int(response) + extra_tokens, int(context) + extra_tokens)
            rows[where.get(key, instance.instance)].append(row)
    return PoolView(
        now_s=now_s,
        instances=tuple(
            InstanceView(
                instance=i.instance,
                num_slots=i.num_slots,
                keys=tuple(row[0] for row in rows[i.instance]),
                response_tokens=np.array([row[1] for row in rows[i.instance]], dtype=np.int64),
                context_tokens=np.array([row[2] for row in rows[i.instance]], dtype=np.int64),
            )
            for i in view.instances
        ),
        num_queued=view.num_queued,
        max_new_tokens=view.max_new_tokens,
    )
