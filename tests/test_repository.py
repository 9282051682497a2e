"""What holds for the repository as a whole: which way imports point, and that no name of ours hides another's."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nvfp4_train"

# The levels of docs/architecture.md, lowest first: a module imports from its own level and from those below it.
# The longest prefix decides; what stands in nvfp4_train itself and is not named here is an entry point.
LEVELS = {
    "nvfp4_kernels": 0,
    "nvfp4_train.errors": 1,
    "nvfp4_train.units": 1,
    "nvfp4_train.atomic": 1,
    "nvfp4_train.config": 1,  # schema, composition, checks of single values
    "nvfp4_train.precision": 2,
    "nvfp4_train.model": 3,
    "nvfp4_train.data": 3,
    "nvfp4_train.distributed": 3,
    "nvfp4_train.interop": 4,
    "nvfp4_train.training": 4,
    # The checks of a whole configuration ask those who will use it: sizes, recipe, schedule.
    "nvfp4_train.config.blocking": 3,
    "nvfp4_train.config.layout": 3,
    "nvfp4_train.config.validate": 4,
    "nvfp4_train": 5,
}


def level(module: str) -> int:
    """The level of the longest prefix of `module` that has one."""
    parts = module.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next(LEVELS[prefix] for prefix in prefixes if prefix in LEVELS)


def sources(package: Path) -> dict[str, Path]:
    """Module name -> file."""
    files = {path.relative_to(package.parent).with_suffix(""): path for path in sorted(package.rglob("*.py"))}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in files.items()}


KERNELS = sources(ROOT / "kernels" / "nvfp4_kernels")
MODULES = KERNELS | sources(PACKAGE)


def imports(path: Path) -> set[str]:
    """What a file imports, inside functions too; `from package import module` counts as the module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            modules = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            names |= modules or {node.module}
    return names


def imports_of_ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name.split(".")[0] in ("nvfp4_train", "nvfp4_kernels")}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    up = {name for name in imports_of_ours(MODULES[module]) if level(name) > level(module)}
    assert not up, f"{module} imports {sorted(up)} from above"


def test_entry_points_do_not_import_each_other():
    entries = {m for m in MODULES if level(m) == 5} - {"nvfp4_train", "nvfp4_train.cli"}
    assert "nvfp4_train.pretrain" in entries
    for module in MODULES:
        assert not imports_of_ours(MODULES[module]) & entries, module


def test_the_kernels_need_torch_and_triton_alone():
    for module, path in KERNELS.items():
        packages = {name.split(".")[0] for name in imports(path)}
        assert packages - set(sys.stdlib_module_names) <= {"torch", "triton", "nvfp4_kernels"}, module


@pytest.mark.parametrize("folder", [".", "nvfp4_train", "scripts", "kernels", "kernels/benchmarks"])
def test_no_name_hides_the_standard_librarys(folder):
    """Each of these folders is first on sys.path when something in it is run."""
    names = {p.stem for p in (ROOT / folder).iterdir() if p.suffix == ".py" or p.is_dir()}
    assert not names & set(sys.stdlib_module_names)


def run_in_root(code: str, python_path: Path | None = None) -> str:
    """Run `code` with the repository root first on sys.path; what it prints."""
    env = os.environ | ({"PYTHONPATH": str(python_path)} if python_path else {})
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_transformers_imports_from_the_repository_root():
    """It looks for PyPI's `kernels`, which our folder of that name must not pass for."""
    pytest.importorskip("transformers")
    run_in_root("import transformers; from transformers.integrations import hub_kernels")


def test_the_kernels_folder_gives_way_to_the_package_of_that_name(tmp_path):
    """Without `__init__.py` it is a namespace package, empty, and a real package precedes it wherever that lies."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("real = True\n")
    assert run_in_root("import kernels; print(kernels.real)", tmp_path) == "True"
