"""Checkpoints made tensor by tensor: stopped in every way, gone on with, never more than little in memory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import hash_files
from pipeline.errors import StageError
from pipeline.process_memory import private_bytes_now, private_memory_limit, return_freed_memory
from pipeline.progress import ByteProgress
from pipeline.quantizers.native import Native
from pipeline.shard_writer import whole
from pipeline.store import JOURNAL_NAME
from pipeline.tensor_stream import Converted, Streamed, plan_pieces, stream
from pipeline.tensorfile import TensorInfo, tensors
from pipeline.weights import FLUSHED, cast, largest_magnitude
from tests.quantizer_samples import GATE, edited
from tests.small_disks import mounted_disk
from tests.tiny_models import write_llama

SHARD_BYTES = 30_000
FP32 = Native(dtype="fp32")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards or so."""
    folder = tmp_path_factory.mktemp("models") / "source"
    return write_llama(folder, dtype="bfloat16", shard_bytes=SHARD_BYTES)


@pytest.fixture(scope="module")
def unbroken(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a call that isn't stopped makes of it."""
    out = tmp_path_factory.mktemp("unbroken")
    FP32.quantize(source, out, device="cpu")
    return out


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


STOPPED = """
import sys, time
from pathlib import Path
from pipeline.quantizers.native import Native
def tell(text):
    print(text, flush=True)
    if (Path(sys.argv[2]) / ".journal.json").exists() and "wait" not in globals():
        globals()["wait"] = True
        print("STOP ME", flush=True)
        time.sleep(60)
Native(dtype="fp32").quantize(Path(sys.argv[1]), Path(sys.argv[2]), device="cpu", progress=tell)
"""


def stop_after_the_first_file(source: Path, out: Path, number: signal.Signals) -> int:
    """Run a process, send it a signal while it makes the second file; its exit status."""
    arguments = [sys.executable, "-c", STOPPED, str(source), str(out)]
    with subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # A job started in the background inherits an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        assert any(line.strip() == "STOP ME" for line in process.stdout)
        process.send_signal(number)
        return process.wait(timeout=300)


def weight_files(folder: Path) -> dict[str, int]:
    """Name and time of each: a file that was made anew has another one."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("[!.]*.safetensors")}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_process_is_gone_on_with_and_makes_the_same_files(
    number: signal.Signals, source: Path, unbroken: Path, out: Path
) -> None:
    assert stop_after_the_first_file(source, out, number) != 0
    finished = weight_files(out)
    assert 0 < len(finished) < len(weight_files(unbroken))
    notes = FP32.quantize(source, out, device="cpu")
    assert hash_files(out) == hash_files(unbroken)
    assert finished.items() <= weight_files(out).items()
    assert any(note.startswith(f"resumed: {len(finished)} of ") for note in notes)
    assert not list(out.glob(".partial-*"))


def test_a_finished_file_that_changed_since_is_made_again(source: Path, unbroken: Path, out: Path) -> None:
    FP32.quantize(source, out, device="cpu")
    first, second = sorted(weight_files(out))[:2]
    content = bytearray((out / first).read_bytes())
    content[-1] ^= 1
    (out / first).write_bytes(content)
    (out / second).unlink()
    before = weight_files(out)
    notes = FP32.quantize(source, out, device="cpu")
    assert hash_files(out) == hash_files(unbroken)
    assert {name for name, time in weight_files(out).items() if before.get(name) != time} == {first, second}
    assert notes[0].startswith(f"resumed: {len(before) - 1} of {len(before) + 1} files")


@pytest.mark.parametrize("spoil", ["", "{", '{"made_from": 3}', None])
def test_without_a_readable_journal_everything_is_made_again(
    spoil: str | None, source: Path, unbroken: Path, out: Path
) -> None:
    FP32.quantize(source, out, device="cpu")
    before = weight_files(out)
    if spoil is None:
        (out / JOURNAL_NAME).unlink()
    else:
        (out / JOURNAL_NAME).write_text(spoil, encoding="utf-8")
    assert FP32.quantize(source, out, device="cpu") == ()
    assert hash_files(out) == hash_files(unbroken)
    assert not set(before.items()) & set(weight_files(out).items())


def test_what_was_made_with_other_settings_is_never_taken_up(source: Path, unbroken: Path, out: Path) -> None:
    Native(dtype="fp16").quantize(source, out, device="cpu")
    assert FP32.quantize(source, out, device="cpu") == ()
    assert hash_files(out) == hash_files(unbroken)


def test_counts_of_files_made_before_are_counted_too(tmp_path: Path, out: Path) -> None:
    def shrink(weights: dict[str, Any]) -> None:
        weights[GATE][0, :3] = 1e-9

    source = edited(write_llama(tmp_path / "bf16", dtype="bfloat16"), tmp_path / "edited", shrink)
    quantizer = Native(dtype="fp16")
    first = quantizer.quantize(source, out, device="cpu")
    again = quantizer.quantize(source, out, device="cpu")
    assert first == ("3 weights too small for fp16 became zero",)
    assert again[0] == first[0]
    assert again[1].startswith("resumed: 1 of 1 files")


def test_progress_tells_rate_and_time_left_of_this_calls_work_only() -> None:
    now = 100.0
    told: list[str] = []
    progress = ByteProgress(told.append, total_bytes=20_000_000_000, clock=lambda: now)
    now = 110.0
    progress.found(4_000_000_000)
    now = 112.0
    progress.done(1_000_000_000)
    assert told == ["4.00 of 20.00 GB", "5.00 of 20.00 GB · 0.50 GB/s · about 30 s left"]


# --- disks -----------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 160 KiB."""
    with mounted_disk(tmp_path / "small", kibibytes=160) as folder:
        yield folder


def test_a_full_disk_keeps_what_is_finished_and_more_room_lets_it_go_on(
    source: Path, unbroken: Path, small_disk: Path
) -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        FP32.quantize(source, small_disk, device="cpu")
    assert caught.value.filename == str(small_disk)
    finished = weight_files(small_disk)
    assert 0 < len(finished) < len(weight_files(unbroken))
    assert not list(small_disk.glob(".partial-*"))
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    FP32.quantize(source, small_disk, device="cpu")
    assert hash_files(small_disk) == hash_files(unbroken)
    assert finished.items() <= weight_files(small_disk).items()


# --- refusals --------------------------------------------------------------------------------------------


def test_a_weight_that_is_refused_leaves_nothing_to_go_on_with(
    source: Path, tmp_path: Path, out: Path
) -> None:
    from safetensors.torch import load_file, save_file

    damaged = tmp_path / "damaged"
    damaged.mkdir()
    files = sorted(source.glob("*.safetensors"))
    for path in source.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    weights = load_file(files[-1])
    name = min(weights)
    weights[name].view(-1)[3] = float("nan")
    save_file(weights, damaged / files[-1].name)
    with pytest.raises(StageError, match=f"1 non-finite weight in {name}"):
        FP32.quantize(damaged, out, device="cpu")
    assert not (out / JOURNAL_NAME).exists()


def test_a_cast_that_makes_a_weight_infinite_is_refused_by_name() -> None:
    import torch

    weight = torch.tensor([1.0, 3.4e38, -3.4e38])
    with pytest.raises(StageError, match="a: 2 weights too large for bfloat16"):
        cast("a", weight, torch.bfloat16)
    assert cast("a", weight, torch.float32) is weight


@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16"])
def test_a_cast_in_pieces_gives_every_bit_of_a_cast_and_counts_what_became_zero(
    source: str, target: str
) -> None:
    import torch

    wanted = getattr(torch, target)
    draw = torch.Generator().manual_seed(0)
    exponents = torch.randint(-44, 15, (3, 100_000), generator=draw).to(torch.float64)
    weights = (torch.randn(3, 100_000, generator=draw, dtype=torch.float64) * 2**exponents).to(
        getattr(torch, source)
    )
    counts: Counter[str] = Counter()
    made = whole(cast("a", weights, wanted, counts=counts))
    expected = weights.to(wanted)
    assert made.dtype == wanted
    assert torch.equal(made, expected)
    assert counts[FLUSHED] == int(weights.count_nonzero() - expected.count_nonzero())
    assert (counts[FLUSHED] > 0) == (target == "float16" and source != "float16")


@pytest.mark.parametrize(("value", "fits"), [(65_519.996, True), (65_520.0, False)])
def test_fp16_takes_what_rounds_to_its_largest_number(value: float, fits: bool) -> None:
    import torch

    weight = torch.tensor([-value, 1.0])
    if fits:
        assert whole(cast("a", weight, torch.float16)).tolist() == [-65_504.0, 1.0]
    else:
        with pytest.raises(StageError, match="1 weights too large for float16"):
            cast("a", weight, torch.float16)


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16", "float8_e5m2"])
def test_the_largest_magnitude_is_found_whatever_its_sign_and_infinity_and_nan_before_all(name: str) -> None:
    import torch

    dtype = getattr(torch, name)
    weights = torch.tensor([[0.0, -3.0, 2.5], [1.0, -0.0, 0.5]]).to(dtype)
    assert largest_magnitude(weights) == 3.0
    assert largest_magnitude(weights.t()) == 3.0
    assert largest_magnitude(weights[:0]) == 0.0
    assert largest_magnitude(torch.zeros((), dtype=dtype)) == 0.0
    for value, expected in ((float("inf"), "inf"), (float("-inf"), "inf"), (float("nan"), "nan")):
        spoilt = weights.clone()
        spoilt[1, 1] = value
        assert str(largest_magnitude(spoilt)) == expected


# --- files and memory ------------------------------------------------------------------------------------


def described(sizes: dict[str, int], *, file: str) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(file=file, dtype="U8", shape=(size,), size_bytes=size)
        for name, size in sizes.items()
    }


