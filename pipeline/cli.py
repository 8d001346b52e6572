"""The command line: parse, call, print, exit; no logic.

Data goes to standard output, everything else to standard error. `run` ends standard output with one JSON
line. Nothing heavy is imported before a command needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pipeline.errors import Interrupted, PipelineError, PrerequisiteError, StageError, UsageError
from pipeline.packages import quiet_torchao

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_CODES = """exit codes: 0 ship or success · 1 no-ship · 2 bad recipe or usage · 3 prerequisite missing ·
4 a stage failed · 5 inconclusive · 130 interrupted"""
TRACEBACK = "PIPELINE_TRACEBACK"
"""Environment variable that makes a fault of the program show where it happened."""


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code, 1 for no-ship only. A user's mistake is printed without a traceback."""
    _open_closed_streams()
    quiet_torchao()
    try:
        options = _parse(arguments)
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except PipelineError as error:
        from pipeline.provenance import redact

        _tell(f"pipeline: {redact(str(error))}")
        return error.exit_code
    except KeyboardInterrupt:
        _tell("pipeline: interrupted")
        return Interrupted.exit_code
    except Exception as error:  # noqa: BLE001  (Python's own exit code for it is 1, which here means no-ship)
        return _tell_of_a_bug(error)


def _tell_of_a_bug(error: Exception) -> int:
    """One line, and the traceback for whoever mends it."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    at = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    if os.environ.get(TRACEBACK):
        _tell(_without_secrets("".join(traceback.format_exception(error))))
    said = " ".join(_without_secrets(str(error)).split()) or "no message"
    _tell(
        f"pipeline: a fault of this program, nothing was decided: {type(error).__name__}{at}: {said} "
        f"({TRACEBACK}=1 shows the traceback)"
    )
    return PipelineError.exit_code


def _without_secrets(text: str) -> str:
    """As `redact`, but for an installation so broken that not even it can be imported, before any secret was read."""
    try:
        from pipeline.provenance import redact
    except Exception:  # noqa: BLE001  (a package may fail to import in any way)
        return text
    return redact(text)


def _open_closed_streams() -> None:
    """A job started without standard streams (`>&-`, some schedulers) still runs to its exit code.

    So does one whose streams know fewer letters than ours: they get a question mark.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  (open until the process ends)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    if not arguments:
        _tell(parser.format_help())
        parser.exit(UsageError.exit_code)
    try:
        return parser.parse_args(arguments)
    finally:
        _write(sys.stdout, "")  # `--help | head` leaves here, by SystemExit


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pipeline",
        description="Decide with measured speed, memory and quality whether a quantized language model ships.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_commands_on_recipes, _commands_on_reports, _commands_on_mlflow, _commands_on_this_machine):
        add(commands)
    return parser


def _commands_on_recipes(commands: Commands) -> None:
    run = _recipe_command(commands, "run", _run, "quantize, measure, evaluate, judge and log a recipe")
    _baseline_run(run)
    plan = _recipe_command(commands, "plan", _plan, "footprints, ceilings and fit, before anything is loaded")
    plan.add_argument(
        "--hardware", metavar="NAME", help="plan for this device, or device file, instead of the recipe's"
    )
    plan.add_argument("--html", type=Path, metavar="FILE", help="write the plan as a page with plots, too")
    _recipe_command(commands, "check", _check, "validate a recipe and look for everything a run needs")


def _commands_on_reports(commands: Commands) -> None:
    gate = _command(commands, "gate", _gate, "judge a stored report again, with its own or other rules")
    gate.add_argument("report", type=Path, metavar="REPORT", help="report.json, or the run's folder")
    gate.add_argument("--rules", type=Path, metavar="RECIPE", help="take the gate section of this recipe")
    gate.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page with plots, too")
    _baseline_run(gate)
    compare = _command(
        commands, "compare", _compare, "what changed between runs, and what moved beyond noise"
    )
    compare.add_argument(
        "reports", type=Path, nargs="+", metavar="RUN", help="report.json, run folder, or a store's runs"
    )
    compare.add_argument("--page", type=Path, metavar="FILE", help="write a page with a trend plot, too")


def _commands_on_mlflow(commands: Commands) -> None:
    track = _command(commands, "track", _track, "log a stored run to MLflow, once")
    track.add_argument("report", type=Path, metavar="RUN", help="report.json or run folder")
    promote = _command(
        commands, "promote", _promote, "register a variant that ships, and write its model card"
    )
    promote.add_argument("report", type=Path, metavar="RUN", help="report.json or run folder")
    promote.add_argument("variant", metavar="VARIANT", help="a candidate's name in that run")
    promote.add_argument(
        "--alias",
        choices=("shippable", "champion"),
        default="shippable",
        help="of the version in the registry",
    )
    promote.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="upload the checkpoint to this repository on the Hub, too (HF_TOKEN)",
    )
    shown = _command(commands, "dashboard", _dashboard, "MLflow's pages on the logged runs, until Ctrl-C")
    shown.add_argument(
        "--port", type=int, default=5000, metavar="N", help="on this machine only; 5000 unless told"
    )
    shown.add_argument("--open", action="store_true", help="open the last run's comparison in a browser")


