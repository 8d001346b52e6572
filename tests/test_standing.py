"""Standing tests: how the code is laid out, and that every plugin, recipe and command is complete."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from pipeline.cli import _parser
from pipeline.kinds_table import PLUGIN_PACKAGES
from pipeline.plugins import kinds, plugin_class
from pipeline.recipe import ExpandedRecipe, load_recipe
from pipeline.stage_keys import code_names

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pipeline"
STRUCTURE = ROOT / "docs" / "structure.md"
README = ROOT / "README.md"
HEAVY = {
    *("torch", "transformers", "lm_eval", "mlflow", "datasets", "scipy", "numpy", "optimum", "bitsandbytes"),
    *("accelerate", "safetensors", "huggingface_hub", "tokenizers", "ray", "gguf", "matplotlib", "jinja2"),
}
LONGEST_FILE, LONGEST_FUNCTION = 470, 70


@cache
def modules() -> dict[str, ast.Module]:
    """Every module's name below `pipeline` ("recipe", "rules.base") and its tree; packages' own files apart."""
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"]
    return {module_name(path): ast.parse(path.read_text("utf-8"), str(path)) for path in files}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imported(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Full names that import statements anywhere in the tree ask for, with the statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


def pipeline_imports(name: str) -> set[str]:
    """The modules of this package that a module imports, at its top or inside functions."""
    found = set()
    for target, _ in imported(modules()[name]):
        parts = target.split(".")
        if parts[0] == "pipeline":
            longest = (".".join(parts[1:end]) for end in range(len(parts), 1, -1))
            found |= {next((module for module in longest if module in modules()), "")}
    return found - {"", name}


def at_import_time(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: no function bodies, no `if TYPE_CHECKING` blocks."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from at_import_time(child)


# --- imports ---------------------------------------------------------------------------------------------


def test_imports_form_no_cycle() -> None:
    left = {name: pipeline_imports(name) for name in modules()}
    while free := [name for name, wants in left.items() if not wants & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"these import each other in a circle: {left}"


def structure_lines() -> list[str]:
    """The modules that docs/structure.md lists ("- `rules.base` — …"), in its order."""
    return re.findall(r"^- `([\w.]+)` —", STRUCTURE.read_text("utf-8"), flags=re.MULTILINE)


def test_the_structure_page_names_exactly_the_modules_that_there_are() -> None:
    listed = structure_lines()
    assert len(listed) == len(set(listed))
    assert set(listed) - modules().keys() == set(), "on the page, not in the package"
    assert modules().keys() - set(listed) - {"__main__"} == set(), "in the package, not on the page"


def test_modules_import_only_from_those_above_them_on_the_structure_page() -> None:
    order = {name: place for place, name in enumerate([*structure_lines(), "__main__"])}
    wrong = [
        f"{name} imports {wanted}"
        for name in modules()
        for wanted in pipeline_imports(name)
        if order.get(wanted, len(order)) >= order.get(name, 0)
    ]
    assert not wrong


def test_heavy_packages_are_imported_inside_the_functions_that_need_them() -> None:
    wrong = [
        f"{name} line {node.lineno}: {target}"
        for name, tree in modules().items()
        for node in at_import_time(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for target, _ in imported(node)
        if target.split(".")[0] in HEAVY
    ]
    assert not wrong


def test_a_package_s_own_file_imports_nothing() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        assert not list(imported(ast.parse(path.read_text("utf-8")))), path


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("mlflow", r"tracking(_\w+)?|promotion|promoted_registry"),
        ("lm_eval", r"quality|harness|tasks|task_checks|harness_setting"),
        ("yaml", r"yaml_document|task_yaml"),
        ("bitsandbytes", r"quantizers\.bitsandbytes"),
        ("optimum", r"quantizers\.quanto|quanto_weights"),
    ],
)
def test_a_package_is_used_where_it_belongs(package: str, allowed: str) -> None:
    users = {
        name
        for name, tree in modules().items()
        for target, _ in imported(tree)
        if target.split(".")[0] == package
    }
    assert {name for name in users if not re.fullmatch(allowed, name)} == set()


def test_no_code_of_a_model_s_own_is_ever_trusted() -> None:
    assert not [path for path in PACKAGE.rglob("*.py") if "trust_remote_code" in path.read_text("utf-8")]


# --- stored results --------------------------------------------------------------------------------------

NOTHING_IS_COMPUTED = {
    *("values", "errors", "progress", "packages", "store", "measured"),
    *("results", "speed_results", "capacity_results", "serving_results", "distribution_results"),
}
WRITES_CHECKPOINTS = {
    *("checkpoint", "coverage", "gguf_conversion", "gguf_converter", "llama_quantize", "shard_writer"),
    *("tensor_stream", "stored_names"),
}
"""What these do is in the manifest, whose content is in the keys of all that run a checkpoint."""
DESCRIBES_THE_MACHINE = {"hardware", "data_sheet", "processor"}
"""What they find is in the machine's fingerprint."""
SERVES = {"paged_session", "scheduler", "step_times", "traffic", "activations"}
"""Continuous batching, and the memory of a prefill as capacity is predicted from."""
REFUSES = {"task_checks", "task_documents", "task_failures", "comparison", "yaml_document"}
"""What these do ends a stage, or doesn't: a stage that failed has no stored result."""
HELD_TEXT = {"distribution_run", "distribution_text"}


