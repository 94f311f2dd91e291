"""How likely each way down a chain is accepted, by the acceptance model (`refinement.Scorer`, in numpy)."""

from __future__ import annotations

from llvmlite import ir

from engine.cpu.writer import ADDRESS, FLOAT, INTEGER, LOG2_E, WIDTH, Writer
from profiles.acceptance import MARGIN_FLOOR

FARTHEST = 50.0
"Largest margin and least log-probability that the model is shown, nats."
COEFFICIENTS = 4
"Of a level: intercept, log margin, margin, log-probability."
PATHS: dict[str, ir.Type] = {
    **dict.fromkeys(("paths", "before", "best", "logprobs", "coefficients"), ADDRESS),
    "samples": INTEGER,
}


def write_paths(module: ir.Module) -> None:
    """`paths`: a level's acceptance, given the level before, times that level's path.

    `best` and `logprobs` are those of the level's two best tokens, [samples, 2]. Rows are read and written to the next
    multiple of WIDTH samples.
    """
    w = Writer(module, "paths", PATHS)
    at = w.at
    intercept, of_log, of_margin, of_logprob = (
        w.splat(w.load(at["coefficients"], INTEGER(i), FLOAT)) for i in range(COEFFICIENTS)
    )
    limit, one = w.splat(FARTHEST), w.splat(1.0)
    first, second = (list(range(start, 2 * WIDTH, 2)) for start in (0, 1))
    with w.loop(at["samples"], step=WIDTH) as each:
        pairs = w.times(each.index, 2)
        behind = w.sum(pairs, INTEGER(WIDTH))
        low, high = (w.load(at["best"], place) for place in (pairs, behind))
        margin = w.ir.fsub(w.shuffle(low, high, first), w.shuffle(low, high, second))
        # a NaN compares with nothing: it stays
        margin = w.ir.select(w.ir.fcmp_ordered(">", margin, limit), limit, margin)
        low, high = (w.load(at["logprobs"], place) for place in (pairs, behind))
        logprob = w.larger(w.ir.fneg(limit), w.shuffle(low, high, first))
        logit = w.fma(of_log, w.log(w.ir.fadd(margin, w.splat(MARGIN_FLOOR))), intercept)
        logit = w.fma(of_logprob, logprob, w.fma(of_margin, margin, logit))
        odds = w.exp2(w.ir.fmul(logit, w.splat(-LOG2_E)))
        share = w.ir.fdiv(one, w.ir.fadd(one, odds))
        w.store(w.ir.fmul(w.load(at["before"], each.index), share), at["paths"], each.index)
    w.finish()
