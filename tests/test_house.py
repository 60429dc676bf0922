"""The rooms of the house, and which way their imports run."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import tied_lm

HOUSE = Path(tied_lm.__file__).parent
# Each room with the rooms that it may import from, beside itself and the other modules at the root. `folder` is one
# module, at the root as well.
CONFIG = ("config", "folder")
ROOMS = {
    "model": (),
    "config": ("model",),
    "folder": ("config",),
    "data": CONFIG,
    "record": CONFIG,
    "train": (*CONFIG, "model", "data", "record"),
    "study": (*CONFIG, "model", "data", "record", "train"),
    "cli": (*CONFIG, "model", "data", "record", "train", "study"),
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(HOUSE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in HOUSE.rglob("*.py")}


def imports(module: str) -> Iterator[str]:
    """Modules of this project that a module imports, those inside functions too."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tied_lm":
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in MODULES else node.module for name in names)


def room_of(module: str) -> str:
    """The package that a module is in; "" for the modules at the root that are no rooms."""
    first = module.split(".")[1:2]
    return first[0] if first and (first[0] in ROOMS or MODULES[module].parent != HOUSE) else ""


def test_every_package_is_a_room():
    assert {room_of(module) for module in MODULES} == {"", *ROOMS}


def test_data_flows_one_way():
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        if module != "tied_lm"  # the door, which is open on demand
        for other in imports(module)
        if room_of(other) not in ("", room_of(module), *ROOMS.get(room_of(module), ()))
    ]
    assert wrong == []


def test_the_library_does_without_the_scripts_and_the_configs_of_the_repository():
    wrong = [
        module
        for module, path in MODULES.items()
        if re.search(r"^\s*(from|import) (experiments|configs|tests)\b", path.read_text(encoding="utf-8"), re.M)
    ]
    assert wrong == []


def test_no_import_closes_a_circle():
    left = {module: set(imports(module)) - {module, "tied_lm"} for module in MODULES if module != "tied_lm"}
    while free := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others for module, others in left.items() if module not in free}
    assert left == {}