def keyed(stage: str) -> set[str]:
    names = code_names(stage)
    return {
        name for name in modules() if f"{name.replace('.', '/')}.py" in names or name.split(".")[0] in names
    }


def behind(roots: set[str], *, apart: set[str]) -> set[str]:
    """The modules that `roots` import, and those that these import; nothing of or behind `apart`."""
    found: set[str] = set()
    left = set(roots)
    while left:
        name = left.pop()
        found.add(name)
        left |= pipeline_imports(name) - apart - found
    return found


@pytest.mark.parametrize(
    ("stage", "plugins", "apart"),
    [
        ("quantize", {"quantizers"}, DESCRIBES_THE_MACHINE),
        (
            "random-weights",
            {"quantizers"},
            WRITES_CHECKPOINTS | DESCRIBES_THE_MACHINE | {"process_memory", "llama_library"},
        ),
        ("speed", {"quantizers", "engines"}, WRITES_CHECKPOINTS | DESCRIBES_THE_MACHINE | SERVES),
        (
            "serving",
            {"quantizers", "engines"},
            WRITES_CHECKPOINTS | DESCRIBES_THE_MACHINE | {"traffic", "activations"},
        ),
        (
            "capacity",
            {"quantizers", "engines"},
            WRITES_CHECKPOINTS | DESCRIBES_THE_MACHINE | {"traffic", "step_times"},
        ),
        (
            "quality",
            {"quantizers", "engines", "quality"} | HELD_TEXT,
            WRITES_CHECKPOINTS | DESCRIBES_THE_MACHINE | SERVES | REFUSES,
        ),
        (
            "reference",
            {"quantizers", "engines"} | HELD_TEXT,
            WRITES_CHECKPOINTS | DESCRIBES_THE_MACHINE | SERVES,
        ),
    ],
)
def test_a_stage_s_key_holds_the_code_of_what_it_runs(stage: str, plugins: set[str], apart: set[str]) -> None:
    roots = {name for name in modules() if name.split(".")[0] in plugins}
    missing = behind(roots, apart=apart | NOTHING_IS_COMPUTED) - keyed(stage)
    assert not missing, f"a change of {sorted(missing)} would leave stored results of {stage} in use"


def test_keys_name_files_that_there_are() -> None:
    for stage in ("random-weights", "quantize", "speed", "serving", "capacity", "quality", "reference"):
        assert all((PACKAGE / name).exists() for name in code_names(stage))


# --- the code --------------------------------------------------------------------------------------------


def test_files_and_functions_stay_readable() -> None:
    long = []
    for path in sorted(PACKAGE.rglob("*.py")):
        lines = path.read_text("utf-8").count("\n")
        if lines > LONGEST_FILE:
            long.append(f"{path.name}: {lines} lines")
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    long.append(f"{path.name}: {node.name} has {length} lines")
    assert not long


