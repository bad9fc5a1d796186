"""The architecture as a test: modules have layers, imports go down or sideways without cycles, start-up is light."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = """
config files selection
data processes
rewards types
losses models
rollout
evals tasks
training
apps.report apps.planning apps.score apps.serve
apps.experiments apps.play
cli
"""
"""Packages, lowest layer first. Imports go down, stay within a package, or go sideways without circles."""
LAYER = {f"tandemrl.{name}": i for i, names in enumerate(LAYERS.split("\n")) for name in names.split()}


def package(module: str) -> str:
    """``tandemrl.PACKAGE`` of a dotted name, ``tandemrl.apps.APP`` of an app; ``tandemrl`` itself for the facade."""
    parts = module.split(".")
    if module == "tandemrl.__main__":  # the command line by another name
        return "tandemrl.cli"
    return ".".join(parts[: 3 if parts[1:2] == ["apps"] else 2])


def modules() -> dict[str, Path]:
    paths = {}
    for root, package in ((ROOT / "src" / "tandemrl", "tandemrl"), (ROOT / "cli", "tandemrl.cli")):
        for path in sorted(root.rglob("*.py")):
            parts = [package, *path.relative_to(root).with_suffix("").parts]
            paths[".".join(parts).removesuffix(".__init__")] = path
    return paths


MODULES = modules()


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


@cache
def imported(name: str, *, top_level_only: bool = False) -> frozenset[str]:
    """Dotted names that a module imports; ``from package import name`` is ``package.name`` where that is a module."""
    tree = tree_of(name)
    names = set[str]()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: write absolute imports"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {each if each in MODULES else str(node.module) for each in full}
    return frozenset(names)


def roots(name: str, *, top_level_only: bool = False) -> set[str]:
    """The packages behind those names."""
    return {other.split(".")[0] for other in imported(name, top_level_only=top_level_only)}


def test_every_package_has_a_layer() -> None:
    """At the top there are packages, the facade and what all of them stand on."""
    assert {package(name) for name in MODULES} - {"tandemrl", "tandemrl.apps"} == LAYER.keys()


def test_imports_go_down_or_sideways() -> None:
    own = [(name, other) for name in MODULES for other in imported(name) if other.split(".")[0] == "tandemrl"]
    assert not [pair for pair in own if LAYER.get(package(pair[1]), 99) > LAYER.get(package(pair[0]), 99)]


CORE = [
    name
    for name in MODULES
    if package(name) in LAYER and not package(name).startswith(("tandemrl.apps.", "tandemrl.cli"))
]


def test_the_core_imports_no_app() -> None:
    """Whatever a module of the core imports is core, so all that it reaches is; nor does it name an app in a string."""
    for name in CORE:
        assert imported(name) & MODULES.keys() <= {*CORE, "tandemrl"}, name
        assert "tandemrl.apps" not in MODULES[name].read_text(), name


def test_what_is_installed_and_checked_follows_the_folders() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert set(settings["tool"]["setuptools"]["packages"]) == folders | {"tandemrl.configs", "tandemrl.apps.play.page"}
    [strict] = [each for each in settings["tool"]["mypy"]["overrides"] if "follow_imports" not in each]
    [typed] = re.findall(r"^TYPED := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name in [*strict["module"], *typed.split(",")]:
        assert name.removesuffix(".*") in MODULES or name == "beartype.beartype"
    assert {"tandemrl.models", "tandemrl.losses", "tandemrl.selection", "tandemrl.rollout"} <= set(typed.split(","))


def test_no_circles() -> None:
    """Neither between modules, imports inside of functions included, nor between packages."""
    modules = {name: imported(name) & MODULES.keys() for name in MODULES}
    del modules["tandemrl"], modules["tandemrl.apps"]
    packages: dict[str, set[str]] = {one: set() for one in LAYER}
    for name, others in modules.items():
        packages[package(name)] |= {package(other) for other in others} - {package(name)}
    for graph in (modules, packages):
        TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_what_lasts_has_one_door() -> None:
    """Only ``training/checkpoint`` itself imports the modules behind its ``__init__``."""
    room = "tandemrl.training.checkpoint"
    outside = {name: imported(name) for name in MODULES if not f"{name}.".startswith(f"{room}.")}
    assert {name for name, others in outside.items() if room in others} >= {"tandemrl.training.loop"}
    assert not {(name, other) for name, others in outside.items() for other in others if other.startswith(f"{room}.")}


def test_the_core_is_pure() -> None:
    usual = {*sys.stdlib_module_names, "torch", "numpy", "scipy", "jaxtyping", "einops", "tandemrl"}
    usual -= {"logging", "random", "os", "time"}
    for name in MODULES:
        if package(name) in ("tandemrl.selection", "tandemrl.losses"):
            assert roots(name) <= usual | ({"transformers"} if name.endswith(".boundaries") else set()), name
            configs = {other for other in imported(name) if other.startswith("tandemrl.config")}
            plain = {"tandemrl.config.recipes"} if name.startswith("tandemrl.losses") else set()
            assert configs <= plain, name


def test_only_the_engine_imports_vllm() -> None:
    own = "tandemrl.rollout.vllm."
    assert not [name for name in MODULES if "vllm" in roots(name) and not name.startswith(own)]
    users = {name for name in MODULES for other in imported(name) if other.startswith("vllm.v1")}
    assert users == {f"{own}{name}" for name in ("call", "draws", "runner", "sampler", "worker")}


def test_only_the_workers_import_ray_and_only_when_they_start() -> None:
    user = "tandemrl.rollout.fleet.ray_workers"
    assert {name for name in MODULES if "ray" in roots(name)} == {user}
    assert "ray" not in roots(user, top_level_only=True)


def test_the_command_line_imports_heavy_things_inside_commands() -> None:
    names = ("config.catalogue", "config.fields", "config.hints", "apps.experiments.arms")
    light = {f"tandemrl.{name}" for name in names}
    usual = {*sys.stdlib_module_names, "typer"}
    for name in (name for name in MODULES if name.startswith("tandemrl.cli")):
        others = imported(name, top_level_only=True)
        heavy = {other for other in others if other.split(".")[0] not in usual and not other.startswith("tandemrl.cli")}
        assert heavy <= light, name


HEAVY = ("torch", "transformers", "vllm", "wandb", "numpy", "pyarrow")


@pytest.mark.parametrize(
    "code",
    [
        "import tandemrl",
        "import tandemrl; dir(tandemrl); assert tandemrl.__version__",
        "from typer.testing import CliRunner; from tandemrl.cli.main import app; "
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0",
    ],
)
def test_start_up_is_light(code: str) -> None:
    """No heavy package, and few modules at all: an import costs about a millisecond."""
    script = (
        f"import sys; before = len(sys.modules); {code}; "
        f"print([m for m in {HEAVY} if m in sys.modules], len(sys.modules) - before)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    heavy, modules = run.stdout.rsplit(" ", 1)
    assert heavy == "[]", run.stderr
    assert int(modules) < 250


def test_the_facade_has_every_name_it_promises() -> None:
    import tandemrl

    for name in tandemrl.__all__:
        assert getattr(tandemrl, name) is not None, name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = tandemrl.trian


def test_the_facade_is_made_of_functions_and_values() -> None:
    import tandemrl

    assert not [name for name in tandemrl.__all__ if isinstance(getattr(tandemrl, name), ModuleType)]
    stub = ast.parse((ROOT / "src" / "tandemrl" / "__init__.pyi").read_text())
    aliases = [alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert ["__version__", *aliases] == tandemrl.__all__  # no line of the stub escapes the facade
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert {"py.typed", "*.pyi"} <= set(settings["package-data"]["tandemrl"])  # and both are installed
