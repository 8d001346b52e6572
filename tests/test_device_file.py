"""Device files: strict, with lines and nearest names, and planned for like a device of the table."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.data_sheet import DATA_SHEET, is_device_file
from pipeline.device_file import MOST_FILE_BYTES, device_named, load_device
from pipeline.errors import UsageError

BOX = """\
name: my-box
memory_bytes: 48e9
bandwidth_bytes_per_s: 768e9
peak_flops_per_s: {fp16: 155e12, int8: 310e12}
dollars_per_hour: 0.79
source: data sheet, halved
"""
EXAMPLE = Path(__file__).parent.parent / "recipes" / "devices" / "8xh100-sxm.yaml"


def file(folder: Path, text: str) -> Path:
    path = folder / "box.yaml"
    path.write_text(text)
    return path


def test_a_file_becomes_a_device_with_its_source_and_price(tmp_path: Path) -> None:
    device = load_device(file(tmp_path, BOX))
    assert device.name == "my-box"
    assert device.kind == "cuda"
    assert device.memory_bytes == 48_000_000_000
    assert device.bandwidth_bytes_per_s == 768e9
    assert device.peak_flops_per_s == {"fp16": 155e12, "int8": 310e12}
    assert device.dollars_per_hour == 0.79
    assert device.source == "data sheet, halved (box.yaml)"
    assert device.price_source == "device file box.yaml"
    assert device.last_level_cache_bytes is None
    assert device.threads is None


def test_what_a_file_leaves_out_is_missing_and_not_zero(tmp_path: Path) -> None:
    text = "name: x\nkind: mps\nmemory_bytes: 64000000000\nbandwidth_bytes_per_s: 1e11\nsource: s\n"
    device = load_device(file(tmp_path, text))
    assert device.kind == "mps"
    assert device.peak_flops_per_s == {}
    assert device.dollars_per_hour is None
    assert device.price_source == ""


def test_a_name_is_looked_up_and_a_path_is_read_from_the_folder_it_stands_in(tmp_path: Path) -> None:
    file(tmp_path, BOX)
    assert device_named("box.yaml", folder=tmp_path).name == "my-box"
    assert device_named(str(tmp_path / "box.yaml"), folder=Path("/nowhere")).name == "my-box"
    assert device_named("l40s", folder=tmp_path) == DATA_SHEET["l40s"]
    assert [is_device_file(name) for name in ("l40s", "./box", "box.YAML", "a/b.yml")] == [
        False,
        True,
        True,
        True,
    ]
    with pytest.raises(UsageError, match="did you mean 'l40s'"):
        device_named("L40-S", folder=tmp_path)


def test_the_example_is_eight_times_its_card() -> None:
    box, card = load_device(EXAMPLE), DATA_SHEET["h100-sxm"]
    assert box.memory_bytes == 8 * card.memory_bytes
    assert card.bandwidth_bytes_per_s is not None
    assert box.bandwidth_bytes_per_s == 8 * card.bandwidth_bytes_per_s
    assert box.peak_flops_per_s == {kind: 8 * peak for kind, peak in card.peak_flops_per_s.items()}
    assert "ideal tensor parallelism" in box.source


def test_every_problem_is_told_at_once_with_its_line(tmp_path: Path) -> None:
    text = (
        "name: my box\nmemory_byte: 48e9\nbandwidth_bytes_per_s: -1\n"
        "peak_flops_per_s: {fp61: 1e12}\nkind: gpu\nsource: ' '\n"
    )
    with pytest.raises(UsageError) as refused:
        load_device(file(tmp_path, text))
    lines = str(refused.value).splitlines()
    assert lines[0] == f"device file {tmp_path / 'box.yaml'}: 7 problems"
    told = "\n".join(lines[1:])
    assert "memory_bytes: is missing" in told
    assert "line 1: name: 'my box' may hold letters" in told
    assert "line 2: memory_byte: unknown key; did you mean 'memory_bytes'?" in told
    assert "line 3: bandwidth_bytes_per_s: should be greater than 0; found -1" in told
    assert "line 4: peak_flops_per_s.fp61: unknown key; did you mean 'fp16'?" in told
    assert "line 5: kind: 'gpu' is not allowed" in told
    assert "line 6: source: " in told


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("memory_bytes", "0", "greater than 0"),
        ("memory_bytes", "-5", "greater than 0"),
        ("memory_bytes", "48.5", "found 48.5"),
        ("memory_bytes", "true", "found True"),
        ("memory_bytes", "'48e9'", "found '48e9'"),
        ("memory_bytes", "1e30", "found 1e30"),
        ("memory_bytes", "80", "write 80 GB as 80e9"),
        ("bandwidth_bytes_per_s", ".nan", "not a finite number"),
        ("bandwidth_bytes_per_s", ".inf", "not a finite number"),
        ("bandwidth_bytes_per_s", "1e400", "not a finite number"),
        ("bandwidth_bytes_per_s", "3350", "3350 GB/s as 3350e9"),
        ("bandwidth_bytes_per_s", "null", "found None"),
        ("bandwidth_bytes_per_s", "[1e9]", "found [1000000000.0]"),
        ("peak_flops_per_s", "{fp16: 0}", "greater than 0"),
        ("peak_flops_per_s", "{fp16: 989}", "989 TFLOP/s as 989e12"),
        ("peak_flops_per_s", "989e12", "expected keys and values"),
        ("dollars_per_hour", "0", "greater than 0"),
        ("dollars_per_hour", "-2", "greater than 0"),
        ("source", "3", "expected text"),
        ("source", "''", "at least 1 character"),
    ],
)
def test_a_figure_that_no_device_has_is_refused_by_name(
    tmp_path: Path, key: str, value: str, told: str
) -> None:
    lines = [line for line in BOX.splitlines() if not line.startswith(f"{key}:")]
    with pytest.raises(UsageError) as refused:
        load_device(file(tmp_path, "\n".join([*lines, f"{key}: {value}"])))
    assert f"line 6: {key}" in str(refused.value)
    assert told in str(refused.value)
    assert "1 problem\n" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("# nothing yet\n\n", "is empty"),
        ("name: [", "line 1: is not valid YAML"),
        ("- 1\n", "top level must be keys and values"),
        ("h100\n", "top level must be keys and values"),
        ("a: 1\n---\nb: 2\n", "more than one document"),
        ("!!python/object:os.system {}\n", "is not allowed"),
        (BOX + "name: again\n", "the key stands twice"),
        ("{a: &a [*a]}", "contains itself"),
    ],
)
def test_what_is_no_device_file_is_said_to_be_none(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(UsageError, match="device file") as refused:
        load_device(file(tmp_path, text))
    assert told in str(refused.value)


def test_files_that_are_none_are_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "large.yaml").write_text("#" * (MOST_FILE_BYTES + 1))
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    (tmp_path / "model.yaml").mkdir()
    for name, told in [
        ("missing.yaml", "no such file"),
        ("pipe.yaml", "is no regular file"),
        ("large.yaml", "has 65,537 bytes; a device file has at most 65,536"),
        ("latin.yaml", "is not UTF-8"),
        ("model.yaml", "is a folder"),
        ("latin.yaml/x.yaml", "can't be read"),
        ("~nobody-here/x.yaml", "no such user"),
        ("a\0b.yaml", "is not a path"),
    ]:
        with pytest.raises(UsageError) as refused:
            device_named(name, folder=tmp_path)
        assert told in str(refused.value)
        assert "recipe needs" not in str(refused.value)
