"""Models of random weights made where they run: what a checkpoint would have given, and nothing stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import build_manifest, check_earned_label, read_manifest, verify
from pipeline.errors import CheckpointError, PrerequisiteError, RecipeError
from pipeline.hardware import detect
from pipeline.live_tensors import device_types, resident_bytes
from pipeline.preflight import preflight
from pipeline.process_memory import peak_resident_bytes, reset_peak_resident_bytes, resident_bytes_now
from pipeline.quantizers.base import Quantizer
from pipeline.quantizers.bitsandbytes import Bitsandbytes
from pipeline.quantizers.native import Native
from pipeline.quantizers.quanto import Quanto
from pipeline.quantizers.torchao import Torchao
from pipeline.random_weights import random_manifest
from pipeline.recipe import load_recipe
from pipeline.store import Store
from pipeline.weights import quiet_transformers
from tests.quantizer_samples import EVERY, every_quantizer, name_of
from tests.random_variants import CONFIGS, SOURCE, load, made, tensors_of, write

COMPARED = ("llama, tied", "llama, not tied", "gpt2", "gemma3", "mixture of experts", "hybrid")


# --- the same as a checkpoint ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each config a folder with the weights that seed 0 gives, in BF16, as a trained model would lie there."""
    root = tmp_path_factory.mktemp("sources")
    folders = {}
    for name in COMPARED:
        bf16 = Native(dtype="bf16")
        model = load(
            write(CONFIGS[name], root / name / "random", quantizer=bf16),
            quantizer=bf16,
            compute_dtype="bfloat16",
        )
        folders[name] = root / name / "source"
        with quiet_transformers():
            model.save_pretrained(folders[name])
    return folders


