"""The default config as fixtures; a cache of compiled programs for all test processes, none of which keeps too many."""

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
from tests import linen
from tied_lm.config import Config, build_run, override

collect_ignore = ["typechecker.py"]  # a plugin, which works by being imported

MAPPINGS = Path("/proc/self/maps")  # of Linux
MOST_MAPPINGS = 20_000

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Before JAX is loaded; the workers, and what they start, inherit it.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="compiled-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    """Drop compiled programs where they are many. Each takes about nine mappings of memory; where a process has 65,530
    of them, Linux refuses more, and the compiler ends it with a segmentation fault."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        import jax

        jax.clear_caches()


def pytest_configure(config: pytest.Config) -> None:
    """Compile in a hurry for the quick tests, most of whose time that would take; XLA_FLAGS, set or empty, win."""
    if config.option.markexpr.startswith("not slow"):
        os.environ.setdefault("XLA_FLAGS", " ".join(f"--{name}={value}".lower() for name, value in linen.HURRY.items()))


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
