"""The runs of a comparison, found in its folder."""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tied_lm.config import completed, defaults, flatten, override, overrides_of, resolved, to_dict
from tied_lm.config.folder import CONFIG
from tied_lm.files import Damaged
from tied_lm.record.reader import Run, Shelf, open_run

MATCHED = ("model.features", "body.")  # fields that `compare.match` may change


def members(place: Path, values: Mapping[str, Any], shelf: Shelf | None = None) -> Iterator[tuple[str, int, Run]]:
    """Arm, seed and run, arm by arm, of each run that has begun.

    Args:
        values: the comparison's config.
        shelf: what is known of its runs already.

    Raises:
        Damaged: where one of them should be there is another run.
    """
    values = completed(values, defaults())
    first, compare = values["seed"], values["compare"]
    for arm, text in compare["arms"].items():
        wanted = _set_by(values, arm, text)
        if compare["match"] != "width":
            wanted = {field: value for field, value in wanted.items() if not field.startswith(MATCHED)}
        for seed in range(first, first + compare["seeds"]):
            folder = place / arm / f"seed{seed}"
            if (folder / CONFIG).exists():
                run = open_run(folder, shelf)
                _check(folder, run, wanted | {"seed": seed})
                yield arm, seed, run


def _set_by(values: Mapping[str, Any], arm: str, text: str) -> dict[str, Any]:
    """The fields that an arm sets."""
    own = copy.deepcopy(dict(values))
    fields = overrides_of(arm, text)
    for field, value in fields.items():
        override(own, field, value)
    return {field: value for field, value in flatten(resolved(own)).items() if field in fields}


def _check(folder: Path, run: Run, wanted: Mapping[str, Any]) -> None:
    found = flatten(to_dict(run.config))
    for field, value in wanted.items():
        if found.get(field) != value:
            raise Damaged(
                f"{folder} holds another run ({field} is {found.get(field)!r} in it, and not {value!r}); put the right "
                "one back, or remove that folder to train it again"
            )