def settings_of(model: Any) -> dict[str, Any]:
    """What else could make two models run differently."""
    config = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    return {
        "config": {key: value for key, value in config.items() if key not in ("architectures", "dtype")},
        "attention": model.config._attn_implementation,
        "modules": {name: type(module) for name, module in model.named_modules()},
        "training": {module.training for module in model.modules()},
        "gradients": {parameter.requires_grad for parameter in model.parameters()},
        "hooked": [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")],
        "states": {
            name: (module.state.threshold, module.state.has_fp16_weights)
            for name, module in model.named_modules()
            if hasattr(module, "state")
        },
        "arithmetic": {getattr(module, "compute_dtype", None) for module in model.modules()},
        "upstream": type(getattr(model, "hf_quantizer", None)),
    }


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", COMPARED)
@every_quantizer
def test_a_model_made_in_place_is_the_one_quantized_saved_and_loaded_bit_for_bit(
    quantizer: Quantizer, name: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    import torch

    (tmp_path / "stored").mkdir()
    quantizer.quantize(sources[name], tmp_path / "stored", device="cpu")
    write(CONFIGS[name], tmp_path / "random", quantizer=quantizer)
    for compute_dtype in ("float32", "bfloat16", "float16"):
        stored = load(tmp_path / "stored", quantizer=quantizer, compute_dtype=compute_dtype)
        random = load(tmp_path / "random", quantizer=quantizer, compute_dtype=compute_dtype)
        assert settings_of(random) == settings_of(stored)
        assert resident_bytes(random) == resident_bytes(stored)
        expected, found = dict(tensors_of(stored)), dict(tensors_of(random))
        assert list(found) == list(expected)
        for part, tensor in found.items():
            assert tensor.dtype == expected[part].dtype, part
            assert tensor.shape == expected[part].shape, part
            assert torch.equal(tensor, expected[part]), part


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", COMPARED)
@every_quantizer
def test_the_manifest_says_what_that_checkpoint_holds(
    quantizer: Quantizer, name: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    stored = tmp_path / "stored"
    stored.mkdir()
    quantizer.quantize(sources[name], stored, device="cpu")
    expected = build_manifest(stored, quantizer=quantizer, source=SOURCE, seconds=0.0, peak_memory_bytes=0)
    found = made(CONFIGS[name], tmp_path / "random", quantizer=quantizer)
    assert found.parameters == expected.parameters
    assert found.weight_bytes_on_disk == pytest.approx(expected.weight_bytes_on_disk, rel=0.005)
    assert found.weight_bytes_read_per_token == pytest.approx(expected.weight_bytes_read_per_token, rel=0.005)
    assert found.bits_per_block_weight == pytest.approx(expected.bits_per_block_weight, rel=0.005)
    if name == "mixture of experts":  # files hold experts apart, the model in one parameter
        assert found.coverage.share == expected.coverage.share
        assert found.coverage.head_weights == expected.coverage.head_weights
    else:
        assert found.coverage == expected.coverage


@pytest.mark.parametrize("quantizer", [Quanto(weights="int8"), Quanto(weights="int4")], ids=name_of)
@pytest.mark.parametrize("name", ["gpt2", "mixture of experts"])
def test_a_label_that_the_model_would_not_earn_is_refused(
    quantizer: Quantizer, name: str, tmp_path: Path
) -> None:
    manifest = made(CONFIGS[name], tmp_path / "random", quantizer=quantizer)
    with pytest.raises(CheckpointError, match="block weights quantized"):
        check_earned_label(manifest, quantizer=quantizer)


# --- what is stored --------------------------------------------------------------------------------------


@every_quantizer
def test_a_variant_is_config_seed_and_manifest_and_says_so(quantizer: Quantizer, tmp_path: Path) -> None:
    manifest = made(CONFIGS["llama, tied"], tmp_path / "random", quantizer=quantizer, seed=7)
    assert sorted(path.name for path in (tmp_path / "random").iterdir()) == [
        "config.json",
        "manifest.json",
        "random_weights.json",
    ]
    assert [record.name for record in manifest.files] == ["config.json", "random_weights.json"]
    assert manifest.random_seed == 7
    assert "random weights, made on the device from seed 7" in manifest.notes[0]
    assert read_manifest(tmp_path / "random") == manifest
    verify(tmp_path / "random", manifest)


def test_another_seed_config_or_quantizer_is_another_content(tmp_path: Path) -> None:
    config = CONFIGS["llama, tied"]
    settings: list[tuple[dict[str, Any], int, Quantizer]] = [
        (config, 0, Native(dtype="bf16")),
        (config, 1, Native(dtype="bf16")),
        ({**config, "rope_theta": 5.0}, 0, Native(dtype="bf16")),
        ({**config, "dtype": "float16"}, 0, Native(dtype="bf16")),
        *((config, 0, quantizer) for quantizer in EVERY if quantizer != Native(dtype="bf16")),
    ]
    digests = [
        made(described, tmp_path / str(number), quantizer=quantizer, seed=seed).content_digest()
        for number, (described, seed, quantizer) in enumerate(settings)
    ]
    assert len(set(digests)) == len(settings)
    again = made(config, tmp_path / "again", quantizer=Native(dtype="bf16"))
    assert again.content_digest() == digests[0]


def test_a_changed_seed_is_found_by_verifying(tmp_path: Path) -> None:
    folder = tmp_path / "random"
    manifest = made(CONFIGS["llama, tied"], folder, quantizer=Native(dtype="bf16"), seed=1)
    seed_file = folder / "random_weights.json"
    seed_file.write_text(seed_file.read_text("utf-8").replace('"seed": 1', '"seed": 2'), "utf-8")
    with pytest.raises(CheckpointError, match=r"random_weights\.json: changed"):
        verify(folder, manifest)


def test_random_weights_need_memory_but_no_disk(tmp_path: Path) -> None:
    """No disk holds a thousand terabytes, so that one asked for would show on every machine."""
    huge = {
        **CONFIGS["llama, tied"],
        "vocab_size": 2**31 - 1,
        "hidden_size": 2**18,
        "max_position_embeddings": 64,
    }
    (tmp_path / "huge.json").write_text(json.dumps(huge), "utf-8")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {id: some/model, config: huge.json, weights: random}\n"
        "precisions: [bf16, fp16]\n"
        "workload: {prompt_tokens: 8, new_tokens: 8}\n"
        "speed: {batch_sizes: [1]}\n"
        "gate: [{kind: max_memory, fraction: 1.0}]\n",
        "utf-8",
    )
    loaded, device = load_recipe(recipe), detect()
    expanded = loaded.recipe.expand(device=device.kind)
    ready = preflight(loaded, recipe=expanded, device=device, store=Store(tmp_path / "store"))
    told = [problem.what for problem in ready.problems]
    assert any("bf16 needs 1125900.5 GB for weights" in what for what in told), told
    assert not any("disk" in what for what in told), told


# --- the weights -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_architecture_is_made_whole_and_runs(
    tmp_path: Path, config: dict[str, Any], dtype: str
) -> None:
    import torch

    quantizer = Native.model_validate({"dtype": dtype})
    manifest = made(config, tmp_path / "random", quantizer=quantizer)
    model = load(tmp_path / "random", quantizer=quantizer)
    assert sum(parameter.numel() for parameter in model.parameters()) == manifest.parameters
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]])).logits
    assert bool(torch.isfinite(logits).all())
    assert float(logits.std()) > 0


