"""Device facts, the data-sheet table, memory limits and measured speed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.data_sheet import Device
from pipeline.errors import PrerequisiteError, UsageError
from pipeline.hardware import (
    available_memory_bytes,
    detect,
    fingerprint,
    last_level_cache_bytes,
    machine_state,
    measure_device_speed,
    memory_limit_bytes,
    named,
    throttle_reasons,
    with_measured,
)
from pipeline.speed_results import DeviceSpeed

CPU = Device(
    name="Example CPU",
    kind="cpu",
    memory_bytes=24 * 2**30,
    threads=2,
    last_level_cache_bytes=32 * 2**20,
    bandwidth_bytes_per_s=None,
    source="operating system",
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'h100-sxm'") as refused:
        named("H100_SXM")
    assert "rtx-4090" in str(refused.value)
    with pytest.raises(UsageError, match="did you mean 'h200-sxm'"):
        named("h200")
    with pytest.raises(UsageError, match="unknown; known"):
        named("quantum-annealer")


def test_the_host_is_described_without_torch_where_no_gpu_is() -> None:
    program = (
        "import sys\n"
        "from pipeline.hardware import detect, named, available_memory_bytes\n"
        "device = named('host')\n"
        "assert device.kind == 'cuda' or 'torch' not in sys.modules\n"
        "print(device.to_json())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    device = Device.model_validate_json(done.stdout)
    assert device == detect()
    assert device.name
    assert device.threads
    assert available_memory_bytes() > 0
    if device.kind == "cpu":
        assert available_memory_bytes() <= device.memory_bytes


def test_the_smallest_limit_of_the_enclosing_groups_counts(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/batch/job\n",
            "sys/fs/cgroup/batch/memory.max": "1000000\n",
            "sys/fs/cgroup/batch/memory.current": "700000\n",
            "sys/fs/cgroup/batch/memory.stat": "anon 5\ninactive_file 100000\n",
            "sys/fs/cgroup/batch/job/memory.max": "max\n",
            "sys/fs/cgroup/batch/job/memory.current": "700000\n",
            "sys/fs/cgroup/batch/job/memory.stat": "inactive_file 0\n",
        },
    )
    assert memory_limit_bytes(root=root) == 1_000_000
    assert available_memory_bytes(root=root) == 400_000


def test_the_older_control_groups_are_read_too(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/job\n0::/\n",
            f"{group}memory.limit_in_bytes": f"{2**63 - 4096}\n",
            f"{group}memory.usage_in_bytes": "5\n",
            f"{group}memory.stat": "total_inactive_file 0\n",
            f"{group}job/memory.limit_in_bytes": "5000000\n",
            f"{group}job/memory.usage_in_bytes": "6000000\n",
            f"{group}job/memory.stat": "cache 1\ntotal_inactive_file 0\n",
        },
    )
    assert memory_limit_bytes(root=root) == 5_000_000
    assert available_memory_bytes(root=root) == 0


def test_no_limit_is_missing_and_not_a_huge_number(tmp_path: Path) -> None:
    assert memory_limit_bytes(root=tmp_path) is None
    root = write(tmp_path, {"proc/self/cgroup": "0::/\n"})
    assert memory_limit_bytes(root=root) is None


def test_a_cache_shared_by_cores_is_counted_once(tmp_path: Path) -> None:
    files: dict[str, str] = {}
    for cpu, shared in enumerate(["0-1", "0-1", "2-3", "2-3"]):
        for index, (level, size, sharing) in enumerate([(1, "32K", str(cpu)), (3, "16M", shared)]):
            folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            files |= {f"{folder}/level": f"{level}\n", f"{folder}/size": f"{size}\n"}
            files[f"{folder}/shared_cpu_list"] = f"{sharing}\n"
    assert last_level_cache_bytes(root=write(tmp_path / "listed", files)) == 2 * 16 * 2**20
    assert last_level_cache_bytes(root=tmp_path / "hidden") is None


def test_the_fingerprint_follows_the_machine_and_not_what_was_measured() -> None:
    measured = with_measured(
        CPU, DeviceSpeed(read_bandwidth_bytes_per_s=3e10, matmul_flops_per_s={"float32": 1.4e11})
    )
    assert measured.bandwidth_bytes_per_s == 3e10
    assert measured.peak_flops_per_s == {"fp32": 1.4e11}
    assert fingerprint(measured) == fingerprint(CPU)
    assert fingerprint(CPU.model_copy(update={"threads": 4})) != fingerprint(CPU)
    assert fingerprint(detect()) == fingerprint(detect())


def test_huge_pages_make_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    plain = fingerprint(CPU)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    assert fingerprint(CPU) != plain


def test_a_price_leaves_the_fingerprint_and_so_the_keys_of_stored_results_as_they_are() -> None:
    priced = CPU.model_copy(update={"dollars_per_hour": 1.5, "price_source": "our provider"})
    assert fingerprint(priced) == fingerprint(CPU)
    assert fingerprint(CPU) == "a1a7e321d7256acd5af153f67d496e0ba3bcff5090731a627fe022fd17d6de00"


def test_a_childs_peak_memory_is_in_bytes_and_its_own() -> None:
    program = (
        "from pipeline.process_memory import peak_resident_bytes\n"
        "before = peak_resident_bytes()\n"
        "block = b'x' * (200 * 2**20)\n"
        "print(peak_resident_bytes() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == pytest.approx(209_715_200, rel=0.05)


def test_throttling_is_named_and_idleness_is_none() -> None:
    assert throttle_reasons(0x01 | 0x02) == ()
    assert throttle_reasons(0x44) == ("software power cap", "hardware thermal slowdown")


def test_the_machines_state_has_no_zero_for_what_is_not_told() -> None:
    state = machine_state(CPU)
    assert state.gpu_clock_mhz is None
    assert state.load_average_1_minute is not None
    assert state.cpu_frequency_mhz is None or state.cpu_frequency_mhz > 0


def test_measured_speed_is_positive_for_every_type_and_quick() -> None:
    import torch  # noqa: F401  (its import is not part of the measurement)

    start = time.monotonic()
    speed = measure_device_speed("cpu", dtypes=("float32", "bfloat16"))
    assert time.monotonic() - start < 15  # about 4 s where the machine is idle
    assert set(speed.matmul_flops_per_s) == {"float32", "bfloat16"}
    assert speed.read_bandwidth_bytes_per_s > 1e8
    assert min(speed.matmul_flops_per_s.values()) > 1e6


def test_a_type_that_cannot_be_measured_is_refused() -> None:
    with pytest.raises(UsageError, match=r"int3.*float32"):
        measure_device_speed("cpu", dtypes=("int3",))


def test_a_missing_gpu_is_refused_in_plain_words() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(PrerequisiteError, match="no usable GPU"):
        measure_device_speed("cuda", dtypes=("float32",))


@pytest.mark.gpu
def test_a_gpus_measured_speed_stays_below_its_data_sheet() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: measured GPU bandwidth and FLOP/s are not checked here")
    device = detect()
    speed = measure_device_speed("cuda", dtypes=("bfloat16",))
    assert speed.read_bandwidth_bytes_per_s > 1e11
    if device.bandwidth_bytes_per_s is not None:
        assert speed.read_bandwidth_bytes_per_s <= 1.05 * device.bandwidth_bytes_per_s
        assert speed.matmul_flops_per_s["bfloat16"] <= 1.05 * device.peak_flops_per_s["bf16"]
