"""The default config as fixtures, and one cache of compiled programs for all test processes."""

import atexit
import copy
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from configs import toy
from tied_lm import folder
from tied_lm.config import Config, build_run, override

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Before JAX is loaded; the workers, and what they start, inherit it.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="compiled-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the corpora that tests make out of the user's cache."""
    place = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(folder, "cache_folder", lambda: place)
        yield place / "corpora"


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
