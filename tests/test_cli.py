"""The command line: exit codes, what goes to which stream, and messages a person can act on."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.cli import main
from pipeline.data_sheet import DATA_SHEET
from pipeline.kinds_table import PLUGIN_PACKAGES
from pipeline.plugins import kinds
from pipeline.progress import Progress
from pipeline.quantizers.quanto import Quanto
from pipeline.results import Report, VariantReport
from tests import result_builders as build
from tests.tiny_models import write_llama

ROOT = Path(__file__).parent.parent
BIG = ROOT / "recipes" / "27b.yaml"
SLOW_PACKAGES = ("pydantic", "yaml", "torch", "transformers", "mlflow", "lm_eval", "datasets", "numpy")
SECRETS = ("s3cr3t", "hf_test123")
GOOD = """\
model: some/model
precisions: [fp16, int8]
speed: {batch_sizes: [1, 8]}
gate: [{kind: max_memory, fraction: 0.6}]
"""


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


class Answer:
    """What a command gave, inside this process."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        assert "Traceback" not in out + err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def pipeline(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> Answer:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as ending:
            code = int(ending.code or 0)
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    return call


def run(*arguments: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done


def write(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# --- help and usage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", "run", "plan", "gate", "kinds"])
def test_help_answers_without_importing_anything_slow(command: str) -> None:
    program = f"""
import sys
from pipeline.cli import main
try:
    main({[command, "--help"] if command else ["--help"]!r})
except SystemExit as ending:
    assert ending.code == 0
assert not set({SLOW_PACKAGES!r}) & sys.modules.keys(), sorted(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "exit codes: 0 ship" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "COMMAND"),
        (("bogus",), "'bogus'"),
        (("run",), "RECIPE"),
        (("plan", "a.yaml", "--hardwear", "l4"), "--hardwear"),
        (("run", "a.yaml", "--precision", "int4"), "--precision"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_an_empty_stdout(
    pipeline: Any, arguments: tuple[str, ...], said: str
) -> None:
    answer = pipeline(*arguments)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err


# --- recipes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "plan", "check"])
def test_a_missing_recipe_ends_with_2_and_one_line(pipeline: Any, tmp_path: Path, command: str) -> None:
    answer = pipeline(command, tmp_path / "none.yaml")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == f"pipeline: {tmp_path / 'none.yaml'}: no such file\n"


@pytest.mark.parametrize(
    ("typed", "near"), [("deno.yaml", "demo.yaml"), ("demo", "demo.yaml"), ("none.yaml", "")]
)
def test_a_missing_recipe_is_told_with_the_nearest_one(
    pipeline: Any, tmp_path: Path, typed: str, near: str
) -> None:
    (tmp_path / "demo.yaml").touch()
    said = pipeline("check", tmp_path / typed).err
    assert said.endswith(f"; did you mean {tmp_path / near}?\n" if near else ": no such file\n")


def test_without_a_command_every_command_is_listed(pipeline: Any) -> None:
    said = pipeline().err
    assert all(
        f"\n    {command} " in said for command in ("run", "plan", "check", "gate", "compare", "promote")
    )


def test_a_model_folder_that_cannot_be_ranked_is_told_before_anything_is_timed(
    pipeline: Any, tmp_path: Path
) -> None:
    answer = pipeline("doctor", "--engines", tmp_path / "none")
    assert (answer.code, answer.out) == (3, "")
    assert answer.err == f"pipeline: {tmp_path / 'none'}: no such folder\n"


@pytest.mark.parametrize("told", ["", "1"])
def test_a_fault_of_the_program_ends_with_4_and_never_as_a_no_ship(tmp_path: Path, told: str) -> None:
    broken = tmp_path / "pydantic"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('half\\ninstalled')\n")
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "check", "recipes/demo.yaml"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PIPELINE_TRACEBACK": told},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (4, "")
    *before, line = done.stderr.strip().splitlines()
    assert "RuntimeError at __init__.py:1: half installed" in line
    assert ("Traceback" in "".join(before)) is bool(told)


@pytest.mark.parametrize("command", ["run", "plan", "check"])
def test_a_bad_recipe_ends_with_2_and_all_its_problems(pipeline: Any, tmp_path: Path, command: str) -> None:
    text = GOOD.replace("0.6", ".nan").replace("int8", "int9") + "evaluaton: {}\n"
    answer = pipeline(command, write(tmp_path, text), *(["--json"] if command != "run" else []))
    assert (answer.code, answer.out) == (2, "")
    assert "3 problems" in answer.err
    for said in ("line 2: precisions[1]", "line 4: gate[0].fraction", "line 5: evaluaton"):
        assert said in answer.err
    assert not (tmp_path / "store").exists(), "nothing was begun"


def test_what_a_big_model_lacks_here_is_all_told_before_any_work(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    answer = pipeline("check", BIG)
    assert (answer.code, answer.out) == (3, "")
    for said in (
        *("h100-sxm", "cuda", "the weights of Qwen/Qwen3.6-27B", "HF_HUB_OFFLINE", "bf16 needs 53.8 GB"),
        *("task hellaswag", "fix:"),
    ):
        assert said in answer.err
    assert not list(tmp_path.rglob("*.safetensors"))


def test_check_tells_programs_what_is_missing(pipeline: Any) -> None:
    answer = pipeline("check", ROOT / "recipes" / "27b-random.yaml", "--json")
    assert (answer.code, answer.err) == (3, "")
    problems = answer.json["problems"]
    assert all(problem.keys() == {"what", "fix"} for problem in problems)
    assert any("h100-sxm" in problem["what"] for problem in problems)


def test_a_run_without_its_model_ends_with_3_and_leaves_no_run_behind(pipeline: Any, tmp_path: Path) -> None:
    answer = pipeline("run", write(tmp_path, GOOD.replace("some/model", "./no-such-folder")))
    assert (answer.code, answer.out) == (3, "")
    assert f"the model folder {tmp_path / 'no-such-folder'} does not exist" in answer.err
    assert not list((tmp_path / "store" / "runs").iterdir())


@pytest.mark.parametrize("command", ["run", "plan", "check"])
def test_a_store_that_is_a_file_is_refused_by_name(pipeline: Any, tmp_path: Path, command: str) -> None:
    write_llama(tmp_path / "tiny", max_position_embeddings=1024)
    (tmp_path / "store").write_text("a file", encoding="utf-8")
    answer = pipeline(command, write(tmp_path, GOOD.replace("some/model", "./tiny")))
    if command == "plan":
        assert answer.code == 0, "planning needs nothing that is stored"
    else:
        assert (answer.code, answer.out) == (3, "")
        assert f"the store {tmp_path / 'store'} can't be written" in answer.err


# --- plan ------------------------------------------------------------------------------------------------


@pytest.fixture
def _known_shapes(shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_STORE", str(shapes))


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that keeps the shape of the 27B model from one test to the next."""
    return tmp_path_factory.mktemp("shapes")


@pytest.mark.usefixtures("_known_shapes")
def test_plan_gives_the_published_json(pipeline: Any) -> None:
    answer = pipeline("plan", BIG, "--json")
    assert (answer.code, answer.err) == (0, "")
    plan = answer.json
    assert plan["hardware"]["name"] == "h100-sxm"
    assert plan["model"] == "Qwen/Qwen3.6-27B"
    baseline = plan["variants"][0]
    assert (baseline["name"], baseline["precision"], baseline["fits"]) == ("bf16", "bf16", True)
    assert baseline["weight_bytes_resident"] == 53_791_996_928
    assert baseline["decode_ceiling_tokens_per_s"] == pytest.approx(65, abs=1)


@pytest.mark.usefixtures("_known_shapes")
def test_plan_for_other_hardware(pipeline: Any) -> None:
    answer = pipeline("plan", BIG, "--json", "--hardware", "h200-sxm")
    assert answer.json["hardware"]["bandwidth_bytes_per_s"] == 4.8e12
    assert pipeline("plan", BIG, "--hardware", "l4").out.count(" no ") >= 1


@pytest.mark.usefixtures("_known_shapes")
def test_plan_s_table_is_for_people(pipeline: Any) -> None:
    answer = pipeline("plan", BIG)
    assert answer.code == 0
    assert "53.79" in answer.out
    assert "What pays, in this order:" in answer.out


def test_unknown_hardware_is_refused_with_the_nearest_name(pipeline: Any) -> None:
    answer = pipeline("plan", BIG, "--hardware", "h100-xsm")
    assert (answer.code, answer.out) == (2, "")
    assert "'h100-xsm'" in answer.err
    assert "did you mean 'h100-sxm'" in answer.err
    assert all(name in answer.err for name in DATA_SHEET)


def test_a_model_whose_architecture_is_not_here_is_told_how_to_get_it(pipeline: Any, tmp_path: Path) -> None:
    answer = pipeline("plan", write(tmp_path, GOOD))
    assert (answer.code, answer.out) == (3, "")
    assert "the architecture of some/model is not here" in answer.err
    assert "hf download some/model config.json" in answer.err


def test_a_model_folder_without_config_is_named_and_no_hub_is_spoken_of(
    pipeline: Any, tmp_path: Path
) -> None:
    answer = pipeline("plan", write(tmp_path, GOOD.replace("some/model", "./empty")))
    assert (answer.code, answer.out) == (3, "")
    assert f"there is no {tmp_path / 'empty' / 'config.json'}" in answer.err
    assert "hf download" not in answer.err


def test_a_model_that_is_a_file_is_told_so(pipeline: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    answer = pipeline("check", write(tmp_path, GOOD.replace("some/model", "./model.safetensors")))
    assert answer.code == 3
    assert f"the model {tmp_path / 'model.safetensors'} is not a folder" in answer.err


def test_a_folder_written_like_a_hub_id_is_told_how_to_write_it(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hint = "did you mean the folder beside the recipe? write model: ./my-model"
    recipe = write(tmp_path, GOOD.replace("some/model", "my-model"))
    assert hint not in pipeline("check", recipe).err
    (tmp_path / "my-model").mkdir()
    assert hint in pipeline("check", recipe).err


# --- kinds and schema ------------------------------------------------------------------------------------


def test_kinds_lists_every_plugin_with_its_fields(pipeline: Any) -> None:
    text, data = pipeline("kinds").out, pipeline("kinds", "--json").json
    for family, package in PLUGIN_PACKAGES.items():
        assert data[family].keys() == set(kinds(package))
        for kind in kinds(package):
            assert f"{family} {kind}:" in text
    assert "weights: int8 | int4 | fp8 (must be given)" in text
    assert data["quantizer"]["quanto"]["properties"].keys() == set(Quanto.model_fields)


def test_schema_prints_the_recipe_s_json_schema(pipeline: Any) -> None:
    schema = pipeline("schema").json
    assert schema["$schema"].endswith("2020-12/schema")
    assert {"model", "precisions", "variants", "gate"} <= schema["properties"].keys()


# --- stored reports --------------------------------------------------------------------------------------

RULES = [{"kind": "min_speedup", "factor": 1.5}, {"kind": "max_memory", "fraction": 0.6}]


def stored(folder: Path, *candidates: VariantReport, rules: Any = None, **fields: Any) -> Path:
    """A run's folder with a report of these candidates, int8 unless given, and these rules."""
    baseline = build.variant_report(build.variant("fp16"))
    chosen = candidates or (build.variant_report(build.variant("int8")),)
    recipe = {"model": {"id": "tiny/model"}, "gate": RULES if rules is None else rules}
    report = build.report(baseline, *chosen, resolved_recipe=recipe, **fields)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(report.to_json(), encoding="utf-8")
    return folder


def undecided() -> tuple[VariantReport, VariantReport]:
    quality = build.quality(build.task(values=[1.0] * 20))
    names = ("fp16", "int8")
    baseline, candidate = (build.variant_report(build.variant(name, quality=quality)) for name in names)
    return baseline, candidate


@pytest.mark.parametrize(
    ("rules", "code", "verdict"),
    [
        (RULES, 0, "ship"),
        ([{"kind": "min_speedup", "factor": 3.0}], 1, "no-ship"),
        ([{"kind": "max_quality_drop", "points": 2.0}], 4, "error"),
        ([{"kind": "min_speedup", "factor": 1.5, "batch_size": 4}], 4, "error"),
        ([], 4, "error"),
    ],
)
def test_gate_judges_a_stored_report_again(
    pipeline: Any, tmp_path: Path, rules: Any, code: int, verdict: str
) -> None:
    run_folder = stored(tmp_path / "run", rules=rules, verdict="ship")
    for path in (run_folder, run_folder / "report.json"):
        answer = pipeline("gate", path, "--json")
        assert (answer.code, answer.json["verdict"]) == (code, verdict)
    text = pipeline("gate", run_folder)
    assert text.code == code
    assert text.out.rstrip().endswith(f"verdict: {verdict}")


def test_gate_ends_with_5_when_nothing_can_be_decided(pipeline: Any, tmp_path: Path) -> None:
    rules = [{"kind": "max_quality_drop", "points": 2.0}]
    recipe = {"model": {"id": "tiny/model"}, "gate": rules}
    report = build.report(*undecided(), resolved_recipe=recipe)
    path = write(tmp_path, report.to_json(), "report.json")
    answer = pipeline("gate", path)
    assert answer.code == 5
    assert "documents would decide" in answer.out


def test_gate_writes_the_page_of_what_it_judged(pipeline: Any, tmp_path: Path) -> None:
    run_folder, page = (
        stored(tmp_path / "run", verdict="no-ship", because=("before",)),
        tmp_path / "page.html",
    )
    answer = pipeline("gate", run_folder, "--html", page)
    assert answer.code == 0
    assert "int8 ships: it keeps every limit (2 of 2)." in page.read_text(encoding="utf-8")
    refused = pipeline("gate", run_folder, "--html", tmp_path)
    assert refused.code == 2
    assert "is no regular file" in refused.err


def test_gate_takes_the_rules_of_another_recipe(pipeline: Any, tmp_path: Path) -> None:
    run_folder = stored(tmp_path / "run")
    before = (run_folder / "report.json").read_bytes()
    strict = write(tmp_path, GOOD.replace("fraction: 0.6", "fraction: 0.4"))
    answer = pipeline("gate", run_folder, "--rules", strict, "--json")
    assert (answer.code, answer.json["verdict"]) == (1, "no-ship")
    assert answer.json["resolved_recipe"]["gate"][0]["fraction"] == 0.4
    assert (run_folder / "report.json").read_bytes() == before, "the stored report stays as it is"
    assert pipeline("gate", run_folder, "--rules", tmp_path / "none.yaml").code == 2


def test_gate_never_ships_an_interrupted_run(pipeline: Any, tmp_path: Path) -> None:
    assert pipeline("gate", stored(tmp_path / "run", interrupted=True, verdict="error")).code == 4


def test_compare_tells_what_is_different_between_runs(pipeline: Any, tmp_path: Path) -> None:
    folders = [
        stored(tmp_path / name, recipe_digest=name * 64, provenance={"packages": {"torch": name}})
        for name in ("a", "b")
    ]
    answer = pipeline("compare", *folders)
    assert answer.code == 0
    assert "packages.torch  a  →  b" in answer.out
    digests = [run["recipe_digest"] for run in pipeline("compare", *folders, "--json").json["runs"]]
    assert digests == ["a" * 64, "b" * 64]


def spoilt_reports() -> dict[str, str]:
    good = build.report(resolved_recipe={"gate": RULES}).to_json()
    data = json.loads(good)
    return {
        "empty": "",
        "cut short": good[: len(good) // 2],
        "a list": "[]",
        "another version": json.dumps({**data, "format_version": 2}),
        "text for a number": good.replace("20.0", '"20.0"', 1),
        "not a number": good.replace("20.0", "NaN", 1),
        "a number without end": re.sub(
            r'("weight_bytes_resident": )\d+', r"\g<1>1" + 400 * "0", good, count=1
        ),
        "binary": "\x00\x01\x02",
    }


@pytest.mark.parametrize("command", ["gate", "compare", "track"])
@pytest.mark.parametrize("spoilt", spoilt_reports())
def test_a_spoilt_report_is_refused_with_one_line(
    pipeline: Any, tmp_path: Path, command: str, spoilt: str
) -> None:
    path = write(tmp_path, spoilt_reports()[spoilt], "report.json")
    answer = pipeline(command, path)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"pipeline: {path}: is not a report of this version: ")
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize("command", ["gate", "compare", "track"])
def test_a_report_that_is_not_there_is_refused_by_name(pipeline: Any, tmp_path: Path, command: str) -> None:
    answer = pipeline(command, tmp_path)
    assert (answer.code, answer.out) == (2, "")
    assert f"{tmp_path / 'report.json'}: can't be read (No such file or directory)" in answer.err


@pytest.mark.parametrize(
    "recipe", [{}, {"gate": None}, {"gate": "x"}, {"gate": [{"kind": "x"}]}, {"gate": [{"fraction": 1}]}]
)
def test_stored_rules_that_can_t_be_read_are_no_pass(pipeline: Any, tmp_path: Path, recipe: Any) -> None:
    path = write(tmp_path, build.report(resolved_recipe=recipe).to_json(), "report.json")
    answer = pipeline("gate", path)
    assert (answer.code, answer.out) == (2, "")
    assert "--rules" in answer.err
    assert pipeline("gate", path, "--rules", write(tmp_path, GOOD)).code == 0


def test_a_report_with_two_variants_of_one_name_is_refused(pipeline: Any, tmp_path: Path) -> None:
    twice = build.variant_report(build.variant("int8"))
    answer = pipeline("gate", stored(tmp_path / "run", twice, twice))
    assert (answer.code, answer.out) == (2, "")
    assert "share a name" in answer.err


# --- pipes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["kinds"], ["schema"], ["gate"]])
def test_a_reader_that_leaves_neither_breaks_nor_whitewashes_a_command(
    tmp_path: Path, arguments: list[str]
) -> None:
    expected = 0
    if arguments == ["gate"]:
        expected = 1
        arguments = ["gate", str(stored(tmp_path / "run", rules=[{"kind": "min_speedup", "factor": 9.0}]))]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments],
        cwd=ROOT,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (expected, "")


def test_a_reader_of_the_messages_that_leaves_does_not_change_the_exit_code(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "check", str(write(tmp_path, GOOD.replace("0.6", "x")))],
        cwd=ROOT,
        stdout=writing,
        stderr=writing,
        check=False,
    )
    os.close(writing)
    assert done.returncode == 2


def test_a_reader_of_the_progress_that_leaves_does_not_end_the_run() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    reached = []
    stream = os.fdopen(writing, "w", encoding="utf-8")
    progress = Progress(stream, steps=("one", "two"), durations_s={})
    for name in ("one", "two"):
        with progress.step(name) as step:
            step.tell("half way")
            reached.append(name)
    progress.say("the end")
    assert reached == ["one", "two"]
    with suppress(BrokenPipeError):
        stream.close()


@pytest.mark.parametrize("arguments", ["--help", "kinds", "check no-such-recipe.yaml"])
def test_closed_standard_streams_do_not_change_the_exit_code(arguments: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m pipeline {arguments}"
    expected = 2 if "no-such" in arguments else 0
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        done = subprocess.run(
            ["sh", "-c", f"{command} {closed}"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == expected
        assert "Traceback" not in done.stdout + done.stderr


# --- a run with secrets in its environment ---------------------------------------------------------------


@pytest.fixture(scope="module")
def secret_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A real run of a tiny model, MLflow out of reach, credentials in every variable that may hold some."""
    folder = tmp_path_factory.mktemp("secret")
    write_llama(folder / "my.models" / "v1.2" / "tiny")
    recipe = {
        "model": str(folder / "my.models" / "v1.2" / "tiny"),
        "precisions": ["fp16", "bf16"],
        "workload": {"prompt_tokens": 8, "new_tokens": 4},
        "capacity": {"context_tokens": 16, "memory_budget_bytes": 10**9, "max_sequences": 2},
        "gate": [{"kind": "min_capacity", "sequences": 1}],
    }
    write(folder, yaml.safe_dump(recipe), "v1.2.yaml")
    done = run(
        *("run", "v1.2.yaml"),
        cwd=folder,
        PIPELINE_STORE=str(folder / "store"),
        MLFLOW_TRACKING_URI="http://alice:s3cr3t@127.0.0.1:9/",
        HF_TOKEN="hf_test123",
        HF_HUB_OFFLINE="1",
    )
    return folder, done


def test_mlflow_out_of_reach_leaves_verdict_and_exit_code_as_they_are(
    secret_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = secret_run
    line = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, line["verdict"], line["verdicts"]) == (0, "ship", {"bf16": "ship"}), done.stderr
    assert (line["tracked"], line["mlflow_run_id"]) == (False, None)
    assert "not logged to MLflow" in done.stderr
    report = Report.model_validate_json(Path(line["report"]).read_bytes())
    assert report.verdict == "ship"
    assert str(folder / "store") in line["report"]


def test_secrets_of_the_environment_are_neither_printed_nor_stored(
    secret_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = secret_run
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == "stages.log" for path in files)
    texts = {"stdout": done.stdout, "stderr": done.stderr}
    texts |= {str(path): path.read_bytes().decode("latin-1") for path in files}
    found = [(name, secret) for name, text in texts.items() for secret in SECRETS if secret in text]
    assert not found


def test_results_land_under_the_store_wherever_the_model_lies(
    secret_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = secret_run
    assert {path.name for path in folder.iterdir()} <= {"my.models", "store", "v1.2.yaml", "mlruns"}
    assert {path.name for path in (folder / "my.models" / "v1.2").iterdir()} == {"tiny"}
    runs = list((folder / "store" / "runs").iterdir())
    assert len(runs) == 1
    assert runs[0].name.endswith("-v1.2")
    checkpoints = list((folder / "store" / "checkpoints").iterdir())
    assert len(checkpoints) == 2
    assert done.stdout.count("\n") == 1, "one JSON line and nothing else"


def test_a_failure_s_message_holds_no_secret_either(tmp_path: Path) -> None:
    run_folder = stored(tmp_path / "run")
    for scheme in ("ftp", "http"):
        done = run(
            *("track", run_folder, "--json"),
            cwd=tmp_path,
            MLFLOW_TRACKING_URI=f"{scheme}://alice:s3cr3t@127.0.0.1:9/",
            MLFLOW_HTTP_REQUEST_MAX_RETRIES="0",
        )
        assert done.returncode == 4
        assert json.loads(done.stdout)["tracked"] is False
        assert "127.0.0.1:9" in done.stdout
        assert not [secret for secret in SECRETS if secret in done.stdout + done.stderr]


def test_a_token_in_a_message_is_hidden(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_test123")
    answer = pipeline("run", "hf_test123.yaml")
    assert answer.code == 2
    assert "hf_test123" not in answer.err
