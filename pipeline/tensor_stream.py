"""A checkpoint made tensor by tensor: read, converted, written, forgotten, whatever the model's size.

Every source file becomes one file of the same name (a very large one several), written under a hidden name and
renamed when it is whole. A journal beside them lists what is finished, so that the same call after a crash, a
kill or a full disk goes on with the first file that is missing or no longer what was written.

    streamed = stream(source, out, convert=lambda name, tensor: Converted({name: tensor.half()}),
                      parts=1, settings={"dtype": "fp16"}, progress=print)
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field, ValidationError

from pipeline.errors import StageError
from pipeline.process_memory import return_freed_memory
from pipeline.progress import ByteProgress, Tell
from pipeline.shard_writer import Blocks, ShardRecord, ShardWriter, header_room, is_whole
from pipeline.store import JOURNAL_NAME, write_atomically
from pipeline.tensorfile import INDEX_NAME, SINGLE_NAME, TensorInfo, read_header, tensors
from pipeline.values import Value, digest
from pipeline.weights import largest_magnitude, read_file, saving_to, scan_source, write_json

if TYPE_CHECKING:
    import torch

LARGEST_PIECE_BYTES = 5_000_000_000
"""Source bytes that become one file at most, as hubs split models."""


class Converted(NamedTuple):
    """What one source tensor becomes: tensors by name, entries of the file's metadata, things to count for notes.

    The counts are read once the tensors are written.
    """

    tensors: Mapping[str, torch.Tensor | Blocks]
    metadata: Mapping[str, str] = {}
    counts: Mapping[str, int] = {}


Convert = Callable[[str, "torch.Tensor"], Converted]
"""From a source tensor, in memory that must not be written to, to what is stored of it. Raises StageError."""


class Piece(Value):
    """Source tensors that become one file: in file order, of one source file."""

    file: str
    source_file: str
    names: tuple[str, ...]
    source_bytes: int


class Streamed(Value):
    """What `stream` did. `counts` are those of all files, whichever call wrote them."""

    files: int
    files_found: int
    counts: dict[str, int]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of times and peaks must know."""
        if not self.files_found:
            return ()
        return (
            f"resumed: {self.files_found} of {self.files} files are of an earlier call that was stopped; seconds "
            "and peak memory are of the rest",
        )


class _Finished(Value):
    record: ShardRecord
    counts: dict[str, int]


class _Journal(Value):
    """`made_from` is the digest of everything that decides what the files hold."""

    made_from: str
    files: dict[str, _Finished] = Field(default_factory=dict)


def stream(
    source: Path,
    out: Path,
    *,
    convert: Convert,
    parts: int,
    settings: Mapping[str, Any],
    progress: Tell,
    metadata_bytes: int = 0,
    file_metadata_bytes: int = 0,
    left_out: frozenset[str] = frozenset(),
) -> Streamed:
    """Convert every tensor of `source` into files in `out`, going on where an earlier call was stopped.

    A source tensor becomes at most `parts` tensors and `metadata_bytes` of metadata; every file has at most
    `file_metadata_bytes` of it besides. `settings` is whatever, beside the source, decides what `convert` gives.
    Tensors named in `left_out` are not read. Raises StageError naming the tensors when the source holds NaN or
    infinity, and what `convert` raises; then nothing is left to go on with. Raises OSError when the disk is full;
    finished files and journal then stay.
    """
    import torch  # noqa: F401  (before the clock of the rate starts, which would count it)

    found = {name: info for name, info in tensors(source).items() if name not in left_out}
    pieces = plan_pieces(found)
    made_from = digest([dict(settings), {name: info.model_dump() for name, info in found.items()}])
    told = ByteProgress(progress, total_bytes=sum(piece.source_bytes for piece in pieces))
    with saving_to(out):
        journal = _take_up(out, made_from=made_from)
        files_found = len(journal.files)
        for piece in pieces:
            if piece.file in journal.files:
                told.found(piece.source_bytes)
                continue
            room_bytes = header_room(
                piece.names,
                parts=parts,
                metadata_bytes=metadata_bytes,
                file_metadata_bytes=file_metadata_bytes,
            )
            finished = _write(source, out, piece, found, convert=convert, room_bytes=room_bytes, told=told)
            journal = journal.model_copy(update={"files": {**journal.files, piece.file: finished}})
            write_atomically(out / JOURNAL_NAME, journal.to_json())
            return_freed_memory()
        _write_index(out, pieces)
    counts: Counter[str] = Counter()
    for one in journal.files.values():
        counts.update(one.counts)
    return Streamed(files=len(pieces), files_found=files_found, counts=dict(counts))