def _commands_on_this_machine(commands: Commands) -> None:
    _command(commands, "kinds", _kinds, "the quantizers, engines and rules there are, with their fields")
    doctor = _command(commands, "doctor", _doctor, "what this machine is and can do")
    doctor.add_argument(
        "--engines",
        type=Path,
        metavar="FOLDER",
        help="time every pair of quantizer and engine on this 16-bit model, so that short forms mean the fastest",
    )
    _command(commands, "schema", _schema, "JSON schema of a recipe, for editors")


def _baseline_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--baseline-run",
        type=Path,
        metavar="RUN",
        help="judge each variant beside its namesake of this run (report.json or run folder)",
    )


def _command(
    commands: Commands,
    name: str,
    function: Callable[[argparse.Namespace], int],
    description: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=description,
        description=f"{description[0].upper()}{description[1:]}.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.set_defaults(command=function)
    return parser


def _recipe_command(
    commands: Commands,
    name: str,
    function: Callable[[argparse.Namespace], int],
    description: str,
) -> argparse.ArgumentParser:
    parser = _command(commands, name, function, description)
    parser.add_argument(
        "recipe", type=Path, metavar="RECIPE", help="a YAML file, for example recipes/demo.yaml"
    )
    return parser


def _print(text: str) -> None:
    _write(sys.stdout, text + "\n")


def _tell(text: str) -> None:
    _write(sys.stderr, text + "\n")


def _write(stream: TextIO, text: str) -> None:
    """Write and flush. A reader that went away (`| head`) neither makes a traceback nor changes the exit code."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise StageError(f"{stream.name} can't be written: {error.strerror}") from None


# --- commands --------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    from pipeline.commands import run_recipe

    outcome = run_recipe(options.recipe, stream=sys.stderr, baseline_run=options.baseline_run)
    _tell(f"\n{outcome.table}\n")
    _print(outcome.json_line)
    return outcome.exit_code


def _plan(options: argparse.Namespace) -> int:
    from pipeline.commands import plan_for
    from pipeline.plan_text import plan_table

    plan = plan_for(options.recipe, hardware=options.hardware, page=options.html)
    if options.html:
        _tell(f"page: {options.html}")
    _print(plan.to_json() if options.json else plan_table(plan))
    return 0


def _check(options: argparse.Namespace) -> int:
    from pipeline.commands import check_recipe
    from pipeline.values import canonical_json

    ready = check_recipe(options.recipe)
    if options.json:
        _print(canonical_json({"problems": [problem.model_dump() for problem in ready.problems]}))
        return PrerequisiteError.exit_code if ready.problems else 0
    if ready.problems:
        raise PrerequisiteError(ready.message(str(options.recipe)))
    _print(f"{options.recipe}: valid, and nothing is missing on this machine")
    return 0


def _gate(options: argparse.Namespace) -> int:
    from pipeline.commands import judge_again, show_in_ci
    from pipeline.gate import exit_code
    from pipeline.report import comparison_table

    report = judge_again(
        options.report, rules=options.rules, baseline_run=options.baseline_run, page=options.html
    )
    if options.html:
        _tell(f"page: {options.html}")
    show_in_ci(report, stream=sys.stderr)
    _print(report.to_json() if options.json else comparison_table(report))
    return exit_code(report.verdict)


def _compare(options: argparse.Namespace) -> int:
    from pipeline.commands import compare_runs
    from pipeline.run_history import history_text

    history = compare_runs(options.reports, page=options.page)
    if options.page:
        _tell(f"page: {options.page}")
    _print(history.to_json() if options.json else history_text(history))
    return 0


def _track(options: argparse.Namespace) -> int:
    from pipeline.commands import track_run

    result = track_run(options.report)
    _print(result.to_json() if options.json else result.because)
    return 0 if result.tracked else PipelineError.exit_code


def _promote(options: argparse.Namespace) -> int:
    from pipeline.commands import promote_run
    from pipeline.promotion import promotion_text

    done = promote_run(options.report, options.variant, alias=options.alias, push=options.push)
    _print(done.to_json() if options.json else promotion_text(done))
    return 0


def _dashboard(options: argparse.Namespace) -> int:
    from pipeline.tracking_server import serve_pages

    serve_pages(port=options.port, say=_print, as_json=options.json, in_browser=options.open)
    return 0


def _kinds(options: argparse.Namespace) -> int:
    from pipeline.kinds_table import kinds_table

    _print(kinds_table(as_json=options.json))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from pipeline.commands import examine_machine
    from pipeline.examination import examination_text

    found = examine_machine(engines_on=options.engines, stream=sys.stderr)
    _print(found.to_json() if options.json else examination_text(found))
    return 0


def _schema(options: argparse.Namespace) -> int:
    import json

    from pipeline.recipe import json_schema

    del options
    _print(json.dumps(json_schema(), indent=2))
    return 0
