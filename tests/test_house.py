"""The rooms of the house, and which way their imports run."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import tied_lm

HOUSE = Path(tied_lm.__file__).parent
# Each room with the rooms that it may import from, beside itself and the modules at the root.
ROOMS = {
    "model": (),
    "config": ("model",),
    "data": ("config",),
    "record": ("config",),
    "train": ("config", "model", "data", "record"),
    "study": ("config", "model", "data", "record", "train"),
    "cli": ("config", "model", "data", "record", "train", "study"),
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


def test_the_house_is_small():
    """A room is a package, or a module at the root."""
    rooms = {module: room_of(module) or module for module in MODULES if module != "tied_lm"}
    left: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for module, room in rooms.items():
        left[room] |= {rooms[other] for other in imports(module) if other != "tied_lm"} - {room}
    assert len(left) <= 15
    layers = 0
    while lowest := {room for room, others in left.items() if not others & left.keys()}:
        left = {room: others for room, others in left.items() if room not in lowest}
        layers += 1
    assert (left, layers <= 8) == ({}, True)


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