def plan_pieces(
    found: Mapping[str, TensorInfo], *, most_bytes: int = LARGEST_PIECE_BYTES
) -> tuple[Piece, ...]:
    """Which tensors become which file: the source's own files, cut where they exceed `most_bytes`.

    Where none is cut the names stay; else all are numbered anew.
    """
    groups: list[list[str]] = []
    file, held_bytes = "", 0
    for name, info in found.items():
        if info.file != file or held_bytes + info.size_bytes > most_bytes:
            groups.append([])
            file, held_bytes = info.file, 0
        groups[-1].append(name)
        held_bytes += info.size_bytes
    sources = [found[names[0]].file for names in groups]
    cut = len(set(sources)) < len(groups)
    return tuple(
        Piece(
            file=f"model-{number:05}-of-{len(groups):05}.safetensors" if cut else sources[number - 1],
            source_file=sources[number - 1],
            names=tuple(names),
            source_bytes=sum(found[name].size_bytes for name in names),
        )
        for number, names in enumerate(groups, start=1)
    )


def forget(out: Path) -> None:
    """Remove the journal: the folder is finished, or can't be."""
    (out / JOURNAL_NAME).unlink(missing_ok=True)


def _take_up(out: Path, *, made_from: str) -> _Journal:
    """The journal of what is finished and intact in `out`; every other weight file there is removed."""
    journal = _Journal(made_from=made_from)
    with contextlib.suppress(OSError, ValidationError):
        left = _Journal.model_validate_json((out / JOURNAL_NAME).read_bytes())
        if left.made_from == made_from:
            journal = left
    intact = {name: one for name, one in journal.files.items() if is_whole(out / name, one.record)}
    for path in out.iterdir():
        if path.suffix == ".safetensors" and path.name not in intact:
            path.unlink()
    if not intact:
        forget(out)
    return journal.model_copy(update={"files": intact})


def _write(
    source: Path,
    out: Path,
    piece: Piece,
    found: Mapping[str, TensorInfo],
    *,
    convert: Convert,
    room_bytes: int,
    told: ByteProgress,
) -> _Finished:
    counts: Counter[str] = Counter()
    metadata: dict[str, str] = {}
    wanted = {name: found[name] for name in piece.names}
    with ShardWriter(out / piece.file, room_bytes=room_bytes) as shard:

        def pass_on(
            name: str, tensor: torch.Tensor
        ) -> None:  # a call of its own, so that nothing outlives it
            made = _checked(source, name, tensor, convert=convert)
            for part, stored in made.tensors.items():
                shard.add(part, stored)
            metadata.update(made.metadata)
            counts.update(made.counts)

        try:
            for name, tensor in read_file(source / piece.source_file, wanted):
                pass_on(name, tensor)
                told.done(wanted[name].size_bytes)
        except StageError:
            forget(out)  # it will be refused again, so there is nothing to go on with
            raise
        return _Finished(record=shard.finish(metadata), counts=dict(counts))


def _checked(source: Path, name: str, tensor: torch.Tensor, *, convert: Convert) -> Converted:
    if tensor.is_floating_point() and not math.isfinite(largest_magnitude(tensor)):
        scan_source(source)  # raises, with every tensor that is damaged
    return convert(name, tensor)


def _write_index(out: Path, pieces: tuple[Piece, ...]) -> None:
    if [piece.file for piece in pieces] == [SINGLE_NAME]:
        return
    written = {name: info for piece in pieces for name, info in read_header(out / piece.file).items()}
    index = {
        "metadata": {"total_size": sum(info.size_bytes for info in written.values())},
        "weight_map": {name: info.file for name, info in sorted(written.items())},
    }
    write_json(out / INDEX_NAME, index)
