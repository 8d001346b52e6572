"""What fails in one task, told with the task's name, its file and the place, instead of lm-eval's bare exception.

with failing_as_stage(task="quiz", path=file.path, doing="building its requests"):
    task.build_all_requests(limit=2)
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import PipelineError, StageError


@contextlib.contextmanager
def failing_as_stage(
    *, task: str, path: Path | None, doing: str, through: tuple[type[Exception], ...] = (MemoryError,)
) -> Iterator[None]:
    """StageError in place of whatever goes wrong inside, `sys.exit` of a task's own code included.

    The traceback goes to standard error, the stage's log. `through` are errors that others have to tell apart.
    """
    try:
        yield
    except PipelineError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, through):
            raise
        traceback.print_exc(file=sys.stderr)
        where = f" ({path})" if path else ""
        raise StageError(f"task {task}{where} failed while {doing}: {_in_words(error)}") from error


def _in_words(error: BaseException) -> str:
    said = " ".join(str(error).split())
    if error.__cause__ is not None and str(error.__cause__) not in said:
        said += (
            f" ({' '.join(str(error.__cause__).split())[:200]})"  # `datasets` hides the reason behind its own
        )
    frames = traceback.extract_tb(error.__traceback__)
    at = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{at}: {said or 'no message'}"
