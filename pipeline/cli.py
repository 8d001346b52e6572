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
from typing import TextIO

from pipeline.errors import Interrupted, PipelineError, PrerequisiteError, StageError
from pipeline.packages import quiet_torchao

EXIT_CODES = """exit codes: 0 ship or success · 1 no-ship · 2 bad recipe or usage · 3 prerequisite missing ·
4 a stage failed · 5 inconclusive · 130 interrupted"""


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code. A user's mistake is printed without a traceback."""
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
    try:
        return _parser().parse_args(arguments)
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
    _recipe_command(commands, "run", _run, "quantize, measure, evaluate, judge and log a recipe")
    plan = _recipe_command(commands, "plan", _plan, "footprints, ceilings and fit, before anything is loaded")
    plan.add_argument(
        "--hardware", metavar="NAME", help="plan for this device, or device file, instead of the recipe's"
    )
    plan.add_argument("--html", type=Path, metavar="FILE", help="write the plan as a page with plots, too")
    _recipe_command(commands, "check", _check, "validate a recipe and look for everything a run needs")
    gate = _command(commands, "gate", _gate, "judge a stored report again, with its own or other rules")
    gate.add_argument("report", type=Path, metavar="REPORT", help="report.json, or the run's folder")
    gate.add_argument("--rules", type=Path, metavar="RECIPE", help="take the gate section of this recipe")
    compare = _command(commands, "compare", _compare, "the comparison tables of several runs")
    compare.add_argument("reports", type=Path, nargs="+", metavar="RUN", help="report.json or run folder")
    track = _command(commands, "track", _track, "log a stored run to MLflow, once")
    track.add_argument("report", type=Path, metavar="RUN", help="report.json or run folder")
    _command(commands, "kinds", _kinds, "the quantizers, engines and rules there are, with their fields")
    doctor = _command(commands, "doctor", _doctor, "what this machine is and can do")
    doctor.add_argument(
        "--engines",
        type=Path,
        metavar="FOLDER",
        help="time every pair of quantizer and engine on this 16-bit model, so that short forms mean the fastest",
    )
    _command(commands, "schema", _schema, "JSON schema of a recipe, for editors")
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
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
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
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

    outcome = run_recipe(options.recipe, stream=sys.stderr)
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
    from pipeline.commands import judge_again
    from pipeline.gate import exit_code
    from pipeline.report import comparison_table

    report = judge_again(options.report, rules=options.rules)
    _print(report.to_json() if options.json else comparison_table(report))
    return exit_code(report.verdict)


def _compare(options: argparse.Namespace) -> int:
    from pipeline.commands import load_report
    from pipeline.report import comparison_table
    from pipeline.values import canonical_json

    reports = [(path, load_report(path)) for path in options.reports]
    if options.json:
        _print(canonical_json([report.model_dump(mode="json") for _, report in reports]))
        return 0
    for path, report in reports:
        _print(
            f"{path} · {report.started_at} · recipe {report.recipe_digest[:12]}\n{comparison_table(report)}\n"
        )
    return 0


def _track(options: argparse.Namespace) -> int:
    from pipeline.commands import track_run

    result = track_run(options.report)
    _print(result.to_json() if options.json else result.because)
    return 0 if result.tracked else PipelineError.exit_code


def _kinds(options: argparse.Namespace) -> int:
    from pipeline.commands import kinds_table

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
