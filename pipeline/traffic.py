"""Requests over time: how long they are, when they come, and traces of real ones.

How many machines a service needs depends on more than the mean: a burst waits, a long prompt makes others
wait. So traffic is a list of requests, drawn from distributions with a seed or read from a trace. Pure but for
`read_trace`.

>>> requests = poisson_requests(5.0, prompt=Lognormal(median=800, p95=3000, max=8192), new=200, count=3, seed=1)
>>> [request.new_tokens for request in requests]
[200, 200, 200]
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union

from pydantic import Field, model_validator

from pipeline.errors import RecipeError
from pipeline.values import Value

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Tokens = NDArray[np.int64]

LONGEST_TOKENS = 10_000_000
"""Of one prompt or one answer; a larger number is a slip, not a request."""
LATEST_ARRIVAL_S = 1e9
"""About 32 years: later arrivals are dates (Unix time in milliseconds), not seconds from a trace's start."""
FAULTS_SHOWN = 10

Length = Annotated[int, Field(gt=0, le=LONGEST_TOKENS, strict=True)]


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when it comes, in seconds from the start, and its lengths in tokens."""

    arrival_s: float
    prompt_tokens: int
    new_tokens: int


class Fixed(Value):
    """Always the same length."""

    distribution: Literal["fixed"] = "fixed"
    tokens: Length

    @property
    def mean_tokens(self) -> float:
        """The mean length."""
        return float(self.tokens)

    @property
    def longest_tokens(self) -> int:
        """The greatest length that can come."""
        return self.tokens

    def sample(self, count: int, generator: np.random.Generator) -> Tokens:  # noqa: ARG002 (nothing to draw)
        """`count` lengths, int64."""
        import numpy as np

        return np.full(count, self.tokens, dtype=np.int64)


class Uniform(Value):
    """Every length from `low` to `high` tokens, both included, equally often."""

    distribution: Literal["uniform"] = "uniform"
    low: Length
    high: Length

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low must be at most high, are {self.low} and {self.high}")
        return self

    @property
    def mean_tokens(self) -> float:
        """The mean length."""
        return (self.low + self.high) / 2

    @property
    def longest_tokens(self) -> int:
        """The greatest length that can come."""
        return self.high

    def sample(self, count: int, generator: np.random.Generator) -> Tokens:
        """`count` lengths, int64."""
        import numpy as np

        return generator.integers(self.low, self.high, size=count, endpoint=True, dtype=np.int64)


class Lognormal(Value):
    """A long tail to the right: half the lengths up to `median` tokens, 95 % up to `p95`, none above `max`.

    Longer draws are cut to `max`, as an engine's context limit cuts them, and shorter ones than a token to
    one, so that median and 95th percentile stay what they are said to be.
    """

    distribution: Literal["lognormal"] = "lognormal"
    median: Length
    p95: Length
    max: Length

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.median < self.p95 <= self.max:
            raise ValueError(
                "median must be under p95, and p95 at most max; "
                f"are median {self.median}, p95 {self.p95}, max {self.max}"
            )
        return self

    @property
    def _log_median(self) -> float:
        return math.log(self.median)

    @property
    def _log_deviation(self) -> float:
        return (math.log(self.p95) - self._log_median) / NormalDist().inv_cdf(0.95)

    @property
    def mean_tokens(self) -> float:
        """Mean of the cut distribution, in closed form; rounding to whole tokens is left out."""
        mean, deviation = self._log_median, self._log_deviation
        below = NormalDist().cdf
        one, most = -mean / deviation, (math.log(self.max) - mean) / deviation
        inside = math.exp(mean + deviation**2 / 2) * (below(most - deviation) - below(one - deviation))
        return below(one) + inside + self.max * (1 - below(most))

    @property
    def longest_tokens(self) -> int:
        """The greatest length that can come."""
        return self.max

    def sample(self, count: int, generator: np.random.Generator) -> Tokens:
        """`count` lengths, int64."""
        import numpy as np

        # Cut before exp: a draw far out in the tail would overflow.
        logs = generator.normal(self._log_median, self._log_deviation, size=count)
        lengths = np.exp(np.minimum(logs, math.log(self.max)))
        return np.clip(np.rint(lengths), 1, self.max).astype(np.int64)


Distribution = Annotated[Union[Fixed, Uniform, Lognormal], Field(discriminator="distribution")]  # noqa: UP007
Lengths = Length | Distribution
"""A field of a recipe: a number of tokens, or a block that names its `distribution`."""


def distribution(lengths: int | Fixed | Uniform | Lognormal) -> Fixed | Uniform | Lognormal:
    """The distribution that a recipe's `Lengths` means: a number is always that length."""
    return Fixed(tokens=lengths) if isinstance(lengths, int) else lengths


