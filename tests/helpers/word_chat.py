"""A small word tokenizer with a chat template, with and without marks around what the assistant writes."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["hi", "there", "you", "are", "fine", "good", "bad", "who", "me", "no", "yes", "be", "kind"]
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{% generation %} {{ m.content }} <end>"
    "{% endgeneration %}\n{% else %}<{{ m.role }}> {{ m.content }} <end>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def word_chat(template: str | None = PLAIN) -> PreTrainedTokenizerFast:
    """Ids: 0 padding, 1 end of turn, 2 unknown, then roles and words."""
    names = ["<pad>", "<end>", "<unk>", "<system>", "<user>", "<assistant>", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=["<system>", "<user>", "<assistant>"],
    )
    fast.chat_template = template
    return fast
