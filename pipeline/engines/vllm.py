"""Engine `vllm`: checkpoints through vLLM's own kernels, scheduler and paged cache, in this process, step by step.

with Vllm().open(folder, quantizer=Native(dtype="bf16"), device="cuda") as session:
    first = session.prefill([[1, 2, 3]], new_tokens=8)
    second = session.decode_step()
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.capacity_results import PeakPrediction
from pipeline.checkpoint import tokenizer_tokens
from pipeline.device_runtime import DeviceRuntime, device_runtime
from pipeline.engines.base import Engine
from pipeline.engines.transformers import cast_bytes, computed_bytes, stored_dtype
from pipeline.errors import StageError
from pipeline.packages import installed_version
from pipeline.quantizers.base import Quantizer
from pipeline.random_weights import is_random
from pipeline.results import Problem
from pipeline.vllm_session import VllmSession
from pipeline.vllm_stepping import SteppedEngine, VllmLibrary, load_vllm, telling

KNOWN_SERIES = "0.30"
"""Its engine's internals are read here, it takes torch 2.13, and it sets transformers no upper bound."""
BITSANDBYTES_PLUGIN = "vllm-bnb-plugin"
READS = ("native", "torchao", "bitsandbytes")
"""Kinds of quantizers whose checkpoints it loads as they are."""
BLOCK_TOKENS = 16
"""Of its cache, unless a model's attention needs other blocks."""


class Vllm(Engine):
    """Runs a checkpoint through vLLM, which takes its share of the GPU's memory when it starts, whatever it needs."""

    kind: Literal["vllm"] = "vllm"
    compute_dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    max_batch_tokens: Annotated[int, Field(gt=0)] = 8192
    max_sequences: Annotated[int, Field(gt=0)] = 256

    def check(self, *, device: str) -> tuple[Problem, ...]:
        """A CUDA device, and the version whose internals are known."""
        if device != "cuda":
            return (
                Problem(
                    what=f"engine vllm runs on CUDA devices only, not on {device!r}",
                    fix="use engine transformers, or quantizer gguf with engine llama_cpp",
                ),
            )
        found = installed_version("vllm")
        if found is not None and found.startswith(f"{KNOWN_SERIES}."):
            return ()
        what = (
            f"vllm {found} is installed; {KNOWN_SERIES} is known"
            if found
            else "the package vllm is not installed"
        )
        return (Problem(what=what, fix=f"pip install 'vllm=={KNOWN_SERIES}.*'"),)

    def needs(self, quantizer: Quantizer) -> tuple[Problem, ...]:
        """bitsandbytes has left vLLM for a package of its own; torchao's types must be there to be read."""
        package = {"bitsandbytes": BITSANDBYTES_PLUGIN, "torchao": "torchao"}.get(quantizer.kind)
        if package is None or installed_version(package) is not None:
            return ()
        what = f"vLLM reads {quantizer.kind} checkpoints with the package {package}, which is not installed"
        return (Problem(what=what, fix=f"pip install {package}"),)

    @property
    def serves(self) -> bool:
        """Yes."""
        return True

    def refuses(self, quantizer: Quantizer) -> str | None:
        """It loads plain safetensors and those of torchao and bitsandbytes."""
        if quantizer.kind in READS:
            return None
        if quantizer.kind == "gguf":
            return "vLLM reads GGUF through an experimental plugin only; use engine llama_cpp"
        return f"vLLM doesn't read what {quantizer.kind} writes (it reads {', '.join(READS)}); use engine transformers"

    def import_libraries(self) -> None:
        """vLLM, with torch."""
        load_vllm()

    @property
    def fills_device(self) -> bool:
        """Its cache takes what `gpu_memory_utilization` leaves beside the weights."""
        return True

    def kv_element_bytes(self, quantizer: Quantizer) -> int:
        """Of the arithmetic's type."""
        return computed_bytes(self.compute_dtype, precision=quantizer.precision)

    def float_bytes(self) -> int | None:
        """Those of a wider type than weights are stored in."""
        return cast_bytes(self.compute_dtype)

    def cache_tokens(self, tokens: int) -> int:
        """In whole blocks."""
        return BLOCK_TOKENS * -(-tokens // BLOCK_TOKENS)

    def predicted_peak(self, checkpoint: Path, *, prompt_tokens: int, new_tokens: int) -> PeakPrediction:
        """Not told before it starts: vLLM measures its own activations then."""
        del checkpoint, prompt_tokens, new_tokens
        raise StageError("vLLM measures its activations when it starts")

    def open(self, checkpoint: Path, *, quantizer: Quantizer, device: str) -> VllmSession:
        """Start vLLM on the checkpoint. Raises StageError for what it can't read, its own errors for the rest."""
        if device != "cuda":
            raise StageError(self.check(device=device)[0].what)
        return self.start(load_vllm(), checkpoint, quantizer=quantizer, runtime=device_runtime(device))

    def start(
        self, library: VllmLibrary, checkpoint: Path, *, quantizer: Quantizer, runtime: DeviceRuntime
    ) -> VllmSession:
        """A session on `library`. Its logits are looked at once, because vLLM takes the best token of whatever comes.

        Raises StageError when one isn't finite, and for random weights that can't be made there.
        """
        if reason := self.refuses(quantizer):
            raise StageError(reason)
        compute_dtype = stored_dtype(checkpoint) if self.compute_dtype == "auto" else self.compute_dtype
        engine = SteppedEngine(
            library, library.build(self._arguments(library, checkpoint, quantizer, compute_dtype))
        )
        rows = int(engine.engine.model_config.get_vocab_size())
        session = VllmSession(
            engine,
            compute_dtype=compute_dtype,
            vocabulary_tokens=min(rows, tokenizer_tokens(checkpoint) or rows),
            runtime=runtime,
        )
        _check_finite(session)
        return session

    def _arguments(
        self, library: VllmLibrary, checkpoint: Path, quantizer: Quantizer, compute_dtype: str
    ) -> Any:
        """What vLLM is started with: exact token ids, nothing cached between prompts, nothing scheduled ahead."""
        made_there = is_random(checkpoint)
        if made_there and quantizer.kind != "native":
            raise StageError(
                f"random weights of {quantizer.kind} are made module by module in transformers; vLLM makes plain ones "
                "only: use engine transformers, or a checkpoint with weights"
            )
        return library.EngineArgs(
            model=str(checkpoint),
            dtype=compute_dtype,
            load_format="dummy" if made_there else "auto",
            skip_tokenizer_init=True,
            generation_config="vllm",
            max_model_len=-1,  # as long as the model and the memory allow
            max_num_batched_tokens=self.max_batch_tokens,
            max_num_seqs=self.max_sequences,
            gpu_memory_utilization=self.gpu_memory_utilization,
            enable_prefix_caching=False,
            async_scheduling=False,
            scheduler_cls=telling(library.Scheduler),
            disable_log_stats=True,
            seed=0,
        )


def _check_finite(session: VllmSession) -> None:
    import numpy

    if not bool(numpy.isfinite(session.logits([1, 2])).all()):  # 0 may be padding, whose embedding is zero
        raise StageError("the model's logits are not finite: it can't be used at this precision")
