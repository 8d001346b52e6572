"""The distribution of real (tiny) models on text: split heads, windows, files, and KL against exact arithmetic."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.distribution import compare, encode
from pipeline.distribution_reference import ReferenceReader, is_intact, reference_bytes
from pipeline.distribution_results import DistributionRequest, DistributionResult
from pipeline.distribution_run import as_block, measure_distribution, write_reference
from pipeline.distribution_text import Windows, read_windows
from pipeline.errors import StageError
from pipeline.split_model import SplitModel
from pipeline.store import file_sha256
from tests import tiny_models

TEXT = (
    "the wind over the harbour was cold and the boats stayed in, said the old man; nobody answered him.\n"
    * 30
)
KEY = "k" * 64


def request_for(tmp_path: Path, text: str = TEXT, **fields: Any) -> DistributionRequest:
    path = tmp_path / "held.txt"
    path.write_bytes(text.encode("utf-8"))
    defaults = {"context_tokens": 32, "max_tokens": 256}
    return DistributionRequest(text=str(path), text_sha256=file_sha256(path), **{**defaults, **fields})


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def measure(
    model: Any, windows: Windows, request: DistributionRequest, *, logits_at_once: int = 100_000
) -> DistributionResult:
    return measure_distribution(
        model,
        windows,
        request=request,
        batch_size=3,
        progress=lambda _: None,
        logits_at_once=logits_at_once,
    )


def written(model: Any, windows: Windows, request: DistributionRequest, folder: Path) -> DistributionRequest:
    folder.mkdir()
    write_reference(model, windows, folder=folder, key=KEY, batch_size=3, progress=lambda _: None)
    return request.model_copy(update={"reference": str(folder), "reference_key": KEY})


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny_models.write_llama(tmp_path / "llama", dtype="float32")


# --- the whole -------------------------------------------------------------------------------------------


def test_kl_of_two_models_is_the_exact_one_of_their_logits(tmp_path: Path, llama: Path) -> None:
    import torch

    other = load(tiny_models.write_llama(tmp_path / "other", dtype="float32", seed=1))
    model, request = load(llama), request_for(tmp_path)
    windows = read_windows(request, folder=llama)
    result = measure(other, windows, written(model, windows, request, tmp_path / "reference"))
    exact, nats, same = [], [], 0
    for window in windows.ids:
        ids = torch.tensor([window])
        with torch.no_grad():
            log_p, log_q = (
                torch.log_softmax(one(ids).logits[0, 16:31].double(), dim=-1) for one in (model, other)
            )
        exact += (log_p.exp() * (log_p - log_q)).sum(-1).tolist()
        nats += (-log_q.gather(1, ids[0, 17:32, None])[:, 0]).tolist()
        same += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
    distance = result.distance
    assert distance is not None
    assert result.scored_tokens == len(exact) == 8 * 15
    assert distance.kl_mean_nats == pytest.approx(math.fsum(exact) / len(exact), abs=2e-6)
    assert distance.kl_max_nats == pytest.approx(max(exact), abs=1e-5)
    assert distance.top1_agreement_share == same / len(exact)
    assert result.token_perplexity == pytest.approx(math.exp(math.fsum(nats) / len(nats)), rel=1e-5)


def test_the_baseline_s_own_run_finds_no_distance_from_its_file(tmp_path: Path, llama: Path) -> None:
    model, request = load(llama), request_for(tmp_path)
    windows = read_windows(request, folder=llama)
    request = written(model, windows, request, tmp_path / "reference")
    distance = measure(model, windows, request).distance
    assert distance is not None
    assert 0 <= distance.kl_mean_nats + 1e-6 < 3e-6
    assert distance.top1_agreement_share == distance.top5_agreement_share == 1.0
    assert distance.log_perplexity_ratio == pytest.approx(0.0, abs=1e-6)


def test_blocks_of_any_size_give_the_same_figures(tmp_path: Path, llama: Path) -> None:
    model, request = load(llama), request_for(tmp_path)
    windows = read_windows(request, folder=llama)
    request = written(model, windows, request, tmp_path / "reference")
    whole = measure(model, windows, request)
    small = measure(model, windows, request, logits_at_once=900)  # three positions
    assert small.token_perplexity == pytest.approx(whole.token_perplexity, rel=1e-6)
    assert small.distance is not None
    assert small.distance.kl_mean_nats == pytest.approx(0.0, abs=2e-6)


def test_a_uniform_model_has_its_vocabulary_as_perplexity(tmp_path: Path, llama: Path) -> None:
    import torch

    model, request = load(llama), request_for(tmp_path)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    result = measure(model, read_windows(request, folder=llama), request)
    assert result.token_perplexity == pytest.approx(300.0, rel=1e-5)
    assert result.token_perplexity_stderr == pytest.approx(0.0, abs=1e-3)
    assert result.bits_per_byte is not None
    assert result.byte_perplexity is not None
    assert result.bits_per_byte == pytest.approx(math.log2(result.byte_perplexity))


def test_a_logit_that_is_not_finite_leaves_no_figure(tmp_path: Path, llama: Path) -> None:
    import torch

    model, request = load(llama), request_for(tmp_path)
    windows = read_windows(request, folder=llama)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    result = measure(model, windows, request)
    assert not result.finite
    assert result.token_perplexity is None
    assert result.notes
    with pytest.raises(StageError, match="NaN or infinite"):
        written(model, windows, request, tmp_path / "reference")


def test_probabilities_of_a_large_vocabulary_sum_to_one() -> None:
    import numpy as np
    import torch

    logits = torch.randn(4, 262_144, generator=torch.Generator().manual_seed(0)) * 2
    block = as_block(logits, torch.zeros(4, dtype=torch.long))
    assert abs(np.exp(block.log_probs.astype(float)).sum(axis=1) - 1).max() < 1e-6
    assert abs(compare(block, encode(block)).kl_nats).max() < 1e-6


def test_of_equally_likely_tokens_the_smaller_id_comes_first() -> None:
    import torch

    block = as_block(torch.tensor([[0.0, 3.0, 1.0, 3.0, 2.0, 0.0]]), torch.tensor([0]))
    assert block.top[0, :4].tolist() == [1, 3, 4, 2]


# --- the model -------------------------------------------------------------------------------------------


def tiny(kind: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, Gemma2Config, OPTConfig

    torch.manual_seed(0)
    sizes = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "gemma2":
        config: Any = Gemma2Config(
            **sizes, intermediate_size=64, num_key_value_heads=1, head_dim=16, final_logit_softcapping=3.0
        )
    else:
        config = OPTConfig(**sizes, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "moe", "gemma2", "opt"])
def test_logits_made_in_pieces_are_those_of_the_whole_model(tmp_path: Path, kind: str) -> None:
    import torch

    writers = {"llama": tiny_models.write_llama, "gpt2": tiny_models.write_gpt2, "moe": tiny_models.write_moe}
    model = load(writers[kind](tmp_path / kind, dtype="float32")) if kind in writers else tiny(kind)
    ids = torch.arange(40).reshape(2, 20) % 100
    parts = SplitModel(model)
    assert parts.is_split == (kind != "opt")
    with torch.no_grad():
        whole = model(ids).logits
        made = parts.run(ids)
        pieces = torch.stack(
            [torch.cat([made.logits(row, start=at, stop=at + 5) for at in range(0, 20, 5)]) for row in (0, 1)]
        )
        assert torch.equal(model(ids).logits, whole), "the model isn't left as it was"
    assert parts.vocabulary_tokens == whole.shape[-1]
    assert torch.allclose(pieces, whole, atol=1e-5)


# --- the text --------------------------------------------------------------------------------------------


def test_windows_stand_one_after_the_other_and_cover_words_and_bytes_once(
    tmp_path: Path, llama: Path
) -> None:
    text = "ein Wörterbuch – für alle; κόσμε 🙂 word  two\n" * 60
    windows = read_windows(request_for(tmp_path, text), folder=llama)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(llama)
    ids = tokenizer(text).input_ids
    assert [token for window in windows.ids for token in window] == ids[: 8 * 32]
    assert windows.words is not None
    assert windows.utf8_bytes is not None
    for index, window in enumerate(windows.ids):
        exact = sum(len(piece) for piece in tokenizer.convert_ids_to_tokens(window[17:]))
        assert abs(windows.utf8_bytes[index] - exact) <= 3  # a character may lie in both halves
    part = tokenizer.decode(ids[: 8 * 32])
    assert sum(windows.words) <= len(part.split())
    assert sum(windows.words) == pytest.approx(len(part.split()) / 2, rel=0.25)


def test_the_last_words_of_a_window_are_those_that_begin_in_its_second_half(
    tmp_path: Path, llama: Path
) -> None:
    windows = read_windows(request_for(tmp_path, "a" + " b c d f h a" * 16, context_tokens=8), folder=llama)
    assert windows.scored_tokens == 3
    assert windows.words == (3,) * 12  # each token is a word with the space before it
    assert windows.utf8_bytes == (6,) * 12


def test_a_tokenizer_that_begins_text_with_bos_begins_each_window_with_it(
    tmp_path: Path, llama: Path
) -> None:
    from tokenizers import Tokenizer, processors

    plain = read_windows(request_for(tmp_path), folder=llama)
    file = llama / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    bytes_level = processors.ByteLevel(trim_offsets=False)
    bos = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.post_processor = processors.Sequence([bytes_level, bos])
    tokenizer.save(str(file))
    windows = read_windows(request_for(tmp_path), folder=llama)
    assert windows.bos_first
    assert not plain.bos_first
    assert {window[0] for window in windows.ids} == {1}
    assert windows.ids[0][1:] == plain.ids[0][:-1]
    assert windows.ids[1][1:] == plain.ids[1][:-1]
    assert windows.ids[0].count(1) == 1


def test_what_looks_like_a_special_token_in_the_text_is_text(tmp_path: Path, llama: Path) -> None:
    windows = read_windows(request_for(tmp_path, "a <s> b </s> c " * 60), folder=llama)
    assert not {1, 2} & {token for window in windows.ids for token in window}


def test_a_long_text_is_cut_without_changing_the_tokens_that_are_read(tmp_path: Path, llama: Path) -> None:
    text = TEXT * 40
    short = read_windows(request_for(tmp_path, text, max_tokens=64), folder=llama)
    long = read_windows(request_for(tmp_path, text, max_tokens=20_000), folder=llama)
    assert short.ids == long.ids[:2]
    assert short.utf8_bytes == (long.utf8_bytes or ())[:2]


def test_a_text_that_fills_no_two_windows_is_refused(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(StageError, match=r"holds 3 tokens, too few for 2 windows of 32"):
        read_windows(request_for(tmp_path, "aaa"), folder=llama)


def test_a_text_that_has_changed_is_refused(tmp_path: Path, llama: Path) -> None:
    request = request_for(tmp_path)
    Path(request.text).write_text(TEXT + "more")
    with pytest.raises(StageError, match="has changed"):
        read_windows(request, folder=llama)


# --- the file --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["byte", "cut", "positions", "description", "key", "gone"])
def test_a_reference_that_is_damaged_or_another_s_is_never_used(
    tmp_path: Path, llama: Path, damage: str
) -> None:
    model, request = load(llama), request_for(tmp_path)
    windows = read_windows(request, folder=llama)
    folder = tmp_path / "reference"
    request = written(model, windows, request, folder)
    assert is_intact(folder, key=KEY)
    codes = folder / "codes.bin"
    if damage == "byte":
        data = bytearray(codes.read_bytes())
        data[5000] ^= 1
        codes.write_bytes(bytes(data))
    elif damage == "cut":
        codes.write_bytes(codes.read_bytes()[:-2])
    elif damage == "positions":
        data = bytearray((folder / "positions.npy").read_bytes())
        data[-9] ^= 1
        (folder / "positions.npy").write_bytes(bytes(data))
    elif damage == "description":
        (folder / "reference.json").write_text("{}")
    elif damage == "gone":
        (folder / "reference.json").unlink()
    else:
        request = request.model_copy(update={"reference_key": "other"})
    assert not is_intact(folder, key=request.reference_key)
    with pytest.raises(StageError, match=re.escape(str(folder))):
        measure(model, windows, request)


def test_a_reference_takes_the_bytes_that_were_announced(tmp_path: Path, llama: Path) -> None:
    model, request = load(llama), request_for(tmp_path)
    windows = read_windows(request, folder=llama)
    written(model, windows, request, tmp_path / "reference")
    stored = sum(file.stat().st_size for file in (tmp_path / "reference").iterdir())
    assert 0 <= stored - reference_bytes(positions=8 * 15, vocabulary_tokens=300) < 1500


def test_a_reference_of_another_vocabulary_is_refused(tmp_path: Path, llama: Path) -> None:
    model, request = load(llama), request_for(tmp_path)
    windows = read_windows(request, folder=llama)
    request = written(model, windows, request, tmp_path / "reference")
    wider = load(tiny_models.write_llama(tmp_path / "wide", dtype="float32", vocab_size=310))
    with pytest.raises(StageError, match="120 positions of 300 tokens"):
        measure(wider, windows, request)


def test_blocks_are_read_as_they_were_written(tmp_path: Path, llama: Path) -> None:
    model, request = load(llama), request_for(tmp_path)
    windows = read_windows(request, folder=llama)
    written(model, windows, request, tmp_path / "reference")
    reader = ReferenceReader(tmp_path / "reference", key=KEY)
    whole, part = reader.rows(0, 120), reader.rows(40, 47)
    assert (whole.codes[40:47] == part.codes).all()
    assert (whole.top[40:47] == part.top).all()