class Traffic(Value):
    """Requests that come independently of each other at a mean rate, with lengths drawn for each."""

    requests_per_s: Annotated[float, Field(gt=0)]
    prompt_tokens: Lengths
    new_tokens: Lengths

    @property
    def longest(self) -> Request:
        """The longest request that can come."""
        return Request(
            arrival_s=0.0,
            prompt_tokens=distribution(self.prompt_tokens).longest_tokens,
            new_tokens=distribution(self.new_tokens).longest_tokens,
        )

    def requests(self, count: int, *, seed: int, devices: int = 1) -> list[Request]:
        """`count` requests of one of `devices` devices, to which each request goes at random."""
        return poisson_requests(
            self.requests_per_s / devices,
            prompt=self.prompt_tokens,
            new=self.new_tokens,
            count=count,
            seed=seed,
        )


def poisson_requests(
    requests_per_s: float,
    *,
    prompt: int | Fixed | Uniform | Lognormal,
    new: int | Fixed | Uniform | Lognormal,
    count: int,
    seed: int,
) -> list[Request]:
    """`count` requests that come independently of each other at a mean rate, in order.

    Lengths and gaps come from streams of their own, so the same seed at another rate gives the same requests
    at other times: rates are compared on equal traffic. Raises ValueError on a rate or count that isn't above 0.
    """
    import numpy as np

    if not (math.isfinite(requests_per_s) and requests_per_s > 0):
        raise ValueError(f"requests_per_s must be a finite number above 0, is {requests_per_s!r}")
    if count < 1:
        raise ValueError(f"count must be at least 1, is {count}")
    gaps, prompts, news = (
        np.random.Generator(np.random.PCG64(child)) for child in np.random.SeedSequence(seed).spawn(3)
    )
    arrivals = np.cumsum(gaps.standard_exponential(count)) / requests_per_s
    prompt_tokens = distribution(prompt).sample(count, prompts)
    new_tokens = distribution(new).sample(count, news)
    return [
        Request(*values)
        for values in zip(arrivals.tolist(), prompt_tokens.tolist(), new_tokens.tolist(), strict=True)
    ]


def split_round_robin(requests: Sequence[Request], *, devices: int) -> list[list[Request]]:
    """The requests of each of `devices` devices, given out in turn; a device may get none."""
    if devices < 1:
        raise ValueError(f"devices must be at least 1, is {devices}")
    return [list(requests[first::devices]) for first in range(devices)]


# --- traces ----------------------------------------------------------------------------------------------

_KEYS = ("arrival_s", "prompt_tokens", "new_tokens")
_EXAMPLE = '{"arrival_s": 0.25, "prompt_tokens": 800, "new_tokens": 120}'
_WHOLE = re.compile(r"[0-9]{1,20}")
_DECIMAL = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")
_ROW_LIMIT_CHARACTERS = 10_000


class _Fault(Exception):  # noqa: N818 (never leaves this module)
    """What is wrong with one line."""


