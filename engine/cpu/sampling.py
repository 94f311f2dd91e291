"""From logits to tokens: noise, and the best tokens of perturbed rows, in one pass each (`engine.decoding`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from ..attention.backends import LOG2_E
from .writer import ADDRESS, FLOAT, INTEGER, MINUS_INFINITY, VECTOR, WIDTH, WORDS, Writer

MOST_LEADERS = 5
LEAST_VOCABULARY = WIDTH
"The last vector of a row may overlap the one before, but not begin before the row."
GUMBEL = {
    **dict.fromkeys(("out", "ids", "first", "second"), ADDRESS),
    **dict.fromkeys(("rows", "vocabulary"), INTEGER),
}
LEADERS = {
    **dict.fromkeys(("best", "ids", "logprobs", "logits", "noise", "levels", "divisors", "factors"), ADDRESS),
    **dict.fromkeys(("samples", "nodes", "vocabulary", "sample_stride", "node_stride"), INTEGER),
    **dict.fromkeys(("noise_stride", "level_stride"), INTEGER),
    "share": FLOAT,
}


def leaders_name(count: int) -> str:
    """Return the name of the operation that finds the `count` best tokens of each row."""
    return f"leaders_{count}"


def write_gumbel(module: ir.Module) -> None:
    """`gumbel`: noise [rows, vocabulary] of id words, int32, and two words of each row."""
    w = Writer(module, "gumbel", GUMBEL)
    at = w.at
    with w.loop(at["rows"]) as row:
        first, second = (_same_words(w, at[name], row.index) for name in ("first", "second"))
        out = w.address(at["out"], w.times(row.index, at["vocabulary"]))
        with w.loop(at["vocabulary"], step=WIDTH) as each:
            place = _inside(w, each.index)
            bits = w.ir.add(w.load(at["ids"], place, WORDS), first)
            bits = _mix(w, w.ir.xor(_mix(w, bits), second))
            w.store(_gumbel(w, bits), out, place)
    w.finish()


def write_leaders(module: ir.Module, count: int) -> None:
    """`leaders_<count>`: of logits / divisor + factor * noise, for each sample and node.

    Written are the `count` best values and their ids (int64), largest first, ties to the smaller id, and, with more
    than one, the ids' log-probabilities under softmax(logits / divisor + share * factor * noise). `levels` is each
    node's level of noise; divisors and factors are the samples'.
    """
    w = Writer(module, leaders_name(count), LEADERS)
    at = w.at
    share = w.splat(at["share"])
    with w.loop(at["samples"]) as sample:
        divisor = w.splat(w.load(at["divisors"], sample.index, FLOAT))
        factor = w.splat(w.load(at["factors"], sample.index, FLOAT))
        with w.loop(at["nodes"]) as node:
            row = w.sum(w.times(sample.index, at["nodes"]), node.index)
            offset = w.sum(w.times(sample.index, at["sample_stride"]), w.times(node.index, at["node_stride"]))
            logits = w.address(at["logits"], offset)
            level = w.load(at["levels"], row, INTEGER, element=INTEGER)
            offset = w.sum(w.times(sample.index, at["noise_stride"]), w.times(level, at["level_stride"]))
            noise = w.address(at["noise"], offset)
            nothing = [w.splat(MINUS_INFINITY)] * (count + 1) + [w.words(0)] * count
            with w.loop(at["vocabulary"], step=WIDTH, start=nothing) as each:
                place, numbers, new = _ids(w, each.index)
                scaled = w.ir.fdiv(w.load(logits, place), divisor)
                added = w.ir.fmul(w.load(noise, place), factor)
                value = w.ir.fadd(scaled, added)
                softened = w.fma(share, added, scaled)
                largest, *kept = each.values
                value = w.ir.select(new, value, w.splat(MINUS_INFINITY))
                each.values = [w.larger(softened, largest), *_insert(w, kept, value, numbers, count)]
            largest, *kept = each.values
            found = _merge(w, kept, count)
            row_of = Row(logits, noise, divisor, w.ir.fmul(share, factor))
            total = _sum_of_powers(w, row_of, w.across(w.larger, largest)) if count > 1 else None
            for rank, (value, number) in enumerate(found):
                place = w.sum(w.times(row, count), INTEGER(rank))
                w.store(w.first(value), at["best"], place)
                identity = w.ir.sext(w.first(number), INTEGER)
                w.ir.store(identity, w.address(at["ids"], place, INTEGER), align=8)
                if total is not None:
                    value = row_of.value(w, *(w.splat(w.load(x, identity, FLOAT)) for x in (logits, noise)))
                    w.store(w.first(w.ir.fsub(value, total)), at["logprobs"], place)
    w.finish()


def _insert(w: Writer, kept: list[Any], value: Any, number: Any, count: int) -> list[Any]:
    """Insert a vector into each lane's falling list of values and its list of ids; equals go behind."""
    values, numbers = kept[:count], kept[count:]
    better = None
    for rank in range(count):
        larger = w.ir.fcmp_ordered(">", value, values[rank])
        # behind the place found all move on, equal or not
        better = larger if better is None else w.ir.or_(better, larger)
        values[rank], value = (
            w.ir.select(better, value, values[rank]),
            w.ir.select(better, values[rank], value),
        )
        numbers[rank], number = (
            w.ir.select(better, number, numbers[rank]),
            w.ir.select(better, numbers[rank], number),
        )
    return values + numbers


