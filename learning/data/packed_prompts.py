"""Prompts as bytes: a million take some hundred bytes each, and become `Prompt`s when they are asked for."""

from __future__ import annotations

import hashlib
import json
import marshal
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np

from ...core.records import Prompt

_MORE = ("messages", "turns", "tools", "fields", "rendered", "prefill", "teacher_ids")
"What most prompts have none of, as JSON."


class PackedPrompts(Sequence[Prompt]):
    """A sequence of prompts; their fingerprint is computed as they are taken."""

    def __init__(self, prompts: Iterable[Prompt] = ()) -> None:
        self._rows: list[bytes] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self.max_tokens = 0
        "of the longest prompt; 0 of none"
        self.max_teacher_tokens = 0
        "the same of what a teacher reads"
        self.has_conversations = False
        "whether any prompt has messages"
        for prompt in prompts:
            self.add(prompt)

    def add(self, prompt: Prompt) -> None:
        """Take one more prompt, while they are read."""
        ids = np.asarray(prompt.token_ids, dtype=np.int32)
        whole = [{"turns": prompt.turns, "tools": prompt.tools}] if prompt.turns or prompt.tools else []
        of_teacher = [prompt.teacher_ids] if prompt.teacher_ids else []
        said = [len(ids), prompt.text, prompt.reference, prompt.messages, prompt.fields, *whole, *of_teacher]
        self._hash.update(ids.tobytes() + json.dumps(said, sort_keys=True).encode())
        more = {name: value for name in _MORE if (value := getattr(prompt, name))}
        self._rows.append(
            marshal.dumps(
                (
                    int(prompt.prompt_id),
                    ids.tobytes(),
                    str(prompt.text),
                    str(prompt.reference),
                    json.dumps(more) if more else None,
                )
            )
        )
        self.max_tokens = max(self.max_tokens, len(ids))
        self.max_teacher_tokens = max(self.max_teacher_tokens, len(prompt.teacher_ids or ids))
        self.has_conversations |= bool(prompt.messages)

    def __reduce__(self) -> tuple[type[PackedPrompts], tuple[list[Prompt]]]:
        """By its prompts: a hash that goes on cannot be pickled."""
        return PackedPrompts, (list(self),)

    @property
    def fingerprint(self) -> str:
        """Equal for equal prompts in equal order."""
        return self._hash.hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Prompt, ...]: ...
    def __getitem__(self, index: int | slice) -> Prompt | tuple[Prompt, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        prompt_id, ids, text, reference, kept = marshal.loads(self._rows[index])
        more = json.loads(kept or "{}")
        return Prompt(
            prompt_id=prompt_id,
            token_ids=np.frombuffer(ids, dtype=np.int32).astype(np.int64),
            text=text,
            reference=reference,
            messages=tuple((role, content) for role, content in more.pop("messages", ())),
            turns=tuple(more.pop("turns", ())),
            tools=tuple(more.pop("tools", ())),
            teacher_ids=tuple(more.pop("teacher_ids", ())),
            **more,
        )
