"""CTranslate2 as a peer: its Generator on the CPU, beam 1, batch as given.

It names tokens by strings, so a token id's decimal digits are its name; a checkpoint's own tokenizer is not
used and need not exist. The engine keeps its KV cache in the arithmetic's dtype and has no prefix caching.
It feeds prompts together up to the shortest one's length and the rest token by token: that is how it batches,
and prompts of mixed lengths cost it time. bfloat16 needs a processor with instructions for it.
Checked in float32 on a random 2-layer Llama: 512 of 512 greedy tokens are those of Hugging Face `generate`.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

from serving import Generate, ModelOrder, converted, serve


def load(order: ModelOrder) -> tuple[str, Generate]:
    """Load the converted model; the batch is bounded by the prompts of one call."""
    import ctranslate2  # pyright: ignore[reportMissingImports]

    release = version("ctranslate2")
    model = converted(order.model, f"ctranslate2-{release}", lambda folder: convert(order.model, folder))
    ctranslate2.set_random_seed(0)
    generator = ctranslate2.Generator(
        str(model), device="cpu", compute_type=order.dtype, inter_threads=1, intra_threads=order.threads
    )

    def generate(prompts: list[list[int]], max_new_tokens: int, temperature: float) -> list[list[int]]:
        if min(map(len, prompts)) == 1 < max(map(len, prompts)):
            raise ValueError("CTranslate2 4.8 returns prompt tokens when only some prompts have one token")
        results = generator.generate_batch(
            [[str(token) for token in prompt] for prompt in prompts],
            max_batch_size=order.max_batch,
            max_length=max_new_tokens,
            include_prompt_in_result=False,
            end_token=[],
            beam_size=1,
            sampling_topk=0 if temperature > 0 else 1,
            sampling_temperature=temperature or 1.0,
        )
        return [result.sequences_ids[0] for result in results]

    return release, generate


def convert(model: Path, folder: Path) -> None:
    """Write the CTranslate2 form of a checkpoint, weights in the dtype they have."""
    from ctranslate2.converters import TransformersConverter  # pyright: ignore[reportMissingImports]
    from transformers import AutoConfig

    num_ids = AutoConfig.from_pretrained(str(model)).vocab_size
    names = {str(token): token for token in range(num_ids)}
    tokenizer = SimpleNamespace(get_vocab=lambda: names, bos_token="0", eos_token="0", unk_token="0")

    class Converter(TransformersConverter):
        def load_tokenizer(self, tokenizer_class: object, model_name_or_path: str, **_: object) -> object:
            return tokenizer

    Converter(str(model)).convert(str(folder), force=True)


if __name__ == "__main__":
    serve(load)