def _merge(w: Writer, kept: list[Any], count: int) -> list[tuple[Any, Any]]:
    """Take the best of all lanes `count` times: vectors of one value, of one id."""
    values, numbers = kept[:count], kept[count:]
    found = []
    for _ in range(count):
        best = w.across(w.larger, values[0])
        leads = w.ir.fcmp_ordered("==", values[0], best)
        candidates = w.ir.select(leads, numbers[0], w.words(0x7FFFFFFF))
        number = w.across(lambda a, b: w.ir.select(w.ir.icmp_signed("<", a, b), a, b), candidates)
        found.append((best, number))
        taken = w.ir.and_(leads, w.ir.icmp_signed("==", numbers[0], number))
        for rank in range(count):
            behind = values[rank + 1] if rank + 1 < count else w.splat(MINUS_INFINITY)
            values[rank] = w.ir.select(taken, behind, values[rank])
            if rank + 1 < count:
                numbers[rank] = w.ir.select(taken, numbers[rank + 1], numbers[rank])
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """Of logits and noise: what a distribution is the softmax of."""

    logits: Any
    noise: Any
    divisor: Any
    factor: Any

    def value(self, w: Writer, logit: Any, noise: Any) -> Any:
        """Return logit / divisor + factor * noise."""
        return w.fma(self.factor, noise, w.ir.fdiv(logit, self.divisor))


def _sum_of_powers(w: Writer, row: Row, largest: Any) -> Any:
    """The logarithm of the sum of e^x over a row."""
    with w.loop(w.at["vocabulary"], step=WIDTH, start=[w.splat(0.0)]) as each:
        place, _, new = _ids(w, each.index)
        distance = w.ir.fsub(row.value(w, w.load(row.logits, place), w.load(row.noise, place)), largest)
        power = w.exp2(w.ir.fmul(distance, w.splat(LOG2_E)))
        each.values = [w.ir.fadd(each.values[0], w.ir.select(new, power, w.splat(0.0)))]
    return w.ir.fadd(w.log(w.across(w.ir.fadd, each.values[0])), largest)


def _inside(w: Writer, index: Any) -> Any:
    """Where a vector begins that ends inside the row."""
    last = w.ir.sub(w.at["vocabulary"], INTEGER(WIDTH))
    return w.ir.select(w.ir.icmp_signed("<", index, last), index, last)


def _ids(w: Writer, index: Any) -> tuple[Any, Any, Any]:
    """Where a vector begins, its token ids, and which are new: a row's last may repeat ids of the one before."""
    place = _inside(w, index)
    numbers = w.ir.add(_splat_word(w, place), ir.Constant(WORDS, list(range(WIDTH))))
    return place, numbers, w.ir.icmp_signed(">=", numbers, _splat_word(w, index))


def _same_words(w: Writer, base: Any, index: Any) -> Any:
    return _splat_word(w, w.load(base, index, ir.IntType(32)))


def _splat_word(w: Writer, value: Any) -> Any:
    word = value if value.type == ir.IntType(32) else w.ir.trunc(value, ir.IntType(32))
    one = w.ir.insert_element(ir.Constant(WORDS, ir.Undefined), word, ir.IntType(32)(0))
    return w.shuffle(one, one, [0] * WIDTH)


def _mix(w: Writer, x: Any) -> Any:
    """lowbias32, see `engine.decoding.noise`."""
    x = w.ir.mul(w.ir.xor(x, w.ir.lshr(x, w.words(16))), w.words(0x7FEB352D))
    x = w.ir.mul(w.ir.xor(x, w.ir.lshr(x, w.words(15))), w.words(0x846CA68B))
    return w.ir.xor(x, w.ir.lshr(x, w.words(16)))


def _gumbel(w: Writer, bits: Any) -> Any:
    """-log(-log1p(-x)) of x = (bits + 0.5) / 2^32, see `engine.decoding.noise`; log1p keeps small x."""
    one = w.splat(1.0)
    low = w.ir.fadd(w.ir.sitofp(w.ir.and_(bits, w.words(0xFFFF)), VECTOR), w.splat(0.5))
    high = w.ir.sitofp(w.ir.lshr(bits, w.words(16)), VECTOR)
    x = w.fma(high, w.splat(2.0**-16), w.ir.fmul(low, w.splat(2.0**-32)))
    limit = w.splat(1.0 - 2.0**-24)
    x = w.ir.select(w.ir.fcmp_ordered(">", x, limit), limit, x)
    rest = w.ir.fsub(one, x)
    # what rounding 1 - x took away, put back in proportion
    minus = w.ir.fmul(w.log(rest), w.ir.fdiv(x, w.ir.fsub(one, rest)))
    exponential = w.ir.select(w.ir.fcmp_ordered("==", rest, one), x, w.ir.fneg(minus))
    return w.ir.fneg(w.log(exponential))
