"""The architecture as a test: modules have layers, imports go down or sideways without cycles, start-up is light."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = {
    0: "types config configs atomic versions watchdog paths heartbeat",
    1: "selection selection.strategies selection.boundaries selection.draws selection.live "
    "losses losses.advantages losses.penalties losses.recipes losses.reduce losses.surrogates losses.weights stats",
    2: "batching schedule functions data data.rows data.sampler data.synthetic data.arithmetic data.sources data.files "
    "data.builders data.boxed data.eurus "
    "rollout rollout.engine rollout.sampling rollout.vllm_planner rollout.envs rollout.envs.math rollout.envs.scoring "
    "rollout.envs.protocol rollout.envs.formula rollout.envs.notation rollout.envs.claims "
    "rollout.envs.expression rollout.envs.equality rollout.envs.prime rollout.envs.answers "
    "rollout.envs.countdown rollout.envs.rewards rollout.envs.routing rollout.envs.rubric rollout.envs.worker "
    "rollout.envs.code rollout.envs.sandbox rollout.envs.sandbox_layers rollout.envs.sandbox_runner",
    3: "model pretrained attention head checkpoint dcp manifest coverage tracking tiny "
    "rollout.torch_engine rollout.engines rollout.sync rollout.collect "
    "rollout.vllm_engine rollout.vllm_worker rollout.vllm_weights rollout.vllm_guard rollout.vllm_server "
    "rollout.http_engine rollout.judges rollout.spread parallel critic lora profiling faults",
    4: "preflight run ahead update train "
    "evals evals.measures evals.files evals.protocol evals.reading evals.session evals.suite "
    "compare score experiment report report.figures report.page report.provenance report.records report.samples "
    "report.svg report.tables",
    5: "cli cli.main cli.train cli.evaluate cli.compare cli.data cli.model cli.score cli.serve cli.check "
    "cli.report cli.experiment",
}
LAYER = {f"tandemrl.{name}": layer for layer, names in LAYERS.items() for name in names.split()} | {"tandemrl": 4.5}


def modules() -> dict[str, Path]:
    found = {}
    for root, package in ((ROOT / "src" / "tandemrl", "tandemrl"), (ROOT / "cli", "tandemrl.cli")):
        for path in sorted(root.rglob("*.py")):
            parts = [package, *path.relative_to(root).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imported(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    """Dotted names that a file imports; ``from package import name`` is ``package.name`` where that is a module."""
    tree = ast.parse(path.read_text())
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)


def test_every_module_has_a_layer() -> None:
    assert set(MODULES) - set(LAYER) == set(), "give the new module a layer in LAYERS"


@pytest.mark.parametrize("name", [name for name in MODULES if name != "tandemrl"])
def test_imports_go_down_or_sideways(name: str) -> None:
    own = {other for other in imported(MODULES[name]) if other.split(".")[0] == "tandemrl"}
    assert {other for other in own if LAYER.get(other, 99) > LAYER[name]} == set()


def test_no_cycles_at_import_time() -> None:
    graph = {name: {i for i in imported(path, top_level_only=True) if i in MODULES} for name, path in MODULES.items()}
    finished: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join([*trail, name])}"
        if name not in finished:
            for other in graph[name]:
                visit(other, (*trail, name))
            finished.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("name", [name for name in MODULES if LAYER.get(name) == 1])
def test_the_core_is_pure(name: str) -> None:
    roots = {other.split(".")[0] for other in imported(MODULES[name])}
    assert roots <= {*sys.stdlib_module_names, "torch", "numpy", "scipy", "jaxtyping", "einops", "tandemrl"} | (
        {"transformers"} if name.endswith(".boundaries") else set()
    )
    assert roots.isdisjoint({"logging", "random", "os", "time"})
    assert "tandemrl.config" not in set(imported(MODULES[name]))


@pytest.mark.parametrize("name", MODULES)
def test_only_vllm_modules_import_vllm(name: str) -> None:
    short = name.rpartition(".")[2]
    for other in imported(MODULES[name]):
        assert not other.startswith("vllm.v1") or short in ("vllm_worker", "vllm_guard")
        assert other.split(".")[0] != "vllm" or short.startswith("vllm_")


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("tandemrl.cli")])
def test_the_command_line_imports_heavy_things_inside_commands(name: str) -> None:
    for other in imported(MODULES[name], top_level_only=True):
        assert other.split(".")[0] in {*sys.stdlib_module_names, "typer"} or other.startswith("tandemrl.cli"), other


HEAVY = ("torch", "transformers", "vllm", "wandb", "numpy", "pyarrow", "omegaconf")


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


def test_the_facade_promises_type_checkers_the_same_names() -> None:
    import tandemrl

    tree = ast.parse(MODULES["tandemrl"].read_text())
    typed = {
        alias.asname: f"{node.module}.{alias.name}".removeprefix("tandemrl.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tandemrl.")
        for alias in node.names
    }
    typed["load_config"] = typed.pop("_load")  # what an import gives a new name is not exported
    assert typed == tandemrl._NAMES


def test_the_tests_can_be_collected_without_vllm(tmp_path: Path) -> None:
    """Neither vLLM nor what only comes with it may be needed before a test is skipped; a folder of tests is no vLLM."""
    (tmp_path / "core.py").write_text(
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Core:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('cloudpickle', 'fastapi'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        f"        return PathFinder.find_spec(name, [{str(ROOT / 'tests')!r}]) if name == 'vllm' else None\n"
        "sys.meta_path.insert(0, Core())\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "core", "--collect-only", "-q", "-m", "not vllm", "tests/vllm"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    collected = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert collected.returncode in (0, 5), collected.stdout  # 5: everything is skipped or deselected


CHECKED = """
import tandemrl
from tandemrl import {names}

settings: tandemrl.Config = load_config("quickstart")
tandemrl.train.train(settings, reward=lambda row, text: Score(1.0, {{"acc": 1.0}}, None))
every = [{qualified}]
"""
UNCHECKED = """
import tandemrl
from tandemrl import Scroe
tandemrl.trian
tandemrl.load_config(3)
tandemrl.train.train(tandemrl.load_config(), reward=3)
"""


def test_a_user_s_script_is_type_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mypy import api

    import tandemrl

    names = [name for name in tandemrl.__all__ if name not in ("__version__", "train")]
    (tmp_path / "right.py").write_text(
        CHECKED.format(names=", ".join(names), qualified=", ".join(f"tandemrl.{name}" for name in tandemrl.__all__))
    )
    (tmp_path / "wrong.py").write_text(UNCHECKED)
    outside = [
        f"[mypy-{name}.*]\nfollow_imports = skip\nignore_missing_imports = true\n"
        for name in (
            "torch",
            "transformers",
            "numpy",
            "scipy",
            "matplotlib",
            "omegaconf",
            "sympy",
            "mpmath",
            "vllm",
            "rich",
        )
    ]
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\n" + "".join(outside))
    monkeypatch.setenv("MYPYPATH", str(ROOT / "src"))
    options = [f"--config-file={tmp_path}/mypy.ini", f"--cache-dir={tmp_path}/cache", "--follow-imports=silent"]
    report, errors, _ = api.run([*options, str(tmp_path / "right.py"), str(tmp_path / "wrong.py")])
    assert not errors
    found = [line.removeprefix(f"{tmp_path}/") for line in report.splitlines() if ": error: " in line]
    assert [line.split(": error: ")[0] for line in found] == [f"wrong.py:{line}" for line in (3, 4, 5, 6)], report
    assert 'no attribute "Scroe"' in found[0]
    assert 'no attribute "trian"' in found[1]
