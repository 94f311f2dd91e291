"""The command line `rlhfspec COMMAND`: the table of commands, and what becomes of their errors.

Only what a command needs is imported, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import gc
import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .ray_start.origin import NAME, shadowed_packages, version
from .system.machine_faults import explain_os_error

if TYPE_CHECKING:
    from .commands.declare import Command, Group

_INTRO = """\
RLHF on Ray with lossless tree speculative decoding.

Start here:
  rlhfspec demo                                   a whole run on a small pair it makes itself
  rlhfspec explain                                where its time went, and what to change next
  rlhfspec check --config configs/gsm8k_ppo.yaml  what a run would need, without running
  rlhfspec train --config FILE --set run.seed=1   the real thing
"""

_OUTRO = """\
Exit codes: 0 good, 2 bad input, 1 failure, 130 interrupted (Ctrl-C).
Docs: README.md, docs/. Every setting, its default and meaning: docs/reference/config.md.
"""


def commands() -> dict[str, Command | Group]:
    """Every command, by what the user types."""
    from .commands import data, models, serve
    from .commands.bench import bench, gpu_selftest
    from .commands.declare import Group
    from .commands.evaluate import evaluate, profile
    from .commands.observe import explain, monitoring, report, status, trace
    from .commands.recorded import fork, pairs, rescore
    from .commands.show import show
    from .commands.simulate import simulate
    from .commands.simulate_cluster import cluster
    from .commands.supervised import dpo, sft, train_reward
    from .commands.train import check, demo, train
    from .commands.verify import compare, replay, verify

    return {
        "demo": demo,
        "train": train,
        "fork": fork,
        "sft": sft,
        "train-reward": train_reward,
        "dpo": dpo,
        "eval": evaluate,
        "profile": profile,
        "bench": bench,
        "gpu-selftest": gpu_selftest,
        "simulate": Group(simulate.__doc__ or "", {"cluster": cluster}, simulate),
        "check": check,
        "data": Group(data.ABOUT, {"check": data.check_data}),
        "models": Group(
            models.MODELS,
            {"make": models.make_pair, "get": models.get_known_model, "from-gguf": models.convert_file},
        ),
        "drafter": Group(models.DRAFTER, {"make": models.make_head, "eval": models.evaluate_head}),
        "serve": Group(serve.ABOUT, {"reward": serve.serve, "engine": serve.serve_engine}),
        "show": show,
        "report": report,
        "explain": explain,
        "compare": compare,
        "verify": verify,
        "rescore": rescore,
        "pairs": pairs,
        "replay": replay,
        "status": status,
        "trace": trace,
        "monitoring": monitoring,
    }


def build_parser(named: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The whole command line; where `named` are the words to be parsed, with the arguments of their command alone."""
    from .commands.declare import add_commands

    parser = argparse.ArgumentParser(
        prog=NAME,
        description=_INTRO,
        epilog=_OUTRO,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print name and version")
    add_commands(parser.add_subparsers(title="commands", metavar="COMMAND", required=True), commands(), named)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; bad input is one `error:` line without a traceback."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: a file or socket of ours would take its number
            setattr(sys, name, open("/dev/null", mode))  # noqa: SIM115
    # imported things stay: to look for garbage in them is a sixth of a start
    gc.set_threshold(100_000, 20, 50)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a name the terminal has no letters for is no fault
        sys.stdout.reconfigure(errors="backslashreplace")
    if faults := shadowed_packages():  # before anything of theirs is imported
        print("error: " + "\n       ".join(faults), file=sys.stderr)
        return 1
    from ..actors.remote.loopback import spare_loopback
    from ..core.errors import RlhfSpecError, describe_error
    from .observe.visible_stream import show_escape_sequences

    show_escape_sequences()
    spare_loopback()  # before anything is started or asked
    try:
        words = sys.argv[1:] if argv is None else argv
        args = build_parser(words).parse_args(words)
        # not for --version, --help: it loads the config's classes
        from .commands.declare import call
        from .ray_start.quiet import quiet_libraries

        quiet_libraries()
        code = call(args)
        sys.stdout.flush()  # here, where a closed pipe can be told, not when Python ends
        return code
    except RlhfSpecError as error:
        print(f"error: {describe_error(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if (explained := explain_os_error(error)) is None:
            raise
        print(f"error: {explained.text}", file=sys.stderr)
        return explained.exit_code


class _Version(argparse.Action):
    """Print name and version, looked up only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"{NAME} {version()}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
