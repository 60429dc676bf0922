"""What the scripts share: flags, one-line errors, and a stop that loses nothing."""

import argparse
import dataclasses
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tied_lm.config import ConfigError, override
from tied_lm.folder import cache_folder


@dataclasses.dataclass(frozen=True)
class Command:
    """What the command line asks for."""

    name: str  # of the config
    values: dict[str, Any]  # nested values of the config, overrides applied
    workdir: Path | None
    flags: argparse.Namespace  # those of the one script


class Parser(argparse.ArgumentParser):
    """Tells of a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def load_config(path: str) -> dict[str, Any]:
    """Nested values of the config that a Python file's `get_config` returns."""
    allowed = "a Python file whose get_config() returns a ConfigDict"
    spec = importlib.util.spec_from_file_location("experiment_config", path) if path.endswith(".py") else None
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ConfigError("config", path, allowed)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return module.get_config().copy_and_resolve_references().to_dict()
    except Exception as error:
        raise ConfigError("config", path, f"{allowed} ({type(error).__name__}: {error})") from error


def parse(
    description: str, arguments: list[str], add_flags: Callable[[argparse.ArgumentParser], object] = lambda _: None
) -> Command:
    """Read the command line; `--config.field=value` sets a field.

    Args:
        add_flags: adds the flags that this script has besides those of all.
    """
    parser = Parser(
        description=description,
        epilog="Any field of the config can be set: --config.optimizer.learning_rate=0.003. The fields, with their "
        "units, are in configs/toy.py.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", default="configs/toy.py", metavar="FILE", help="default: %(default)s")
    parser.add_argument("--workdir", type=Path, metavar="DIR", help="default: runs/<config>-<hash of the config>")
    parser.add_argument("--config.FIELD", metavar="VALUE", help="set a field", dest="_")
    add_flags(parser)
    overrides, rest = [], []
    iterator = iter(arguments)
    for argument in iterator:
        if not argument.startswith("--config."):
            rest.append(argument)
            continue
        field, equals, text = argument.removeprefix("--config.").partition("=")
        if not equals:
            text = next(iterator, "")
        overrides.append((field, text))
    known = parser.parse_args(rest)
    values = load_config(known.config)
    for field, text in overrides:
        override(values, field, text)
    return Command(Path(known.config).stem, values, known.workdir, known)


def tensorboard_command(place: Path) -> str:
    """What to type to see a folder in TensorBoard, whether or not the environment is activated."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    return f"{python} -m tensorboard.main --logdir {place}"


def cache_compiled_programs() -> None:
    """Keep compiled programs in the user's cache folder, so that a second start need not compile."""
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def run(main: Callable[[list[str], threading.Event], None]) -> NoReturn:
    """Run a script: a mistake of the user's is one line and exit status 2, any other foreseen failure status 1.

    The first interrupt (or SIGTERM) lets the run save what it has; a second one ends it at once.
    """
    stop = threading.Event()
    received: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        received.append(number)
        stop.set()
        print("\nstopping: saving what there is ...", file=sys.stderr)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    try:
        main(sys.argv[1:], stop)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        os._exit(1)
    except Exception as error:
        # Not at the top, so that --help and most mistakes answer before the libraries are loaded.
        from tied_lm.checkpoint import Damaged
        from tied_lm.loop import Diverged, Interrupted

        if isinstance(error, Interrupted):
            print(f"{error}; the same command continues", file=sys.stderr)
            sys.exit(128 + (received or [signal.SIGINT])[0])
        # An OSError is a full disk, say: what was saved stays good, and the same command continues.
        if isinstance(error, (Damaged, Diverged, OSError)):
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)
        raise
    sys.exit(0)
