"""The command line. Commands are imported when they are called, so that ``--help`` answers at once."""

from __future__ import annotations

import atexit
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from quantmint.pipeline import __version__
from quantmint.pipeline.base.errors import QuantmintError, did_you_mean

# command: (module below pipeline.commands, heading and line of --help); it is imported when it is called
_COMMANDS = {
    "init": ("recipes", "Make", "Write a first recipe for a model of your own."),
    "run": ("run", "Make", "Make, prove and publish what a recipe says."),
    "plan": ("plan", "Make", "Show what a run would do, and what it would cost."),
    "quantize": ("quantize", "Make", "Quantize one model without a recipe."),
    "search": ("search", "Make", "Measure what precision costs where, and what a budget of bits is best spent on."),
    "submit": ("submit", "Make", "Run a recipe on Slurm, Kubernetes or a Ray cluster."),
    "inspect": ("quantize", "Prove", "Prove a quantized checkpoint's structure, anybody's."),
    "gate": ("judge", "Prove", "Judge again from a record, or from what was published."),
    "report": ("report", "Prove", "Print where a recipe's report is."),
    "compare": ("report", "Prove", "Put checkpoints side by side: accuracy, size, throughput."),
    "verify": ("judge", "Prove", "Check all that a release says, with nothing but what was published."),
    "serve": ("serve", "Serve", "Serve a model with the knobs that its hardware calls for, or print the launch."),
    "tune": ("tune", "Serve", "Measure which knobs serve a model best, and print them for its recipe."),
    "doctor": ("serve", "Serve", "Check whether this machine is ready to serve."),
    "knobs": ("tune", "Serve", "List what a launch of vLLM can set, and why."),
    "publish": ("publish", "Publish", "Publish what a finished run left, to other places too, or as a candidate."),
    "releases": ("publish", "Publish", "List what a place holds, and which of it readers get."),
    "promote": ("publish", "Publish", "Make a candidate what readers get."),
    "rollback": ("publish", "Publish", "Make an earlier release what readers get again."),
    "prune": ("publish", "Publish", "Remove old releases from a place."),
    "due": ("requantize", "Keep fresh", "Say which recipes would come out otherwise than when last published."),
    "requantize": ("requantize", "Keep fresh", "Run the recipes that are due, beside each other."),
    "schedule": ("schedule", "Keep fresh", "Look at recipes on their schedules, or write units and manifests that do."),
    "recipes": ("recipes", "Look", "List the recipes, or print one resolved."),
    "schemes": ("recipes", "Look", "List the quantization schemes."),
    "schema": ("recipes", "Look", "Print the JSON Schema of recipes."),
    "explain": ("run", "Look", "Say why each stage would run again."),
    "runs": ("run", "Look", "List past runs."),
    "site": ("report", "Look", "Render an index of all runs, with their reports."),
    "track": ("report", "Look", "Log a finished run to MLflow."),
    "gc": ("run", "Look", "Remove store entries that no recent run uses."),
}


