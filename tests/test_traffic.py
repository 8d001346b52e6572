"""Lengths, arrivals and traces: what is drawn is what was asked for, and no bad trace is read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from pipeline.errors import RecipeError
from pipeline.traffic import (
    Fixed,
    Lengths,
    Lognormal,
    Request,
    Traffic,
    Uniform,
    distribution,
    poisson_requests,
    read_trace,
    split_round_robin,
)

LENGTHS: TypeAdapter[int | Fixed | Uniform | Lognormal] = TypeAdapter(Lengths)
DISTRIBUTIONS = [
    Fixed(tokens=7),
    Uniform(low=10, high=200),
    Lognormal(median=800, p95=3000, max=8192),
    Lognormal(median=2, p95=20, max=50),
    Lognormal(median=300, p95=4000, max=4000),
]


def drawn(lengths: Fixed | Uniform | Lognormal, *, count: int = 200_000, seed: int = 3) -> np.ndarray:
    return lengths.sample(count, np.random.default_rng(seed))


# --- lengths ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", DISTRIBUTIONS)
def test_lengths_are_whole_tokens_within_bounds_and_have_the_stated_mean(
    lengths: Fixed | Uniform | Lognormal,
) -> None:
    tokens = drawn(lengths)
    assert tokens.dtype == np.int64
    assert tokens.min() >= 1
    assert tokens.max() <= lengths.longest_tokens
    error = tokens.std() / math.sqrt(len(tokens))
    assert abs(tokens.mean() - lengths.mean_tokens) <= 4 * error + 0.02 * lengths.mean_tokens * (
        lengths.mean_tokens < 20
    )


def test_a_lognormal_has_the_median_and_the_95th_percentile_that_it_names() -> None:
    tokens = drawn(Lognormal(median=800, p95=3000, max=8192))
    assert np.median(tokens) == pytest.approx(800, rel=0.02)
    assert np.percentile(tokens, 95) == pytest.approx(3000, rel=0.02)
    assert tokens.max() == 8192


def test_a_uniform_reaches_both_ends() -> None:
    assert set(drawn(Uniform(low=2, high=4), count=1000).tolist()) == {2, 3, 4}


def test_a_lognormal_s_far_tail_does_not_overflow() -> None:
    tokens = drawn(Lognormal(median=1, p95=10_000_000, max=10_000_000))
    assert tokens.max() == 10_000_000
    assert tokens.min() == 1


def test_a_number_is_a_length_and_a_block_names_its_distribution() -> None:
    assert distribution(LENGTHS.validate_json("800")) == Fixed(tokens=800)
    block = '{"distribution": "uniform", "low": 10, "high": 200}'
    assert LENGTHS.validate_json(block) == Uniform(low=10, high=200)
    block = '{"distribution": "lognormal", "median": 800, "p95": 3000, "max": 8192}'
    found = LENGTHS.validate_json(block)
    assert found == Lognormal(median=800, p95=3000, max=8192)
    assert json.loads(LENGTHS.dump_json(found)) == json.loads(block)


@pytest.mark.parametrize(
    "block",
    [
        "0",
        "-5",
        "2.5",
        "true",
        "99999999999",
        '"800"',
        '{"low": 10, "high": 200}',
        '{"distribution": "uniform", "low": 20, "high": 10}',
        '{"distribution": "uniform", "low": 0, "high": 10}',
        '{"distribution": "uniform", "low": 1, "high": 10, "median": 3}',
        '{"distribution": "lognormal", "median": 800, "p95": 800, "max": 900}',
        '{"distribution": "lognormal", "median": 800, "p95": 1000, "max": 900}',
        '{"distribution": "normal", "mean": 3}',
    ],
)
def test_lengths_that_make_no_sense_are_refused(block: str) -> None:
    with pytest.raises(ValidationError):
        LENGTHS.validate_json(block)


# --- arrivals --------------------------------------------------------------------------------------------


def test_poisson_arrivals_have_the_rate_and_the_spread_of_independent_requests() -> None:
    requests = poisson_requests(4.0, prompt=10, new=Uniform(low=1, high=9), count=50_000, seed=11)
    gaps = np.diff([request.arrival_s for request in requests])
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.02)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03), "exponential: as wide as its mean"


def test_another_rate_moves_the_same_requests_in_time_only() -> None:
    def at(rate: float, seed: int = 7) -> list[Request]:
        return poisson_requests(
            rate,
            prompt=Uniform(low=1, high=99),
            new=Lognormal(median=9, p95=90, max=100),
            count=100,
            seed=seed,
        )

    assert at(1.0) == at(1.0)
    assert at(1.0) != at(1.0, seed=8)
    for slow, fast in zip(at(1.0), at(8.0), strict=True):
        assert (slow.prompt_tokens, slow.new_tokens) == (fast.prompt_tokens, fast.new_tokens)
        assert slow.arrival_s == pytest.approx(8 * fast.arrival_s)


def test_a_device_gets_its_share_of_the_rate() -> None:
    traffic = Traffic(requests_per_s=12.0, prompt_tokens=5, new_tokens=Uniform(low=2, high=8))
    assert traffic.longest == Request(0.0, 5, 8)
    shared = traffic.requests(2_000, seed=1, devices=4)
    assert shared[-1].arrival_s == pytest.approx(4 * traffic.requests(2_000, seed=1)[-1].arrival_s)


@pytest.mark.parametrize(("rate", "count"), [(0.0, 1), (-1.0, 1), (math.inf, 1), (math.nan, 1), (1.0, 0)])
def test_no_rate_or_count_is_taken_that_is_not_above_zero(rate: float, count: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        poisson_requests(rate, prompt=1, new=1, count=count, seed=0)


def test_a_round_robin_split_gives_out_every_request_once_in_order() -> None:
    requests = poisson_requests(1.0, prompt=1, new=1, count=10, seed=0)
    shares = split_round_robin(requests, devices=3)
    assert [len(share) for share in shares] == [4, 3, 3]
    assert sorted((one for share in shares for one in share), key=requests.index) == requests
    assert all(share == sorted(share, key=lambda one: one.arrival_s) for share in shares)
    assert [len(share) for share in split_round_robin(requests[:1], devices=2)] == [1, 0]
    with pytest.raises(ValueError, match="devices must be at least 1"):
        split_round_robin(requests, devices=0)


# --- traces ----------------------------------------------------------------------------------------------

GOOD = [Request(0.0, 800, 120), Request(0.25, 10, 1), Request(0.25, 3, 4)]
GOOD_LINES = "".join(
    json.dumps({"arrival_s": one.arrival_s, "prompt_tokens": one.prompt_tokens, "new_tokens": one.new_tokens})
    + "\n"
    for one in GOOD
)
GOOD_CSV = "arrival_s,prompt_tokens,new_tokens\n0,800,120\n0.25,10,1\n2.5e-1,3,4\n"


def written(folder: Path, text: str | bytes, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (GOOD_LINES, "a.jsonl"),
        (GOOD_LINES.replace("\n", "\r\n"), "a.ndjson"),
        ("\ufeff" + GOOD_LINES.rstrip("\n"), "A.JSONL"),
        (GOOD_LINES + "\n\n", "a.jsonl"),
        (GOOD_CSV, "a.csv"),
        (GOOD_CSV.replace("\n", "\r\n"), "a.csv"),
        ("\ufeff" + GOOD_CSV.replace(",", " , "), "a.CSV"),
        ("new_tokens,arrival_s,prompt_tokens\n120,0,800\n1,.25,10\n\n4,0.25,3\n", "a.csv"),
    ],
)
def test_a_trace_is_read_from_json_lines_and_csv(tmp_path: Path, text: str, name: str) -> None:
    assert read_trace(written(tmp_path, text, name)) == GOOD


def line(**changes: object) -> str:
    return json.dumps({"arrival_s": 0.5, "prompt_tokens": 8, "new_tokens": 2} | changes)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (line(arrival_s=0.1), "arrival_s: 0.1 is before the line above (0.25); sort the trace"),
        (line(arrival_s=-1), "arrival_s: must be seconds from the trace's start, from 0 to 1e+09; is -1"),
        (line(arrival_s=1.7e12), "is 1700000000000.0"),
        (line(arrival_s="0.5"), "is '0.5'"),
        (line(arrival_s=None), "is None"),
        (line(arrival_s=True), "is True"),
        (line().replace("0.5", "NaN"), "NaN is not a number"),
        (line().replace("0.5", "-Infinity"), "-Infinity is not a number"),
        (line().replace("0.5", "1e999"), "is inf"),
        (line(prompt_tokens=0), "prompt_tokens: must be a whole number from 1 to 10000000; is 0"),
        (line(prompt_tokens=-3), "prompt_tokens: must be a whole number"),
        (line(prompt_tokens=8.0), "is 8.0"),
        (line(prompt_tokens=10**9), "is 1000000000"),
        (line().replace("8", "9" * 5000), "is not JSON"),
        (line(new_tokens=0), "new_tokens: must be"),
        (line(new_tokens=False), "is False"),
        (line(new_tokens=[2]), "is [2]"),
        (line(new_token=2), "unknown key 'new_token', allowed are arrival_s, prompt_tokens, new_tokens"),
        (line(new_token=2), "did you mean new_tokens?"),
        ('{"arrival_s": 1, "prompt_tokens": 8}', "new_tokens missing"),
        (line()[:-1] + ', "new_tokens": 9}', "the key new_tokens stands twice"),
        ("[0.5, 8, 2]", "must be an object"),
        ("5", "must be an object"),
        ("{", "is not JSON"),
        ("[" * 9000, "nests too deep"),
        ('"' + "x" * 20_000 + '"', "holds 20002 characters"),
    ],
)
def test_a_bad_line_is_told_with_its_number_and_what_is_allowed(tmp_path: Path, bad: str, told: str) -> None:
    path = written(tmp_path, GOOD_LINES + bad + "\n")
    with pytest.raises(RecipeError) as error:
        read_trace(path)
    message = str(error.value)
    assert message.startswith(f"{path}: not a trace of requests\n  line 4: ")
    assert told in message
    assert max(map(len, message.splitlines())) < 300 + len(str(path))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("arrival_s,prompt_tokens\n0,8\n", "line 1: the header: new_tokens missing"),
        (
            "arrival_s,prompt_tokens,new_tokens,new_tokens\n",
            "line 1: the header: the key new_tokens stands twice",
        ),
        ("arrival,prompt_tokens,new_tokens\n", "unknown key 'arrival'"),
        ("0,800,120\n", "unknown key '0'"),
        (GOOD_CSV + "1,8\n", "line 5: has 2 values, the header 3"),
        (GOOD_CSV + "1,8,2,9\n", "line 5: has 4 values, the header 3"),
        (GOOD_CSV + "1,8,\n", "line 5: new_tokens: must be a whole number from 1 to 10000000; is ''"),
        (GOOD_CSV + "1,1_000,2\n", "line 5: prompt_tokens: must be"),
        (GOOD_CSV + "1,٣,2\n", "line 5: prompt_tokens: must be"),
        (GOOD_CSV + "1,8.0,2\n", "is 8.0"),
        (GOOD_CSV + "nan,8,2\n", "line 5: arrival_s: must be"),
        (GOOD_CSV + "0.1,8,2\n", "line 5: arrival_s: 0.1 is before the line above"),
        (GOOD_CSV + '1,"8,2\n', "is not valid CSV"),
        (GOOD_CSV + "1," + "8" * 200_000 + ",2\n", "is not valid CSV"),
    ],
)
def test_a_bad_row_is_told_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(RecipeError) as error:
        read_trace(written(tmp_path, text, "trace.csv"))
    assert told in str(error.value)


def test_several_faults_are_told_at_once_and_not_without_end(tmp_path: Path) -> None:
    text = "".join(line(new_tokens=0) + "\n" for _ in range(500))
    with pytest.raises(RecipeError) as error:
        read_trace(written(tmp_path, text))
    told = str(error.value).splitlines()
    assert [entry.split(":")[0] for entry in told[1:-1]] == [f"  line {number}" for number in range(1, 11)]
    assert "reading stopped here" in told[-1]


@pytest.mark.parametrize(
    ("content", "name", "told"),
    [
        ("", "a.jsonl", "holds no request"),
        ("\n \n", "a.jsonl", "holds no request"),
        ("arrival_s,prompt_tokens,new_tokens\n", "a.csv", "holds no request"),
        ("", "a.csv", "holds no request"),
        (GOOD_LINES, "a.txt", "ends in .jsonl, .ndjson, .csv"),
        (GOOD_LINES.encode() + b'{"arrival_s": \xff', "a.jsonl", "line 4: is not UTF-8 (byte 0xff)"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(
    tmp_path: Path, content: str | bytes, name: str, told: str
) -> None:
    path = written(tmp_path, content, name)
    with pytest.raises(RecipeError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}: ")
    assert told in str(error.value)


def test_a_file_that_is_not_there_or_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nowhere\.jsonl: no such file"):
        read_trace(tmp_path / "nowhere.jsonl")
    folder = tmp_path / "folder.csv"
    folder.mkdir()
    with pytest.raises(RecipeError, match="can't be read: Is a directory"):
        read_trace(folder)
