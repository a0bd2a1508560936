"""Imports go one way, `import saccade` is light and changes nothing, and what it exports exists."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import json
import operator
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from public import PUBLIC

import saccade

PACKAGE = Path(saccade.__file__).parent
WINGS = {"interception", "make", "operator", "see", "support"}  # folders of parts; the other parts stand by themselves
# A part imports from the lines above its own, never from its own line or below.
LAYERS = [
    {
        "_addresses",
        "_extras",
        "_garbage_collection",
        "_int8_rows",
        "_lazy_names",
        "_machine",
        "_native",
        "_numbers",
        "_option_fields",
        "_registered",
        "_running_modules",
        "_restored",
        "_tables",
        "_terminal",
        "_threads",
        "_uncertainty",
        "_whole_file",
    },
    {"_documentation", "_plain_values", "_shared_cores", "_surroundings", "_tracing"},
    {"_programs"},
    {"_masks"},
    {"_biases", "_dropout", "_unknown_arguments"},
    {"_call"},
    {"_scores"},
    {"_costs"},
    {"_checks", "_reference", "_observers", "_tiles"},
    {"_backends"},
    {"_attention", "_derived", "_int8"},
    {"_groups"},
    {"_int4"},
    {"_explain", "_hooks", "_mask_functions", "_pooled", "_products", "_statistics", "_weights"},
    {"_block_masks", "_native_step", "batching", "positions", "variants"},
    {"_flex_attention"},
    {"acceleration", "nn", "verification"},
    {"distributed"},
    {"models"},
    {"monitoring"},
    {"intervention"},
    {"inspection"},
    {"attribution"},
    {"analysis", "integrations", "training", "viewer"},
    {"_task_options", "benchmark", "pruning"},
    {"_task_registry"},
    {"tasks"},
    {"__init__"},
    {"cli"},
    {"__main__"},
]
LAYER = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
COMPUTING = {
    "accelerate",
    "anywidget",
    "conllu",
    "jinja2",
    "lightning",
    "matplotlib",
    "numpy",
    "pandas",
    "resvg_py",
    "rich",
    "safetensors",
    "sklearn",
    "starlette",
    "tensorboard",
    "tokenizers",
    "torch",
    "transformers",
    "uvicorn",
}
HEAVY = COMPUTING - {"numpy", "safetensors", "torch"} | {"typer"}
PARTS = [
    "acceleration",
    "analysis",
    "attribution",
    "batching",
    "benchmark",
    "distributed",
    "inspection",
    "integrations",
    "intervention",
    "models",
    "monitoring",
    "nn",
    "positions",
    "pruning",
    "tasks",
    "training",
    "variants",
    "verification",
    "viewer",
]

ROOMS = {  # each imports those before it; last come the files of the part that are not named here
    "models": [
        *("_shortened", "checkpoints", "tokenizers", "token_layout", "inputs", "output", "output_heads"),
        *("pruned_heads", "held_weights", "model"),
        *("decoding", "graphs", "signals", "text", "decoder_lm", "families"),
    ],
    "tasks": [
        *("_temporary", "_space", "_examples", "_baselines", "_task", "_example_task"),
        *("_classes", "_texts", "_media", "_series", "_graphs"),
        *("answer", "classify", "_several_labels", "forecast", "graph", "image", "_language", "mlm", "speech", "tag"),
        *("translate", "_runs", "_searching", "_compression"),
    ],
    "verification": ["findings", "subject", "tracing", "stacks", "checks", "running", "report"],
}

COMPILERS = ("torch._dynamo", "torch._inductor", "torch.nn.attention.flex_attention")


def part_of(module: str) -> str:
    """`saccade.operator.nn.decoder` -> `nn`; `saccade` -> `__init__`."""
    return ([name for name in module.split(".")[1:] if name not in WINGS] or ["__init__"])[0]


def module_name(path: Path) -> str:
    parts = ["saccade", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Every module of the package that a file imports, wherever in the file the import stands."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    found = set()
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    for node in ast.walk(tree) if "import_module" in text else statements(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}") else base for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {by_place(one.value) for one in node.args[:1] if isinstance(one, ast.Constant)}
    return frozenset(name for name in found if name == "saccade" or name.startswith("saccade."))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All below `node`, without their expressions: there are ten times as many of these."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for below in getattr(node, field, ()):
            yield below
            yield from statements(below)


def by_place(address: str) -> str:
    """`saccade.viewer`, by which name the package is imported too -> `saccade.see.viewer`."""
    names = address.split(".")
    wing = saccade._WINGS.get(names[1]) if len(names) > 1 else None
    return ".".join([names[0], wing, *names[1:]]) if wing else address


@functools.cache
def is_module(name: str) -> bool:
    if not name.startswith("saccade."):
        return False
    path = PACKAGE.joinpath(*name.split(".")[1:])
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_imports_go_one_way():
    for path in sources():
        own = part_of(module_name(path))
        for name in imported(path):
            other = part_of(name)
            if other != own:
                assert LAYER[other] < LAYER[own], f"{module_name(path)} imports {name}"


@pytest.mark.parametrize("part", ROOMS)
def test_a_part_goes_from_room_to_room(part):
    def rank(module: str) -> int:
        """`saccade.verification.subject._calling` stands in the second room."""
        room = [*module[len(module_name(folder / "__init__.py")) :].split("."), ""][1]
        return rooms.index(room) if room in rooms else len(rooms)

    rooms = ROOMS[part]
    [folder] = {path.parent for path in PACKAGE.rglob(f"{part}/__init__.py") if part_of(module_name(path)) == part}
    assert {path.stem for path in folder.iterdir()} >= set(rooms)
    for path in sorted(folder.rglob("*.py")):
        for name in imported(path):
            if part_of(name) == part:
                assert rank(name) <= rank(module_name(path)), f"{module_name(path)} imports {name}"


def test_no_two_files_import_each_other():
    """Wherever in a file the import stands; masks alone may, since masks are made of masks."""
    graph = {module_name(path): {name for name in imported(path) if name.count(".") > 1} for path in sources()}
    for name, others in graph.items():
        if name.startswith("saccade.operator._masks."):
            others.difference_update([other for other in others if other.startswith("saccade.operator._masks.")])
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which shows the circle


def test_verification_reaches_no_models_and_no_inspection():
    """It takes a callable or a module; `integrations._verification` opens models for it."""
    graph = {module_name(path): imported(path) for path in sources()}
    reached, waiting = set(), ["saccade.verification"]
    while waiting:
        for name in graph[waiting.pop()] - reached - {"saccade"}:
            reached.add(name)
            waiting.append(name)
    assert "saccade.verification.checks" in reached
    assert not {name for name in reached if name.startswith(("saccade.make", "saccade.see", "saccade.integrations"))}


def test_the_rule_reads_every_form_of_import(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    for folder in ("nn", "models"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    file = tmp_path / "nn" / "thing.py"
    file.write_text(
        "import saccade.cli\nfrom .. import models, attention\ndef f():\n    from ..models import load\n"
        "    return importlib.import_module('saccade.viewer'), import_module(name)\n"
    )
    assert imported(file) == {"saccade.cli", "saccade.models", "saccade", "saccade.see.viewer"}


def test_optimised_code_never_imports_its_specification():
    for path in (PACKAGE / "operator" / "_backends").rglob("*.py"):
        assert "saccade.operator._reference" not in imported(path)


def test_what_is_exported_exists_once():
    assert len(saccade.__all__) == len(set(saccade.__all__))
    for name in saccade.__all__:
        assert hasattr(saccade, name)
        assert not name.startswith("_")


def lazily_imported() -> dict[str, str]:
    """What type checkers read in `__init__`: each name, and the module that it is imported from."""
    [block] = [
        node for node in ast.parse(Path(saccade.__file__).read_text(encoding="utf-8")).body if isinstance(node, ast.If)
    ]
    return {
        alias.name: node.module or "" for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }


def test_type_checkers_and_users_get_the_same_objects():
    imports = lazily_imported()
    assert sorted(imports) == sorted([*PARTS, *saccade.__all__])
    masks = importlib.import_module("saccade.operator._masks")
    assert {name for name, module in imports.items() if module == "operator._masks"} == set(masks.__all__)
    for name, module in imports.items():
        home = importlib.import_module(f"saccade.{module}".rstrip("."))
        if module in {*WINGS, ""}:
            home = importlib.import_module(f"{home.__name__}.{name}")
            assert getattr(saccade, name) is home
        else:
            assert getattr(saccade, name) is getattr(home, name)
        assert vars(saccade)[name] is getattr(saccade, name)  # compilers and hot loops find it without `__getattr__`


def test_every_part_is_listed():
    inner = {path.parent.name for wing in WINGS for path in PACKAGE.glob(f"{wing}/*/__init__.py")}
    parts = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | inner
    assert set(PARTS) == {part for part in parts - WINGS if part[0] != "_"} - {"cli"}  # the program, not the library


def test_a_module_is_one_by_its_place_and_by_its_address():
    """Two copies would have two classes of one name; the specification of the place is what reloading needs."""
    for part in set(PARTS) & saccade._WINGS.keys():
        for place in (PACKAGE / saccade._WINGS[part] / part).glob("*.py"):
            name = module_name(place)
            address = name.replace(f".{saccade._WINGS[part]}.", ".", 1)
            module = importlib.import_module(address)
            assert module is importlib.import_module(name)
            assert (module.__name__, module.__spec__.name) == (name, name)
    with pytest.raises(ModuleNotFoundError, match=r"saccade\.see\.inspection\.nothing"):
        importlib.import_module("saccade.inspection.nothing")


def test_type_checkers_find_the_public_addresses():
    """A stub for each package whose address leaves out its wing."""
    for package in PUBLIC:
        path = PACKAGE.joinpath(*package.split(".")[1:])
        if package.split(".")[-1] in saccade._WINGS or path.parent.name in saccade._WINGS:
            stub = path / "__init__.pyi" if path.is_dir() else path.with_suffix(".pyi")
            dots = "." * len(stub.relative_to(PACKAGE).parts)
            place = importlib.import_module(package).__name__.removeprefix("saccade.")
            [line] = ast.parse(stub.read_text(encoding="utf-8")).body
            assert f"{'.' * line.level}{line.module}" == f"{dots}{place}"
            assert {alias.name for alias in line.names} in ({"*"}, set(importlib.import_module(package).__all__))


def test_the_parts_of_the_package_are_listed():
    assert set(dir(saccade)) == {*PARTS, *saccade.__all__, "__version__"}


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'saccade' has no attribute 'atention'") as raised:
        saccade.atention  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("atention", saccade)  # Python suggests a name from these
    for name, place in saccade._COMMANDS.items():
        assert operator.attrgetter(place)(saccade), place
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; there is saccade.{place}$"):
            getattr(saccade, name)
    with pytest.raises(AttributeError, match="no attribute 'keras'"):
        saccade.integrations.keras  # noqa: B018


def test_no_module_is_named_as_a_function():
    modules = {path.name for path in PACKAGE.iterdir()} | {path.stem for path in PACKAGE.iterdir()}
    assert not modules & set(saccade.__all__)


# One process for all: PyTorch takes two seconds. What is asked of `import saccade` alone is asked in a fork.
PROBE = f"""
import json, logging, os, signal, sys, threading, traceback, warnings
import torch
def apart(asked):
    if os.fork() == 0:
        try:
            asked()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.wait()[1] == 0
