"""The table of decode paths: real on a processor with a tiny shape, and honest about goals that are missed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.hardware import detect
from pipeline.measured import Distribution
from pipeline.recipe import load_recipe
from scripts import gpu_decode
from scripts.gpu_decode import GOALS, RECIPES, Decoded, ModelTable, Table, candidates, page

SIZES: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}


def tiny_recipe(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(SIZES))
    recipe = {
        "model": {"id": "tiny", "config": "config.json", "weights": "random"},
        "precisions": ["bf16", "int8"],
        "speed": {},
        "gate": [{"kind": "max_memory", "fraction": 1.5}],
    }
    path = folder / "tiny.yaml"
    path.write_text(json.dumps(recipe))
    return path


def run(tmp_path: Path, *only: str) -> int:
    lengths = ("--prompt-tokens", "8", "--new-tokens", "6", "--repeats", "3", "--min-seconds", "0")
    recipe = str(tiny_recipe(tmp_path))
    return gpu_decode.main([str(tmp_path / "out"), "--recipes", recipe, "--only", *only, *lengths])


def test_a_tiny_shape_goes_from_recipe_to_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A compiled path, too, where there is a C++ compiler to do it."""
    compiled = ["int8 torchao, compiled"] if shutil.which("g++") else []
    status = run(tmp_path, "bf16, eager", "bf16, vllm", *compiled)
    table = Table.model_validate_json((tmp_path / "out" / "gpu-decode.json").read_text())
    (model,) = table.models
    paths = {one.path: one for one in model.paths}
    assert list(paths) == ["bf16, eager", *compiled, "bf16, vllm"]
    for name in compiled:
        assert (paths[name].because, paths[name].execution) == ("", "compiled, static cache, sdpa attention")
    eager = paths["bf16, eager"]
    assert eager.execution == "eager, dynamic cache, sdpa attention"
    assert eager.tokens_per_s is not None
    assert eager.tpot_s is not None
    assert len(eager.tpot_s.samples) >= 3
    assert eager.bytes_read_per_step is not None
    assert eager.bytes_read_per_step > 2 * (300 * 64 + 4 * 64 * 64)
    assert eager.of_eager == 1
    assert paths["bf16, vllm"].verdict == "engine vllm runs on CUDA devices only, not on 'cpu'"
    assert eager.verdict == ("noisy" if eager.noisy else "missed")
    assert (status, model.missed[0]) == (1, "bf16")
    printed = capsys.readouterr().out
    assert printed.strip() == (tmp_path / "out" / "gpu-decode.md").read_text().strip()
    assert f"- bf16: {'too noisy to judge' if eager.noisy else 'goal missed'}: 0." in printed


@pytest.mark.skipif(detect().kind == "cuda", reason="vLLM may run on this GPU")
def test_a_table_of_paths_that_all_cannot_run_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "bf16, vllm") == 1
    printed = capsys.readouterr().out
    assert "No path can run here, so nothing was measured." in printed
    assert "engine vllm runs on CUDA devices only" in printed
    assert "- bf16: not measured on any path" in printed


def test_a_path_that_there_is_not_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, "int3")
    assert "no such path; there are: bf16, eager; bf16, compiled" in capsys.readouterr().err


def decoded(path: str, *, share: float | None, because: str = "", noisy: bool = False) -> Decoded:
    measured = share is not None
    return Decoded(
        path=path,
        precision=path.split()[0].rstrip(","),
        because=because,
        noisy=noisy,
        tokens_per_s=100.0 if measured else None,
        tpot_s=Distribution.of([0.01, 0.0102]) if measured else None,
        bytes_read_per_step=16_000_000_000 if measured else None,
        share=share,
    )


def test_a_missed_goal_is_shown_as_missed_and_the_best_path_decides() -> None:
    model = ModelTable(
        model="8b",
        read_bandwidth_bytes_per_s=2e12,
        alternated=True,
        drift_percent=0.4,
        paths=(
            decoded("bf16, eager", share=0.30),
            decoded("bf16, compiled", share=0.70),
            decoded("int8 torchao, compiled", share=0.5499),
            decoded("int4 torchao, compiled", share=None, because="failed: no kernel"),
        ),
    )
    assert [one.verdict for one in model.paths] == ["missed", "met", "missed", "failed: no kernel"]
    assert model.missed == ("int8", "int4")
    text = page(
        Table(
            device="a GPU",
            sheet_bandwidth_bytes_per_s=2.2e12,
            versions={"torch": "2.13.0"},
            prompt_tokens=512,
            new_tokens=128,
            models=(model,),
        )
    )
    assert "- bf16: goal met: 70.00 % by bf16, compiled, at least 70 % wanted" in text
    assert "- int8: goal missed: 54.99 % by int8 torchao, compiled, at least 55 % wanted" in text
    assert "- int4: not measured on any path" in text
    assert "| bf16, eager | 100.0 | 10.100 | 1.0 | 16.000 | 1584.2 | 30.0 | 70 | missed |" in text


def test_a_noisy_figure_meets_no_goal_and_hides_none_that_is_met() -> None:
    def table(*paths: Decoded) -> ModelTable:
        return ModelTable(
            model="8b", read_bandwidth_bytes_per_s=2e12, alternated=True, drift_percent=0.4, paths=paths
        )

    noisy = decoded("bf16, compiled", share=0.80, noisy=True)
    assert noisy.verdict == "noisy"
    assert table(noisy, decoded("bf16, eager", share=0.30)).missed == ("bf16",)
    assert table(noisy, decoded("bf16, eager", share=0.71)).missed == ()


def test_every_precision_with_a_goal_has_paths_and_every_recipe_is_there() -> None:
    names = [one.name for one in candidates()]
    assert len(set(names)) == len(names)
    assert {one.quantizer.precision for one in candidates()} == set(GOALS)
    assert [one.name for one in candidates(["int4"])] == [
        *("int4 torchao, eager", "int4 torchao, compiled", "int4 quanto, eager", "int4 bitsandbytes, eager"),
    ]
    assert [one.name for one in candidates() if one.name.endswith("vllm")] == ["bf16, vllm"]
    for path in RECIPES:
        assert load_recipe(path).recipe.model.weights == "random"
