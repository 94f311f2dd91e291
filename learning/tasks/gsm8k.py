"""The GSM8K reward: 0.2 for an answer in the form `#### number`, 0.8 for the right number.

Source: Cobbe et al. 2021, 'Training verifiers to solve math word problems' (the `####` convention).
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from ...core.errors import RewardError
from ...core.records import Prompt, Reward

FORMAT_SHARE = 0.2
_NUMBER = r"(?P<number>(?:[-+][ \t]*)?(?:\$[ \t]*)?[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+))"
_ANSWER = re.compile(rf"####[ \t]*{_NUMBER}")
_EQUALS = re.compile(rf"[ \t]*=[ \t]*{_NUMBER}")
_GOES_ON = re.compile(
    r"[eE][-+]?\d|:\d|[ \t]*[/\u2044^*\u00d7\u00f7\u00b7][ \t]*[-\d(\\{]|[ \t]*\\(?:[dt]?frac|sqrt|pi|times|cdot|div)|"
    r"[ \t]+(?:\d{3}\b|\d+[/\u2044]\d)|!?[ \t]*[-+=\u2013][ \t]*[-+$( \t]*\d|[ \t]*\+[ \t]*[a-z(]|[ \t]+x[ \t]+\d|"
    r"\*\*\d|[ \t]\*\*[ \t]\d|[\u00b2\u00b3\u2074-\u2079]|[ \t]?[\u00bc-\u00be]"
)
"What makes it another number: 3e5, 10:30, 1/2, 2^10, 2\\sqrt{3}, 1 000, 2 1/2, 7 + 3 = 10, 2**3, 5\u00b2."


def final_number(text: str) -> Decimal | None:
    """Return the number behind the last `####`, or None when there is none.

    Commas, a dollar sign, a sign on either side of it and a trailing full stop are understood; fractions, powers and
    other terms are not, and no number.
    """
    text = text.replace("\u2212", "-")
    matches = list(_ANSWER.finditer(text))
    if not matches:
        return None
    number, end = _value(matches[-1]), matches[-1].end()
    if (same := _EQUALS.match(text, end)) and _value(same) == number:
        end = same.end()
    return None if _GOES_ON.match(text, end) else number


def _value(found: re.Match[str]) -> Decimal | None:
    try:
        return Decimal(re.sub(r"[,$+ \t]", "", found["number"]))
    except InvalidOperation:
        return None


def reference_number(prompt: Prompt) -> Decimal:
    """Return the number that is right. Raises RewardError when the reference holds none."""
    reference = prompt.reference if "####" in prompt.reference else f"#### {prompt.reference}"
    number = final_number(reference)
    if number is None:
        raise RewardError(
            f"prompt {prompt.prompt_id}: the reference must be a plain number or end with '#### number', "
            f"got '{prompt.reference[-60:]}'; fix data.reference_field"
        )
    return number


def gsm8k_reward(prompt: Prompt, response: str) -> Reward:
    """Score against `prompt.reference`: the data set's answer text, or the bare number.

    Raises RewardError when the reference holds no number.
    """
    expected = reference_number(prompt)
    got = final_number(response)
    formatted, correct = float(got is not None), float(got == expected)
    return Reward(
        value=FORMAT_SHARE * formatted + (1.0 - FORMAT_SHARE) * correct,
        parts={"correct": correct, "format": formatted},
    )