def test_weights_follow_from_the_seed_alone_and_leave_the_generator_as_it_was(tmp_path: Path) -> None:
    import torch

    bf16 = Native(dtype="bf16")
    config = CONFIGS["llama, not tied"]
    heads: list[torch.Tensor] = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        folder = write(config, tmp_path / name, quantizer=bf16, seed=seed)
        torch.manual_seed(len(heads))
        before = torch.get_rng_state()
        heads.append(load(folder, quantizer=bf16).lm_head.weight)
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_layers_of_one_shape_get_weights_of_their_own(tmp_path: Path) -> None:
    import torch

    bf16 = Native(dtype="bf16")
    model = load(write(CONFIGS["llama, tied"], tmp_path / "random", quantizer=bf16), quantizer=bf16)
    first, second = (layer.mlp.gate_proj.weight for layer in model.model.layers)
    assert not torch.equal(first, second)


def test_weights_are_of_the_size_that_the_architecture_draws(tmp_path: Path) -> None:
    config = {**CONFIGS["llama, not tied"], "initializer_range": 0.05}
    bf16 = Native(dtype="bf16")
    model = load(write(config, tmp_path / "random", quantizer=bf16), quantizer=bf16)
    assert float(model.lm_head.weight.std()) == pytest.approx(0.05, rel=0.05)
    assert bool((model.model.norm.weight == 1).all())


# --- memory ----------------------------------------------------------------------------------------------


