"""The package `rlhfspec` in a checkout: `rlhfspec.core` is the folder `core` beside this file, and so on.

Whatever has the checkout on its path runs it, without an install: `ray job submit --working-dir .`, for one. A wheel
has these folders inside `rlhfspec/` and not this file. Packages in `learning/public` are `rlhfspec.NAME` besides.
"""

from pathlib import Path

_HERE = Path(__file__).resolve().parent
__path__ = [str(_HERE), str(_HERE / "learning" / "public")]
