"""Imports point one way: attend <- position <- attention <- gpt <- training <- eval <- train.py and scripts.

`data` and `configs` are leaves, and the model knows neither.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("model", "training", "data", "eval", "scripts", "configs")
# From the bottom to the top. A module may import its own layer and those below it; the longest name counts.
LAYERS = [
    ("model.precision", "model.attend", "model.cross_entropy"),
    ("model.position",),
    ("model.attention", "model.infini", "model.cache"),
    ("model",),
    ("training",),
    ("eval",),
    ("scripts", "train"),
]
LEAVES = ("data", "configs")


def source_files() -> Iterator[Path]:
    yield ROOT / "train.py"
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it; `from a import b` also counts as a.b where that is a module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where it points"
            name = node.module or ""
            inner = {f"{name}.{alias.name}" for alias in node.names}
            found |= {module for module in inner if is_module(module)} or {name}
    return found


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def layer(module: str) -> int | None:
    """How high a module of the project stands; None for leaves and other people's packages."""
    inside = [(len(name), height) for height, names in enumerate(LAYERS) for name in names if is_within(module, name)]
    return max(inside)[1] if inside else None


FILES = list(source_files())


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_module_imports_only_what_stands_below_it(path: Path):
    module = module_of(path)
    own = layer(module)
    for imported in imports_of(path):
        height = layer(imported)
        if own is not None and height is not None:
            assert height <= own, f"{module} imports {imported}"


@pytest.mark.parametrize("path", [path for path in FILES if module_of(path).split(".")[0] in LEAVES], ids=module_of)
def test_a_leaf_imports_no_other_folder(path: Path):
    own = module_of(path).split(".")[0]
    tops = {imported.split(".")[0] for imported in imports_of(path)}
    assert not tops & ({*FOLDERS, "train"} - {own})


@pytest.mark.parametrize("path", [path for path in FILES if is_within(module_of(path), "model")], ids=module_of)
def test_the_model_knows_neither_configs_nor_data_nor_the_disk(path: Path):
    tops = {imported.split(".")[0] for imported in imports_of(path)}
    compiles = module_of(path) == "model.attend.native_build"  # and keeps what it compiled
    assert not tops & {"configs", "data", "hydra", "omegaconf", *(() if compiles else ("pathlib", "os", "io"))}


@pytest.mark.parametrize("path", sorted((ROOT / "model" / "attend").glob("*.py")), ids=module_of)
def test_a_backend_of_attention_knows_neither_another_one_nor_a_scheme(path: Path):
    if path.stem in ("__init__", "dispatch"):  # the door and what picks behind it
        return
    ours = {imported for imported in imports_of(path) if is_within(imported, "model")}
    assert ours <= {"model.attend.transform", "model.attend.layout", "model.attend.native_build"}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_no_module_shadows_the_builtin_eval_or_uses_it(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            bound = {alias.asname or alias.name.split(".")[0] for alias in node.names}
            assert "eval" not in bound
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec"), f"line {node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_nothing_unpickles(path: Path):
    assert not imports_of(path) & {"pickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            assert "weights_only=True" in ast.unparse(node), f"line {node.lineno}"
        if isinstance(node, ast.keyword):
            assert node.arg != "allow_pickle", f"line {node.lineno}"


def test_the_walk_sees_the_whole_project():
    modules = {module_of(path) for path in FILES}
    assert {"train", "model.gpt", "model.attend", "training.step", "eval.loss", "scripts.evaluate"} <= modules


def test_the_layers_tell_up_from_down():
    assert layer("model.attend.sdpa") == 0
    upwards = ("model.attend", "model.position.rotary", "model.attention", "model.gpt", "training.log", "eval.loss")
    heights = [layer(module) for module in upwards]
    assert heights == sorted(heights, key=lambda height: height or 0)
    assert layer("data.loader") is layer("torch.nn") is None