def public(tree: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Functions and classes without a leading underscore, and such classes' methods; a protocol's are its text."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef) and "Protocol" not in map(ast.unparse, node.bases):
                yield from public(node)


def test_everything_public_says_what_it_is_for() -> None:
    silent = [name for name, tree in modules().items() if not ast.get_docstring(tree)]
    silent += [
        f"{name}.{node.name}"
        for name, tree in modules().items()
        for node in public(tree)
        if not ast.get_docstring(node)
    ]
    assert not silent


def test_a_module_with_a_vague_name_does_not_exist() -> None:
    assert not {name for name in modules() if re.search(r"util|helper|common|misc|manager", name)}


# --- recipes, plugins, commands --------------------------------------------------------------------------


def commands() -> dict[str, argparse.ArgumentParser]:
    actions = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(next(actions).choices)


def documentation() -> str:
    return "\n".join(path.read_text("utf-8") for path in (README, *sorted((ROOT / "docs").rglob("*.md"))))


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_loads(path: Path) -> None:
    loaded = load_recipe(path)
    assert loaded.recipe.expand(device="cpu").gate
    if loaded.recipe.model.config:
        assert loaded.resolve(loaded.recipe.model.config).is_file()


def test_every_recipe_starts_with_a_comment_that_says_what_it_is_for() -> None:
    silent = [
        path for path in (ROOT / "recipes").glob("*.yaml") if not path.read_text("utf-8").startswith("# ")
    ]
    assert not silent


@pytest.mark.parametrize("package", PLUGIN_PACKAGES.values())
def test_every_kind_is_documented(package: str) -> None:
    text = documentation()
    assert not [kind for kind in kinds(package) if f"`{kind}`" not in text and f"kind: {kind}" not in text]


def test_every_command_is_documented() -> None:
    text = documentation()
    assert not [name for name in commands() if not re.search(rf"(pipeline |`){name}\b", text)]


def test_every_command_prints_json_on_demand_and_tells_the_exit_codes() -> None:
    for name, parser in commands().items():
        text = parser.format_help()
        assert "--json" in text, name
        assert "exit codes: 0 ship" in text, name


PLUGINS = [(package, kind) for package in PLUGIN_PACKAGES.values() for kind in kinds(package)]


def filled(package: str, kind: str) -> dict[str, Any]:
    """A plugin's block with its required fields set; of alternatives and of allowed values the first one."""
    block: dict[str, Any] = {"kind": kind}
    for name, field in plugin_class(package, kind).model_fields.items():
        if field.is_required():
            chosen = (get_args(field.annotation) or (0.5,))[0]
            block[name] = ["piqa"] if chosen is str else chosen
    if package == "pipeline.rules":
        alternative = next(
            (name for name in ("fraction", "factor", "mean_nats", "points") if name in fields(package, kind)),
            None,
        )
        block |= {alternative: 0.6} if alternative else {}
    return block


def fields(package: str, kind: str) -> set[str]:
    return set(plugin_class(package, kind).model_fields)


@pytest.mark.parametrize(("package", "kind"), PLUGINS)
def test_a_plugin_is_one_class_named_after_its_file(package: str, kind: str) -> None:
    found = plugin_class(package, kind)
    assert found.model_fields["kind"].default == kind
    assert found.__name__.lower() == kind.replace("_", "")
    assert inspect.getdoc(found)
    assert found.model_config["frozen"] is True
    assert found.model_config["extra"] == "forbid"


@pytest.mark.parametrize(("package", "kind"), PLUGINS)
def test_a_plugin_in_a_recipe_keeps_all_its_fields(tmp_path: Path, package: str, kind: str) -> None:
    expanded = recipe_with(tmp_path, package, filled(package, kind))
    plugin = plugin_in(expanded, package)
    assert type(plugin) is plugin_class(package, kind)
    dumped = plugin_in(expanded.model_dump(mode="json"), package)
    assert dumped.keys() == fields(package, kind)
    again = ExpandedRecipe.model_validate_json(expanded.to_json())
    assert again == expanded
    assert type(plugin_in(again, package)) is type(plugin)
    assert again.digest() == expanded.digest()


@pytest.mark.parametrize(("package", "kind"), PLUGINS)
def test_every_field_of_a_plugin_counts_in_the_digest(tmp_path: Path, package: str, kind: str) -> None:
    expanded = recipe_with(tmp_path, package, filled(package, kind))
    data = expanded.model_dump(mode="json")
    for field in fields(package, kind) - {"kind"}:
        changed = json.loads(json.dumps(data))
        plugin_in(changed, package)[field] = "something else"
        assert plugin_in(changed, package) != plugin_in(data, package)
        assert dumped_digest(changed) != expanded.digest()


def dumped_digest(data: Any) -> str:
    from pipeline.values import digest

    return digest(data)


def recipe_with(folder: Path, package: str, block: dict[str, Any]) -> ExpandedRecipe:
    """A recipe with one plugin of `package`: its second variant's quantizer or engine, or its last rule."""
    variant: dict[str, Any] = {"name": "x", "quantizer": {"kind": "native", "dtype": "fp32"}}
    if block["kind"] in ("gguf", "llama_cpp"):  # neither goes with another one
        variant |= {"quantizer": {"kind": "gguf", "type": "q8_0"}, "engine": {"kind": "llama_cpp"}}
    rules: list[dict[str, Any]] = [{"kind": "max_memory", "fraction": 0.6}]
    if package == "pipeline.quantizers":
        variant["quantizer"] = block
    elif package == "pipeline.engines":
        variant["engine"] = block
    else:
        rules.append(block)
    data = {
        "model": "some/model",
        "variants": [{"name": "fp16"}, variant],
        "speed": {},
        "serving": {},
        "capacity": {"context_tokens": 256},
        "cost": {"dollars_per_hour": 2.0},
        "quality": {"tasks": ["piqa"], "distribution": {"text": "held.txt"}},
        "gate": rules,
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(data), encoding="utf-8")
    return load_recipe(path).recipe.expand(device="cpu")


def plugin_in(recipe: Any, package: str) -> Any:
    """That plugin, from the recipe or from its JSON data."""
    take = dict.__getitem__ if isinstance(recipe, dict) else getattr
    if package == "pipeline.rules":
        return take(recipe, "gate")[-1]
    variant = take(recipe, "variants")[-1]
    return take(variant, "quantizer" if package == "pipeline.quantizers" else "engine")


# --- the tree --------------------------------------------------------------------------------------------


def tracked_texts() -> Iterator[tuple[str, str]]:
    """Every file under version control that is text, by its path."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git work tree")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file() and not path.is_symlink():
            yield name, path.read_bytes().decode("utf-8", errors="replace")


def test_no_tracked_file_names_a_machine_s_own_place_or_a_registry() -> None:
    own = {str(place) for place in (ROOT, Path(sys.prefix), Path.home()) if len(place.parts) > 1}
    places = "|".join(rf"(?<![\w.-]){re.escape(place)}(?![\w.-])" for place in sorted(own))
    registries = r"(?:pypi|pythonhosted)\.org|index[-_]url"
    wrong = [
        f"{name}: {match[0]}"
        for name, text in tracked_texts()
        for match in re.finditer(rf"{places}|/(?:home|Users)/\w+|{registries}", text)
    ]
    assert not wrong


def test_no_tracked_file_is_large_or_a_model() -> None:
    names = [name for name, text in tracked_texts() if len(text) > 500_000]
    names += [
        name for name, _ in tracked_texts() if Path(name).suffix in (".safetensors", ".gguf", ".db", ".bin")
    ]
    assert not names


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_two_commands_exist_and_the_readme_names_them(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert re.search(rf"^{target}\b[^:=\n]*:", makefile, flags=re.MULTILINE)
    assert f"make {target}" in README.read_text("utf-8")


def test_the_folder_of_runs_is_kept_empty_but_for_a_note() -> None:
    tracked = [name for name, _ in tracked_texts() if name.startswith("mlruns/")]
    assert tracked == ["mlruns/README.md"]
