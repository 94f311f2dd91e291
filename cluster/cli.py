"""The command line: `rlhfspec demo | train | profile | bench | simulate | check | models | show`.

Exit codes: 0 good, 2 bad input (one line says what to mend), 1 failure, 130 interrupted. Only what a
command needs is imported, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cluster.origin import shadowed_packages

_INTRO = """\
RLHF on Ray with lossless tree speculative decoding.

Start here:
  rlhfspec demo                                   a whole run on a small pair it makes itself
  rlhfspec check --config configs/gsm8k_ppo.yaml  what a run would need, without running
  rlhfspec train --config FILE --set run.seed=1   the real thing
"""

_OUTRO = """\
Exit codes: 0 good, 2 bad input, 1 failure, 130 interrupted (Ctrl-C).
Docs: README.md, docs/operations.md. Every setting, its default and meaning: core/config.py.
"""

_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The whole command line, one sub-command a module of `cluster.commands`."""
    from cluster.commands import bench, check, models, profile, show, simulate, train

    parser = argparse.ArgumentParser(
        prog="rlhfspec",
        description=_INTRO,
        epilog=_OUTRO,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (train, profile, bench, simulate, check, models, show):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; bad input is one `error:` line without a traceback."""
    faults = shadowed_packages()
    if faults:
        print("error: " + "\n       ".join(faults), file=sys.stderr)
        return 1
    from cluster.quiet import quiet_libraries
    from core.errors import RlhfSpecError

    args = build_parser().parse_args(argv)
    quiet_libraries()
    try:
        return args.run(args)
    except RlhfSpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
