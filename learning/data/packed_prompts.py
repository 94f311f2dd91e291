"""Prompts in Arrow batches: a million take some hundred bytes each, and become `Prompt`s when they are asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import pyarrow as pa

from ...core.records import Prompt

_BATCH = 1024
_TURN = pa.struct([("role", pa.string()), ("content", pa.string())])
_SCHEMA = pa.schema(
    [
        ("prompt_id", pa.int64()),
        ("token_ids", pa.large_list(pa.int32())),
        ("text", pa.large_string()),
        ("reference", pa.large_string()),
        ("messages", pa.list_(_TURN)),
        ("fields", pa.string()),
        ("rendered", pa.large_string()),
        ("prefill", pa.string()),
        ("whole", pa.large_string()),
    ]
)


class PackedPrompts(Sequence[Prompt]):
    """A sequence of prompts that cannot be changed."""

    def __init__(self, batches: Sequence[pa.RecordBatch], *, fingerprint: str, max_tokens: int) -> None:
        self._batches = tuple(batches)
        self._length = sum(batch.num_rows for batch in batches)
        self.fingerprint = fingerprint
        "equal for equal prompts in equal order"
        self.max_tokens = max_tokens
        "of the longest prompt; 0 of none"

    @classmethod
    def of(cls, prompts: Iterable[Prompt]) -> PackedPrompts:
        """Pack prompts."""
        packer = PromptPacker()
        for prompt in prompts:
            packer.add(prompt)
        return packer.packed()

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Prompt, ...]: ...
    def __getitem__(self, index: int | slice) -> Prompt | tuple[Prompt, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(self._length)))
        number = index + self._length if index < 0 else index
        if not 0 <= number < self._length:
            raise IndexError(f"prompt {index} of {self._length}")
        batch, row = self._batches[number // _BATCH], number % _BATCH
        whole = json.loads(batch.column("whole")[row].as_py() or "{}")
        return Prompt(
            prompt_id=batch.column("prompt_id")[row].as_py(),
            token_ids=batch.column("token_ids")[row].values.to_numpy().astype(np.int64),
            text=batch.column("text")[row].as_py(),
            reference=batch.column("reference")[row].as_py(),
            messages=tuple(
                (turn["role"], turn["content"]) for turn in batch.column("messages")[row].as_py() or ()
            ),
            fields=json.loads(batch.column("fields")[row].as_py() or "{}"),
            rendered=batch.column("rendered")[row].as_py() or "",
            prefill=batch.column("prefill")[row].as_py() or "",
            turns=tuple(whole.get("turns", ())),
            tools=tuple(whole.get("tools", ())),
        )

    def __iter__(self) -> Iterator[Prompt]:
        return (self[number] for number in range(self._length))

    @property
    def has_conversations(self) -> bool:
        """Whether any prompt has messages."""
        return any(batch.column("messages").null_count < batch.num_rows for batch in self._batches)

    @property
    def num_bytes(self) -> int:
        """Memory that the prompts take."""
        return sum(batch.nbytes for batch in self._batches)


class PromptPacker:
    """Takes prompts one by one; their fingerprint is computed on the way."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._rows: list[dict[str, Any]] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self._max_tokens = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, prompt: Prompt) -> None:
        """Take one more prompt."""
        ids = np.asarray(prompt.token_ids, dtype=np.int32)
        whole = {"turns": prompt.turns, "tools": prompt.tools} if prompt.turns or prompt.tools else None
        words = (prompt.text, prompt.reference, prompt.messages, prompt.fields, *([whole] if whole else []))
        said = json.dumps([len(ids), *words], sort_keys=True).encode()
        self._hash.update(ids.tobytes() + said)
        self._rows.append(
            {
                "prompt_id": prompt.prompt_id,
                "token_ids": ids,
                "text": prompt.text,
                "reference": prompt.reference,
                "messages": [{"role": role, "content": content} for role, content in prompt.messages] or None,
                "fields": json.dumps(prompt.fields) if prompt.fields else None,
                "rendered": prompt.rendered or None,
                "prefill": prompt.prefill or None,
                "whole": json.dumps(whole) if whole else None,
            }
        )
        self._length += 1
        self._max_tokens = max(self._max_tokens, len(ids))
        if len(self._rows) == _BATCH:
            self._flush()

    def packed(self) -> PackedPrompts:
        """All that was taken."""
        if self._rows:
            self._flush()
        return PackedPrompts(self._batches, fingerprint=self._hash.hexdigest(), max_tokens=self._max_tokens)

    def _flush(self) -> None:
        self._batches.append(pa.RecordBatch.from_pylist(self._rows, schema=_SCHEMA))
        self._rows = []