def live_bytes() -> Any:
    """A context that keeps the largest sum (`peak`) of all storages made in it and alive at once."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    alive: dict[int, tuple[Any, int]] = {}
    dispatch_mode: Any = TorchDispatchMode

    class LiveBytes(dispatch_mode):  # type: ignore[misc]
        peak = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(hasattr(kind, "__tensor_flatten__") for kind in types):
                return NotImplemented  # quanto's tensors work in operations on plain ones, which come here
            result = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                    storage: Any = leaf.untyped_storage()
                    weak: Any = StorageWeakRef
                    alive[storage.data_ptr()] = (weak(storage), storage.nbytes())
            for key in [key for key, (storage, _) in alive.items() if storage.expired()]:
                del alive[key]
            self.peak = max(self.peak, sum(size for _, size in alive.values()))
            return result

    return LiveBytes()


@every_quantizer
def test_never_more_than_the_variant_and_one_module_is_in_memory(
    quantizer: Quantizer, tmp_path: Path
) -> None:
    """Eight layers, so that two modules too many, or a whole 16-bit model, would show."""
    config = {
        **CONFIGS["llama, not tied"],
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "vocab_size": 400,
    }
    folder = write(config, tmp_path / "random", quantizer=quantizer)
    dtype = json.loads((folder / "config.json").read_text("utf-8"))["dtype"]
    load(folder, quantizer=quantizer, compute_dtype=dtype)  # libraries fill tables of their own at first
    with live_bytes() as live:
        model = load(folder, quantizer=quantizer, compute_dtype=dtype)
    final, largest = resident_bytes(model), 256 * 512
    sixteen_bit = 2 * random_manifest(folder, quantizer=quantizer, source=SOURCE).parameters
    opaque = sum(getattr(module, "opaque_bytes", 0) for module in model.modules())
    on_the_way = 13 if quantizer == Torchao(weights="fp8") else 8  # torchao holds three FP32 copies
    assert final - opaque <= live.peak <= final + on_the_way * largest + 50_000
    assert on_the_way * largest + 50_000 < sixteen_bit / 3


@pytest.mark.gpu
@pytest.mark.parametrize("quantizer", [EVERY[1], EVERY[3], EVERY[4], EVERY[6], EVERY[8]], ids=name_of)
def test_on_a_gpu_the_model_is_made_there_and_the_host_holds_none_of_it(
    quantizer: Quantizer, tmp_path: Path
) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("NO CUDA DEVICE HERE: random weights on a GPU were NOT tested")
    config = {
        **CONFIGS["llama, not tied"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 8,
    }
    folder = write(config, tmp_path / "random", quantizer=quantizer)
    quantizer.load(folder, device="cuda", compute_dtype="bfloat16")  # libraries and kernels take memory once
    torch.cuda.reset_peak_memory_stats()
    reset_peak_resident_bytes()
    before = resident_bytes_now()
    allocated = torch.cuda.memory_allocated()
    model = quantizer.load(folder, device="cuda", compute_dtype="bfloat16")
    final, largest = resident_bytes(model), 2048 * 8192
    assert device_types(model) == {"cuda"}
    assert torch.cuda.max_memory_allocated() - allocated <= 1.01 * final + 12 * largest
    assert peak_resident_bytes() - before < 2 * largest
    again = quantizer.load(folder, device="cuda", compute_dtype="bfloat16")
    for (name, tensor), (_, other) in zip(tensors_of(model), tensors_of(again), strict=True):
        assert torch.equal(tensor, other), name
    with torch.no_grad():
        assert bool(torch.isfinite(model(torch.tensor([[1, 2, 3]], device="cuda")).logits).all())


# --- refusals --------------------------------------------------------------------------------------------


def test_a_folder_made_for_another_quantizer_is_refused(tmp_path: Path) -> None:
    folder = write(CONFIGS["llama, tied"], tmp_path / "random", quantizer=Bitsandbytes(type="nf4"))
    with pytest.raises(CheckpointError, match=r"made for .*nf4.*recipe says .*fp4"):
        load(folder, quantizer=Bitsandbytes(type="fp4"))


def test_an_unreadable_seed_is_refused_with_its_file(tmp_path: Path) -> None:
    bf16 = Native(dtype="bf16")
    folder = write(CONFIGS["llama, tied"], tmp_path / "random", quantizer=bf16)
    (folder / "random_weights.json").write_text('{"seed": "x"}', "utf-8")
    with pytest.raises(CheckpointError, match=r"random_weights\.json"):
        load(folder, quantizer=bf16)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteError, match="no_such_model"):
        write({"model_type": "no_such_model"}, tmp_path / "random", quantizer=Native(dtype="bf16"))


@pytest.mark.parametrize("config", [{}, {"hidden_size": 64}])
def test_a_config_that_names_no_architecture_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="model_type"):
        write(config, tmp_path / "random", quantizer=Native(dtype="bf16"))


def test_a_type_that_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"dtype is 'float8_e4m3fn'.*float32, bfloat16, float16"):
        write(
            {**CONFIGS["llama, tied"], "dtype": "float8_e4m3fn"},
            tmp_path / "random",
            quantizer=Native(dtype="bf16"),
        )
