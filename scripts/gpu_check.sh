#!/bin/sh
# Everything that needs a CUDA device, in one go: the tests marked `gpu`, this project's clock beside
# transformers.generate, then the recipes with random weights: 8b-random (decode at 16, 8 and 4 bits against the
# ceiling, prefill whole and in chunks, the batch sweep, continuous batching, capacity contiguous and paged) and
# 27b-random; and for the same shapes scripts/gpu_decode.py: every path's share of the measured bandwidth at batch 1
# (eager, compiled, torchao, quanto, bitsandbytes, vLLM where it is installed) beside the goals.
# Nothing is downloaded. Needs 24 GB of GPU memory for the first recipe and 80 GB for the second.
#
#   scripts/gpu_check.sh OUT [RECIPE …]
#
# PYTHON names the interpreter (default python3); it must have a torch that finds the device. WHEELS may name a folder
# of wheels for what it lacks (bitsandbytes, optimum-quanto, mlflow …), installed without asking any index.
# OUT and WHEELS are paths as you type them, recipes are relative to the repository.
# The tables, reports and logs lie in OUT afterwards. Exit code: 0, or the number of parts that failed; 3 without a GPU.
set -u
out=${1:?usage: scripts/gpu_check.sh OUT [RECIPE ...]}
shift
python=${PYTHON:-python3}
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
[ -z "${WHEELS:-}" ] || WHEELS=$(cd "$WHEELS" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2
[ $# -gt 0 ] || set -- recipes/8b-random.yaml recipes/27b-random.yaml
failed=0

if [ -n "${WHEELS:-}" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --find-links "$WHEELS" "$WHEELS"/*.whl || exit 3
fi
"$python" - <<'PY' || exit 3
import sys
import torch
if not torch.cuda.is_available():
    sys.exit("no CUDA device that this torch can use: nothing was checked")
print(torch.cuda.get_device_name(0), "torch", torch.__version__)
PY
nvidia-smi >"$out/nvidia-smi.txt" 2>&1 || true

part() {
    name=$1
    shift
    start=$(date +%s)
    "$@" >"$out/$name.txt" 2>&1
    status=$?
    echo "$name: exit $status after $(($(date +%s) - start)) s"
    [ "$status" -eq 0 ] || failed=$((failed + 1))
}

judged() { # a run whose verdict is no-ship or inconclusive has measured everything all the same
    "$@"
    status=$?
    case $status in 0 | 1 | 5) return 0 ;; *) return "$status" ;; esac
}

export PIPELINE_STORE="${PIPELINE_STORE:-$out/store}"
export MLFLOW_TRACKING_URI="${MLFLOW_TRACKING_URI:-sqlite:///$out/mlflow.db}"
part gpu-tests "$python" -m pytest -m gpu -p no:cacheprovider tests
for recipe in "$@"; do
    name=$(basename "$recipe" .yaml)
    part "plan-$name" "$python" -m pipeline plan "$recipe"
    part "run-$name" judged "$python" -m pipeline run "$recipe"
done
part gpu-decode judged "$python" -m scripts.gpu_decode "$out" --recipes "$@"
if [ -d .assets/models/smollm2-135m-instruct ]; then
    part generate "$python" -m scripts.compare_generate "$out" --device cuda
fi
for folder in "$PIPELINE_STORE"/runs/*; do
    [ -d "$folder" ] || continue
    mkdir -p "$out/$(basename "$folder")"
    cp "$folder"/*.md "$folder"/*.json "$folder"/*.csv "$folder"/*.yaml "$folder"/stages.log "$out/$(basename "$folder")/" 2>/dev/null
done
tail -n 25 "$out/gpu-tests.txt"
cat "$out/gpu-decode.md" 2>/dev/null
for recipe in "$@"; do
    tail -n 60 "$out/run-$(basename "$recipe" .yaml).txt"
done
exit "$failed"