def test_files_below_the_limit_keep_their_names_and_larger_ones_are_cut_between_tensors() -> None:
    small = described({"a": 40, "b": 40}, file="one") | described({"c": 100}, file="two")
    assert [(piece.file, piece.names) for piece in plan_pieces(small, most_bytes=100)] == [
        ("one", ("a", "b")),
        ("two", ("c",)),
    ]
    large = small | described({"d": 500, "e": 60, "f": 60}, file="three")
    pieces = plan_pieces(large, most_bytes=100)
    assert [piece.names for piece in pieces] == [("a", "b"), ("c",), ("d",), ("e",), ("f",)]
    assert [piece.source_file for piece in pieces] == ["one", "two", "three", "three", "three"]
    assert [piece.file for piece in pieces] == [f"model-0000{n}-of-00005.safetensors" for n in range(1, 6)]
    assert [piece.source_bytes for piece in pieces] == [80, 100, 500, 60, 60]


def test_one_tensor_may_become_several_none_or_metadata(source: Path, out: Path) -> None:
    from safetensors import safe_open

    def convert(name: str, tensor: Any) -> Converted:
        if not name.endswith("gate_proj.weight"):
            return Converted({})
        halves = {f"{name}.{half}": rows for half, rows in enumerate(tensor.chunk(2))}
        return Converted(halves, metadata={name: "halved"}, counts={"halved": 1})

    told: list[str] = []
    streamed = stream(
        source, out, convert=convert, parts=2, metadata_bytes=100, settings={}, progress=told.append
    )
    assert streamed == Streamed(files=len(weight_files(source)), files_found=0, counts={"halved": 1})
    found = tensors(out)
    assert {name: info.shape for name, info in found.items()} == {
        f"{GATE}.0": (64, 64),
        f"{GATE}.1": (64, 64),
    }
    with safe_open(out / found[f"{GATE}.0"].file, framework="pt") as opened:
        assert opened.metadata()[GATE] == "halved"
    assert len(told) == len(tensors(source))
    assert all(" of 0.00 GB" in text for text in told)


def test_a_checkpoint_much_larger_than_the_memory_it_may_take_passes_through(
    tmp_path: Path, out: Path
) -> None:
    import torch
    from safetensors.torch import save_file

    source = tmp_path / "large"
    source.mkdir()
    names = [f"layers.{layer}.weight" for layer in range(32)]
    files = [f"model-{number}.safetensors" for number in range(16)]
    for number, file in enumerate(files):
        weight = torch.full((1024, 4096), 0.5 + number, dtype=torch.bfloat16)
        save_file({name: weight.clone() for name in names[2 * number : 2 * number + 2]}, source / file)
    index = {"weight_map": {name: files[place // 2] for place, name in enumerate(names)}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (source / "config.json").write_text("{}", encoding="utf-8")
    return_freed_memory()
    now = private_bytes_now()
    # A mapped file counts here as well: 16.8 MB of it, and two tensors of 16.8 MB as FP32.
    with private_memory_limit(None if now is None else now + 80_000_000):
        Native(dtype="fp32").quantize(source, out, device="cpu")
    found = tensors(out)
    assert sum(info.size_bytes for info in found.values()) == 32 * 1024 * 4096 * 4
    assert {name: info.file for name, info in found.items()} == index["weight_map"]
