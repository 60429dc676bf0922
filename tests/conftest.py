"""The default config as fixtures."""

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from configs import toy
from tied_lm.config import Config, build_run, override

# Before JAX is loaded; the commands that tests start inherit it. A program that another process compiled is not
# trusted beside the same one compiled here.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"


@pytest.fixture(scope="session", autouse=True)
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep what tests, and the commands that they start, would keep in the user's cache folder out of it."""
    place = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(place))
        yield place / "tied_lm" / "corpora"


@pytest.fixture
def values() -> dict[str, Any]:
    """Nested plain values of the default config."""
    return toy.get_config().to_dict()


@pytest.fixture
def make_config(values: dict[str, Any]) -> Callable[..., Config]:
    """Build a run's config from the default one and overrides such as "data.vocab_size=8"."""

    def make(*overrides: str) -> Config:
        changed = copy.deepcopy(values)
        for item in overrides:
            field, _, text = item.partition("=")
            override(changed, field, text)
        return build_run(changed)

    return make