def read_trace(path: Path) -> list[Request]:
    """Requests of a trace in order of arrival: JSON Lines, or CSV with a header (by the name's ending).

    Each line or row holds `arrival_s` (seconds from the trace's start, not falling), `prompt_tokens` and
    `new_tokens`. Raises RecipeError naming the file, and for the first ten faults line, key, value and what
    is allowed.
    """
    readers = {".jsonl": _json_lines, ".ndjson": _json_lines, ".csv": _csv_rows}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise RecipeError(f"{path}: a trace's name ends in {', '.join(readers)}, not in {path.suffix!r}")
    requests: list[Request] = []
    faults: list[str] = []
    try:
        for line, fields in reader(_text(path)):
            try:
                requests.append(_request(fields, after=requests[-1] if requests else None))
            except _Fault as fault:
                faults.append(f"  line {line}: {fault}")
            if len(faults) == FAULTS_SHOWN:
                faults.append("  … and perhaps more: reading stopped here")
                break
    except _Fault as fault:
        faults.append(f"  {fault}")
    if faults:
        raise RecipeError("\n".join([f"{path}: not a trace of requests", *faults]))
    if not requests:
        raise RecipeError(f"{path}: holds no request; a line is, for example, {_EXAMPLE}")
    return requests


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file") from None
    except OSError as error:
        raise RecipeError(f"{path}: can't be read: {error.strerror}") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise RecipeError(f"{path}: line {line}: is not UTF-8 (byte 0x{raw[error.start]:02x})") from None


def _json_lines(text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line


def _csv_rows(text: str) -> Iterator[tuple[int, Any]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    try:
        for row in reader:
            if not row:
                continue
            if header is None:
                header = [name.strip() for name in row]
                _check_keys(header, where=f"line {reader.line_num}: the header: ")
            else:
                yield reader.line_num, (header, row)
    except csv.Error as error:
        raise _Fault(f"line {reader.line_num}: is not valid CSV: {error}") from None


def _request(fields: Any, *, after: Request | None) -> Request:
    values = _json_fields(fields) if isinstance(fields, str) else _csv_fields(*fields)
    request = Request(
        arrival_s=_seconds(values["arrival_s"]),
        prompt_tokens=_tokens("prompt_tokens", values["prompt_tokens"]),
        new_tokens=_tokens("new_tokens", values["new_tokens"]),
    )
    if after is not None and request.arrival_s < after.arrival_s:
        raise _Fault(
            f"arrival_s: {request.arrival_s!r} is before the line above ({after.arrival_s!r}); "
            "sort the trace by arrival"
        )
    return request


def _json_fields(line: str) -> dict[str, Any]:
    def refuse(constant: str) -> Any:
        raise _Fault(f"{constant} is not a number that JSON has")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _check_keys([key for key, _ in pairs])
        return dict(pairs)

    if len(line) > _ROW_LIMIT_CHARACTERS:
        raise _Fault(f"holds {len(line)} characters; a line is one request, for example {_EXAMPLE}")
    try:
        fields = json.loads(line, parse_constant=refuse, object_pairs_hook=unique)
    except RecursionError:
        raise _Fault("nests too deep") from None
    except ValueError as error:
        raise _Fault(f"is not JSON ({error}); a line is, for example, {_EXAMPLE}") from None
    if not isinstance(fields, dict):
        raise _Fault(f"must be an object, for example {_EXAMPLE}; is {_shown(fields)}")
    return fields


def _csv_fields(header: list[str], row: list[str]) -> dict[str, Any]:
    if len(row) != len(header):
        raise _Fault(f"has {len(row)} values, the header {len(header)}")
    values: dict[str, Any] = {}
    for key, cell in zip(header, row, strict=True):
        text = cell.strip()
        if _WHOLE.fullmatch(text):
            values[key] = int(text)
        elif _DECIMAL.fullmatch(text):
            values[key] = float(text)
        else:
            values[key] = cell
    return values


def _check_keys(found: Sequence[str], *, where: str = "") -> None:
    for key in found:
        if key not in _KEYS:
            near = get_close_matches(key, _KEYS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise _Fault(f"{where}unknown key {_shown(key)}, allowed are {', '.join(_KEYS)}{hint}")
        if found.count(key) > 1:
            raise _Fault(f"{where}the key {key} stands twice")
    missing = [key for key in _KEYS if key not in found]
    if missing:
        raise _Fault(f"{where}{', '.join(missing)} missing; all of {', '.join(_KEYS)} are needed")


def _seconds(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LATEST_ARRIVAL_S:
        return float(value)
    raise _Fault(
        f"arrival_s: must be seconds from the trace's start, from 0 to {LATEST_ARRIVAL_S:.0e}; "
        f"is {_shown(value)}"
    )


def _tokens(key: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LONGEST_TOKENS:
        return value
    raise _Fault(f"{key}: must be a whole number from 1 to {LONGEST_TOKENS}; is {_shown(value)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