def every_part_needs_no_import_of_its_own():
    for part in {PARTS}:
        assert getattr(saccade, part).__name__.endswith(f".{{part}}")
    assert saccade.integrations.transformers.register
def text_of_a_report_needs_none_of_what_colours_and_pages_need():
    from saccade import verification
    str(verification.Report("a", "", (), None, (), ()))
    assert not {{"rich", "jinja2", "typer"}} & set(sys.modules)
def without_its_module_the_operator_says_so():
    sys.modules["saccade._native"] = None  # importing it raises
    query = torch.ones(1, 2, 5, 16)
    plan = saccade.explain(query, query, query)
    assert plan.backend == "sdpa" and "native build" in plan.refused["native"]
    assert saccade.attention(query, query, query).shape == query.shape
def the_integration_does_not_import_transformers():
    import saccade.integrations.transformers, saccade.interception._hooks.transformers
    assert "transformers" not in sys.modules
def state():
    return {{
        "threads": [t.name for t in threading.enumerate()],
        "environment": dict(os.environ),
        "loggers": [repr(h) for n in (None, *logging.root.manager.loggerDict) for h in logging.getLogger(n).handlers],
        "torch": [torch.get_num_threads(), str(torch.get_default_dtype()), torch.initial_seed(), str(torch.get_rng_state().sum())],
        "signals": [repr(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
        "warnings": len(warnings.filters), "hook": repr(sys.excepthook), "path": list(sys.path),
    }}
before, modules = state(), set(sys.modules)
import saccade
assert sys.modules.keys() - modules <= {{"saccade", "saccade.support", "saccade.support._addresses", "saccade.support._registered"}}, sys.modules.keys() - modules
apart_ones = [
    every_part_needs_no_import_of_its_own,
    text_of_a_report_needs_none_of_what_colours_and_pages_need,
    the_integration_does_not_import_transformers,
    without_its_module_the_operator_says_so,
]
failed = [asked.__name__ for asked in apart_ones if not apart(asked)]
from saccade import *
after = state()
print(json.dumps({{"changed": [k for k in before if before[k] != after[k]], "failed": failed, "new": sorted(set(sys.modules) - modules)}}))
"""  # noqa: E501


@pytest.mark.slow
def test_importing_is_light_and_changes_nothing():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["failed"] == [], done.stderr
    assert told["changed"] == []
    assert done.stderr == ""
    new = set(told["new"])
    assert "saccade" in new
    assert not {name.split(".")[0] for name in new} & HEAVY
    assert not {name for name in new if name.startswith(COMPILERS)}


COMMAND = """
import sys
from saccade.cli import main
sys.argv = ["saccade", *{words}]
status = main()
print(status, *sorted({{name.partition(".")[0] for name in sys.modules}}), file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--version"], 0),
        (["--help"], 0),
        (["look", "--help"], 0),
        (["step", "--help"], 0),
        (["train", "lm", "--help"], 0),
        (["train", "classify", "--help"], 0),
        (["test", "--help"], 0),
        (["verify", "--help"], 0),
        (["compare", "--help"], 0),
        (["view", "--help"], 0),
        (["bench", "--help"], 0),
        (["generate"], 2),  # a usage error
        (["look", "no-such-file.txt"], 2),
    ],
)
def test_help_and_usage_errors_import_nothing_that_computes(words, status):
    done = subprocess.run([sys.executable, "-c", COMMAND.format(words=words)], capture_output=True, text=True)
    told, *modules = done.stderr.splitlines()[-1].split()
    assert told == str(status)
    assert not COMPUTING & set(modules)


def test_scripts_import_what_there_is():
    """They are run by hand, so a name that is gone would be found by whoever needs the script next."""
    for path in (PACKAGE.parents[1] / "benchmarks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "saccade":
                for alias in node.names:
                    found = hasattr(importlib.import_module(node.module), alias.name)
                    assert found or importlib.import_module(f"{node.module}.{alias.name}"), (path.name, alias.name)
