"""A stage's result: the stored one, or one made now, with its failures and its duration recorded.

result = stored_stage(state, "capacity", ["int8"], key=key, kind=CapacityResult, measure=measure, step="capacity int8")
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from pipeline.errors import PipelineError, StageError
from pipeline.measured import StageFailure
from pipeline.processes import WorkerError
from pipeline.run_state import RunState, failure
from pipeline.values import AnyValue, Value


def stored_stage(
    state: RunState,
    stage: str,
    variants: list[str],
    *,
    key: str,
    kind: type[AnyValue],
    measure: Callable[[], AnyValue],
    step: str,
    keeps: Callable[[AnyValue], bool] = lambda _: True,
) -> AnyValue | None:
    """The result of one or several variants from the store, or measured now and stored where it is worth keeping."""

    def make() -> AnyValue:
        result = measure()
        if keeps(result):
            keep_result(state, stage, key, result)
        return result

    stored = partial(state.store.get, stage, key, kind)
    return stage_result(state, stage, variants, step=step, stored=stored, make=make)


def stage_result(
    state: RunState,
    stage: str,
    variants: list[str],
    *,
    step: str,
    stored: Callable[[], AnyValue | None],
    make: Callable[[], AnyValue],
) -> AnyValue | None:
    """The stored result, or a new one; a failure is recorded for all `variants` and gives None."""
    start = time.monotonic()
    with state.progress.step(step) as shown:
        found = stored()
        if found is not None:
            shown.reused()
            state.reused.append(step)
            return found
        shown.begins()
        try:
            result = make()
        except KeyboardInterrupt:
            for variant in variants:
                state.fail(variant, _interrupted(stage))
            raise
        except PipelineError as error:
            shown.failed(str(error))
            reason = error.reason if isinstance(error, WorkerError) else "failed"
            for variant in variants:
                state.fail(variant, failure(stage, reason, str(error)))
            return None
    _remember_duration(state, step, time.monotonic() - start)
    return result


def keep_result(state: RunState, stage: str, key: str, result: Value) -> None:
    """Store a result; where the disk is full this run still has it, and the next one measures again."""
    try:
        state.store.put(stage, key, result)
    except StageError as error:
        state.progress.say(f"the result of {stage} is not kept for the next run: {error}")


def _remember_duration(state: RunState, name: str, seconds: float) -> None:
    """For the time left, which a run can do without."""
    with suppress(StageError):
        state.store.remember_duration(name, seconds)


def _interrupted(stage: str) -> StageFailure:
    return failure(stage, "interrupted", "the run was stopped during this stage")
