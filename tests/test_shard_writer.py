"""Files written tensor by tensor: what other readers read back, whole or not there at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.shard_writer import ShardRecord, ShardWriter, header_room, is_whole
from pipeline.tensorfile import read_header


def written(path: Path, *, parts: int = 1) -> ShardRecord:
    import torch

    with ShardWriter(path, room_bytes=header_room(["a.weight", "b"], parts=parts)) as shard:
        shard.add("a.weight", torch.arange(6, dtype=torch.float16).reshape(2, 3))
        shard.add("b", torch.tensor(2.5))
        return shard.finish()


def test_every_type_and_shape_is_read_back_by_safetensors_as_it_was_given(tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open

    floats = torch.tensor([[0.0, -1.5], [2.0, 448.0]])
    types = (
        *(
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        ),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
    )
    given = {str(dtype): floats.abs().to(dtype) for dtype in types}
    given |= {
        "scalar": torch.tensor(7.0),
        "empty": torch.zeros(0, 4),
        "transposed": floats.t(),
        'a "name"\n': floats,
    }
    path = tmp_path / "model.safetensors"
    with ShardWriter(path, room_bytes=header_room(given, parts=1, metadata_bytes=100)) as shard:
        for name, tensor in given.items():
            shard.add(name, tensor)
        shard.finish({"of": "test"})
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "of": "test"}
        assert set(opened.keys()) == set(given)
        for name, tensor in given.items():
            found = opened.get_tensor(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found.to(torch.float64), tensor.to(torch.float64)), name
    assert list(read_header(path)) == list(given)


def test_room_for_what_a_file_says_once_is_kept_once_however_many_names_there_are() -> None:
    names = [f"layers.{layer}.weight" for layer in range(1000)]
    plain = header_room(names, parts=2, metadata_bytes=30)
    room = header_room(names, parts=2, metadata_bytes=30, file_metadata_bytes=50_000)
    assert 50_000 <= room - plain < 50_008
    assert room % 8 == 0


def test_tensor_data_starts_at_a_multiple_of_eight(tmp_path: Path) -> None:
    for parts in (1, 2, 3):
        path = tmp_path / f"{parts}.safetensors"
        written(path, parts=parts)
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_a_file_has_its_name_only_once_it_is_whole(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "model.safetensors"
    with ShardWriter(path, room_bytes=1000) as shard:
        shard.add("a", torch.zeros(4))
        assert not path.exists()
        shard.finish()
        assert list(tmp_path.iterdir()) == [path]
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    import torch

    def give_up() -> None:
        with ShardWriter(tmp_path / "model.safetensors", room_bytes=1000) as shard:
            shard.add("a", torch.zeros(4))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        give_up()
    assert list(tmp_path.iterdir()) == []


def test_a_header_beyond_its_room_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    import torch

    with ShardWriter(tmp_path / "model.safetensors", room_bytes=64) as shard:
        shard.add("a" * 60, torch.zeros(4))
        with pytest.raises(ValueError, match="room for 64"):
            shard.finish()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", [0, 7, 9, 100, -1])
def test_one_changed_bit_anywhere_is_found(place: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    record = written(path)
    assert is_whole(path, record)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert not is_whole(path, record)


def test_a_missing_shortened_or_lengthened_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    record = written(path)
    content = path.read_bytes()
    for other in (content[:-1], content + b"\0", b""):
        path.write_bytes(other)
        assert not is_whole(path, record)
    path.unlink()
    assert not is_whole(path, record)
