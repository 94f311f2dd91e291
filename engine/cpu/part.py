"""Part of a segment at one KV head: the tokens whose rows of weights are kept at a time, one row for each query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhfspec.engine.cpu.writer import INTEGER, Writer


class Part:
    """Addresses of what belongs to each row; rows lie token by token, query by query."""

    def __init__(
        self, w: Writer, segment: Mapping[str, Any], *, head: Any, begin: Any, tokens: Any, size: int
    ) -> None:
        """`begin` is the first of the segment's tokens that belong to the part, `tokens` their number."""
        self.w, self.segment, self.begin, self.tokens, self.size = w, segment, begin, tokens, size
        self.rows = w.times(tokens, w.at["queries"])
        self.is_chain = w.ir.icmp_signed("==", segment["seen"], INTEGER(0))
        first = w.ir.add(segment["first"], begin)
        self._place = w.sum(w.times(first, w.at["heads"]), head)

    def weights(self, row: Any) -> Any:
        """Where a row's scores, then its weights, are kept."""
        return self.w.address(self.w.at["weights"], self.w.times(row, self.w.at["capacity"]))

    def query(self, row: Any) -> Any:
        """A row's query, in [tokens, heads, queries + 2, size]."""
        return self._element("qkv", row, self.w.ir.add(self.w.at["queries"], INTEGER(2)))

    def out(self, row: Any) -> Any:
        """Where a row's result goes, in [tokens, heads, queries, size]."""
        return self._element("out", row, self.w.at["queries"])

    def _element(self, name: str, row: Any, lanes: Any) -> Any:
        w = self.w
        token, query = w.ir.udiv(row, w.at["queries"]), w.ir.urem(row, w.at["queries"])
        place = w.sum(self._place, w.times(token, w.at["heads"]))
        return w.address(w.at[name], w.times(w.sum(w.times(place, lanes), query), self.size))