# What is imported only where it is needed, by the extra that brings it.
_EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "datasets", "pyarrow", "huggingface_hub", "httpx"), "quantize"),
    "lm_eval": "evaluate",
    **dict.fromkeys(("jinja2", "markupsafe", "matplotlib"), "report"),
    **dict.fromkeys(("cyclonedx", "packageurl", "detect_secrets", "tenacity"), "publish"),
    **dict.fromkeys(("model_signing", "OpenSSL", "sigstore"), "publish"),
    "obstore": "storage",
    **dict.fromkeys(("cronsim", "prometheus_client"), "schedule"),
    "ray": "ray",
    "submitit": "slurm",
    "kubernetes": "kubernetes",
    **dict.fromkeys(("llmcompressor", "auto_round"), "llmcompressor"),
    **dict.fromkeys(("quark", "ninja"), "quark"),
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the table."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command, by the name that it gives itself; None for a name that is none."""
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"quantmint.pipeline.commands.{_COMMANDS[cmd_name][0]}")
        found = [value for value in vars(module).values() if isinstance(value, click.Command)]
        return next(command for command in found if command.name == cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List them below their headings, without importing any."""
        headings: dict[str, list[tuple[str, str]]] = {}
        for name, (_, heading, line) in _COMMANDS.items():
            headings.setdefault(heading, []).append((name, line))
        widest = max(map(len, _COMMANDS))
        for title, rows in headings.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{widest}}", line) for name, line in rows])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS:
            ctx.fail(f"no command {args[0]!r}{did_you_mean(args[0], _COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="quantmint")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Quantize LLMs for vLLM on AMD Instinct, prove them against their 16-bit baseline, publish what passes.

    Exit codes: 0 PASS, 1 FAIL, 2 usage or bad recipe, 3 INCONCLUSIVE, 4 INVALID measurement, 5 a stage broke (the same
    command goes on from there).
    """
    ctx.obj = {"debug": debug}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code; errors are one message on standard error, never a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    stdout = sys.stdout
    try:
        code: Any = cli.main(given, prog_name="quantmint", standalone_mode=False)
    except QuantmintError as error:
        _fail(str(error), given, error.exit_code, transient=error.transient)
    except (click.exceptions.Abort, KeyboardInterrupt):
        _fail("interrupted; what was finished is kept, and the same command goes on from there", given, 130)
    except click.ClickException as error:
        _emit_error(error.format_message(), given, 2)
        error.show()
        sys.exit(2)
    except SystemExit as error:
        # Where nobody reads any more click and rich end with 1, which is a judgement here: the one leaves a stream that
        # is silent, the other the error that it met.
        if sys.stdout is not stdout or isinstance(error.__context__, BrokenPipeError):
            sys.exit(141)
        if isinstance(error.code, int) and error.code >= 128:  # a signal that was ours
            sys.exit(error.code)
        _fail(f"a library ended the process: exit {error.code}{_shadow()}\n  --debug shows where.", given, 5)
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            _fail(_too_long(str(error.filename)), given, 2)
        missing = str(error.name).partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if missing in _EXTRAS:
            install = f"pip install 'quantmint[{_EXTRAS[missing]}]'"
            _fail(f"this needs {missing}, which is not installed.\n  {install}", given, 2)
        # A fault of ours; what was committed stays all the same.
        foreign = _shadow() if isinstance(error, ImportError) else ""
        _fail(
            f"unexpected {type(error).__name__}: {error}{foreign}\n  --debug shows where; please report it.", given, 5
        )
    sys.exit(code if isinstance(code, int) else 0)


def run() -> None:
    """`main` as a process's own: what it has made is on the disk by now, and nobody waits for a GPU's driver and a
    hundred megabytes of modules to be taken apart, which takes a second.
    """
    code: object = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 130 if isinstance(error, KeyboardInterrupt) else 5
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
    os._exit(code if isinstance(code, int) else 5 if code else 0)


def _too_long(path: str) -> str:
    longest = max(Path(path).parts, key=len, default="")
    if len(os.fsencode(longest)) > 255:
        return f"{longest[:40]}...: found a name of {len(os.fsencode(longest))} bytes in a path, expected at most 255"
    return f"{path[:40]}...: found a path of {len(os.fsencode(path))} bytes, expected at most 4095"


def _shadow() -> str:
    """Where a module may come from that is not the one meant; empty without PYTHONPATH."""
    path = os.environ.get("PYTHONPATH")
    return f"\n  PYTHONPATH is {path}: a module there may hide one that quantmint needs." if path else ""


def _fail(message: str, arguments: Sequence[str], code: int, *, transient: bool = False) -> None:
    if "--debug" in arguments:
        import traceback

        traceback.print_exc()
    _emit_error(message, arguments, code, transient=transient)
    click.echo(f"quantmint: {message}", err=True)
    sys.exit(code)


def _emit_error(message: str, arguments: Sequence[str], code: int, *, transient: bool = False) -> None:
    """With ``--json``, what went wrong as an object; ``transient``: the same command may succeed in a while."""
    if "--json" in arguments:
        import json

        click.echo(json.dumps({"error": message, "exit_code": code, "transient": transient}))
