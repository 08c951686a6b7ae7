"""The ceilings that keep the code readable in one sitting, and that shapes are enforced under pytest."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("encoder", "service", "training")
SOURCES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))

# Exceptions, each with its reason. Meant to stay empty.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}
# Imports inside functions: the choice of the runtime, so that serving needs no torch.
# … and what an extra brings, or takes a second to load.
LATE_IMPORTS = {
    "encoder/sentence.py": {"encoder.runtime_torch"},
    "training/data.py": {"pyarrow"},
    "training/progress.py": {"matplotlib"},
}


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("file", SOURCES, ids=name_of)
def test_files_and_functions_stay_short(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) <= LONG_FILES.get(name_of(file), 300)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            documented = ast.get_docstring(node, clean=False) or ""
            lines = node.end_lineno - node.lineno + 1 - documented.count("\n")
            assert lines <= LONG_FUNCTIONS.get(f"{name_of(file)}:{node.name}", 40), node.name


@pytest.mark.parametrize("file", SOURCES, ids=name_of)
def test_imports_stand_at_the_top(file: Path) -> None:
    late = set()
    for function in ast.walk(ast.parse(file.read_text())):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom):
                    late.add(node.module)
                elif isinstance(node, ast.Import):
                    late |= {alias.name for alias in node.names}
    assert late <= LATE_IMPORTS.get(name_of(file), set())


def test_the_encoder_is_read_in_one_sitting() -> None:
    """Lines of code; docstrings are for looking up."""
    lines = 0
    for file in (ROOT / "encoder").glob("*.py"):
        text = file.read_text()
        lines += len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                lines -= len((ast.get_docstring(node, clean=False) or "").splitlines())
    assert lines <= 1600


def test_importing_the_encoder_and_its_tokenizer_needs_no_torch(run_python: Callable[[str], str]) -> None:
    printed = run_python("""
        import sys
        import encoder
        from encoder.model_dir import fingerprint, read_spec
        from encoder.weights import read_weights
        path = encoder.default_model_dir()
        spec = read_spec(path)
        fingerprint(spec, read_weights(path, spec.config))
        encoder.TextTokenizer(spec).encode(["Pizza is great."])
        print({"torch", "transformers", "sentence_transformers", "sklearn"} & set(sys.modules))
    """)
    assert printed == "set()"


def test_the_readme_shows_the_tree_as_it_is() -> None:
    """Each source file stands in the README's tree with a line of its own."""
    readme = (ROOT / "README.md").read_text()
    for file in SOURCES:
        if file.name != "__init__.py":
            assert f"  {file.name} " in readme, f"{name_of(file)} has no line in the README's tree"
