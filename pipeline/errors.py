"""Errors a user can act on; everything else is a bug and keeps its traceback.

>>> RecipeError("recipes/a.yaml: 1 problem").exit_code
2
"""

from __future__ import annotations

from typing import ClassVar


class PipelineError(Exception):
    """Base of every error that is printed as a message and ends the program with `exit_code`."""

    exit_code: ClassVar[int] = 4


class UsageError(PipelineError):
    """The command line is wrong, or names a file that isn't what it should be."""

    exit_code = 2


class RecipeError(UsageError):
    """The recipe can't be read or doesn't say what is allowed; lists every problem found."""


class PrerequisiteError(PipelineError):
    """Something the run needs is missing here: a package, a device, memory, disk, weights, data."""

    exit_code = 3


class StageError(PipelineError):
    """A stage ran and failed for a reason the user should read."""

    exit_code = 4


class NoShipError(PipelineError):
    """What was asked for needs a ship verdict, and the verdict is no-ship."""

    exit_code = 1


class UndecidedError(PipelineError):
    """What was asked for needs a ship verdict, and the verdict is inconclusive."""

    exit_code = 5


class CheckpointError(StageError):
    """A checkpoint folder is incomplete, corrupt, or not what its label says."""


class Interrupted(PipelineError):  # noqa: N818  (named after the state, as KeyboardInterrupt is)
    """The run was stopped from outside (Ctrl-C or SIGTERM); finished stages are kept."""

    exit_code = 130
