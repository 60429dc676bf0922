"""What the commands share: flags, one-line errors, and a stop that loses nothing."""

import argparse
import dataclasses
import hashlib
import importlib.util
import io
import itertools
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NoReturn

from ml_collections import ConfigDict, FieldReference

from tied_lm.checks import ConfigError
from tied_lm.cli import fellows, terminal
from tied_lm.cli.fields import field_help
from tied_lm.cli.fields import plain as plain_text
from tied_lm.cli.workers import stop_with_parent
from tied_lm.config import (
    OPTIONS,
    OWN_DEFAULTS,
    Mesh,
    build_comparison,
    completed,
    defaults,
    flatten,
    override,
    put,
    read_mesh,
    resolved,
)
from tied_lm.config.folder import cache_folder
from tied_lm.tokenstring import printable

ROOT = Path(__file__).parents[2]  # of the repository, in a clone
DEFAULT = "configs/toy.py"  # where there is no such file, the defaults of the fields stand for it
LONGEST = 500  # characters of a mistake that is told


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
        shown = message if len(message) <= LONGEST else message[:LONGEST] + " ..."
        self.exit(2, printable(f"error: {shown}") + "\n")


def load_config(path: str) -> dict[str, Any]:
    """Nested values of the config that a Python file's `get_config` returns; references to other fields stay such.

    Args:
        path: of the file, relative to the current folder or to this repository; `FILE:VARIANT` calls
            `get_config(VARIANT)`. The file can import the modules beside it, and its folder as a package.

    Raises:
        ConfigError: there is no such file, or it fails in whatever way.
    """
    allowed = "a Python file whose get_config() returns a ConfigDict"
    name, *variant = path.split(".py:", 1)
    file = Path(name + ".py" if variant else name)
    if not file.is_absolute() and not os.path.lexists(file):
        file = ROOT / file
    if path == DEFAULT and not os.path.lexists(file):
        return {}
    spec = importlib.util.spec_from_file_location("experiment_config", file) if file.suffix == ".py" else None
    if spec is None or spec.loader is None or not os.path.isfile(file):
        raise ConfigError("config", path, allowed)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their names
    before = list(sys.path)
    sys.path[:] = [str(file.parent), *before, str(file.absolute().parent.parent)]
    try:
        spec.loader.exec_module(module)
        return _with_references(module.get_config(*variant))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit among them
        raise ConfigError("config", path, f"{allowed} ({type(error).__name__}: {error})") from error
    finally:
        sys.path[:] = before


def _with_references(config: ConfigDict) -> dict[str, Any]:
    """Nested values of a config, with its references to single fields as they are."""
    values: dict[str, Any] = {}
    for name, value in config.items(preserve_field_references=True):
        group = config[name] if isinstance(value, FieldReference) and value.get_type() is ConfigDict else value
        values[str(name)] = _with_references(group) if isinstance(group, ConfigDict) else value
    return values


def _as_flags(arguments: list[str]) -> list[str]:
    """`--config.field=value` and `--config.field value` as the one flag that argparse knows."""
    flags: list[str] = []
    iterator = iter(arguments)
    for argument in iterator:
        if argument.startswith("--config."):
            field, equals, text = argument.removeprefix("--config.").partition("=")
            if not equals:
                text = next(iterator, "--")
                if text.startswith("--"):
                    raise ConfigError(field, None, f"a value: --config.{field}=VALUE")
            argument = f"--config.FIELD={field}={text}"
        flags.append(argument)
    return flags


def parse(
    description: str, arguments: list[str], add_flags: Callable[[argparse.ArgumentParser], object] = lambda _: None
) -> Command:
    """Read the command line; `--config.field=value` sets a field.

    Args:
        add_flags: adds the flags that this script has besides those of all.

    Raises:
        ConfigError: a config that cannot be loaded, or a field that cannot be set so.
    """
    parser = Parser(
        description=description,
        epilog=_field_help(arguments) if {"-h", "--help"} & {*arguments} else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", default=DEFAULT, metavar="FILE[:VARIANT]", help="default: %(default)s")
    parser.add_argument("--workdir", type=Path, metavar="DIR", help="default: runs/<config>-<hash of the config>")
    parser.add_argument(
        "--config.FIELD", action="append", default=[], metavar="VALUE", help="set a field", dest="overrides"
    )
    parser.add_argument("--print_config", action="store_true", help="print all fields, as flags, and do nothing else")
    parser.add_argument(
        "--dry_run", action="store_true", help="say what it would take (runs, memory, disk, time), and write nothing"
    )
    parser.add_argument("--flagfile", help=argparse.SUPPRESS)
    add_flags(parser)
    known = parser.parse_args(_as_flags(arguments))
    if known.flagfile is not None:
        raise ConfigError("flagfile", known.flagfile, "no such flag; --config takes a file, with every field in it")
    check_path("workdir", known.workdir or Path())
    values = completed(load_config(known.config), OWN_DEFAULTS)
    loading = printable(f"{known.config}: loading the libraries ...")
    for item in known.overrides:
        field, _, text = item.partition("=")
        if field.startswith(tuple(f"{group}." for group in OPTIONS)):  # they are declared where models are built
            terminal.begin(loading)
        override(values, field, text)
    terminal.begin(loading)
    values = completed(values, defaults())
    plain = resolved(values)  # a reference that gives nothing is a mistake in the config
    if known.print_config:
        build_comparison(values)
        terminal.end()
        print(_printed(plain))
        parser.exit()
    stem = re.sub(r"\.py(?=:|$)", "", known.config.rpartition("/")[2])
    return Command(re.sub(r"[^A-Za-z0-9._-]+", "-", stem)[:64], values, known.workdir, known)


def _field_help(arguments: list[str]) -> str:
    """What a command says of the fields, by the comments of the default config and of the one that is asked for."""
    named = [argument.partition("=")[2] for argument in arguments if argument.startswith("--config=")]
    named += [value for flag, value in itertools.pairwise(arguments) if flag == "--config"]
    files = [Path(re.sub(r"\.py:.*", ".py", name)) for name in [DEFAULT, *named]]
    found = [path for file in files for path in (ROOT / file, file)]
    return field_help(found if found[0].is_file() else [*_installed_default(), *found])


def _installed_default() -> list[Path]:
    """The default config as the wheel brings it, which is for reading alone."""
    files = distribution("tied_lm").files or []
    return [Path(str(file.locate())) for file in files if file.match(f"share/tied_lm/{DEFAULT}")]


def _printed(values: dict[str, Any]) -> str:
    """Every field as a flag, with the default of those that have another value."""
    usual, lines = flatten(defaults()), []
    for field, value in flatten(values).items():
        shown, default = plain_text(value), plain_text(usual[field]) if field in usual else "none"
        lines.append(f"--config.{field}={shlex.quote(shown)}" + ("" if shown == default else f"  # default: {default}"))
    return printable("\n".join(lines), keep="\n")


def check_path(flag: str, path: Path) -> None:
    """Refuse a path that cannot be looked up (it is too long, or below a file), or that only Python can write down."""
    try:
        str(path.absolute()).encode()
        path.lstat()
    except FileNotFoundError:
        return
    except UnicodeEncodeError:
        raise ConfigError(flag, str(path.absolute()), "a path in UTF-8, in a locale that knows it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(flag, str(path), f"a path that can be looked up ({reason})") from None


def tensorboard_command(place: Path) -> str:
    """What to type to see a folder in TensorBoard, whether or not the environment is activated."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    return printable(f"{python} -m tensorboard.main --logdir {place}")


def ways_to_see(place: Path, link: str) -> str:
    """How to see a comparison in TensorBoard, and the address at which to open it."""
    return f"TensorBoard: {tensorboard_command(place)}\nand open {shlex.quote(link)}"


def set_up_jax(command: Command | None = None) -> None:
    """Find the device, and keep compiled programs in the user's cache folder, so that a second start need not compile.

    Args:
        command: the config of which may want other processes to take part; all but the first of them fall silent.

    Raises:
        ConfigError: the platform that the environment asks for is not here, or the other processes are not found.
    """
    import jax

    if command is not None:
        _join_others(command)
    # Every number has its type here, whatever the environment says of those that have none.
    jax.config.update("jax_enable_x64", False)
    try:
        jax.devices()
    except Exception as error:  # a bare AssertionError among them
        platforms, reason = os.environ.get("JAX_PLATFORMS"), str(error) or "it cannot be initialised"
        raise ConfigError("JAX_PLATFORMS", platforms, f"a platform that is here ({reason})") from error
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        try:
            folder = cache_folder()
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                jax.config.update("jax_compilation_cache_dir", str(folder))
        except (ConfigError, OSError) as error:
            tell(f"compiled programs are not kept: {error}")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    terminal.end()


def _join_others(command: Command) -> None:
    """Find the other processes of a run, if there are to be some. The config forgets where this one stands in them."""
    from tied_lm.train import processes

    mesh = read_mesh(command.values)
    if not mesh.distributed:
        return
    if command.flags.dry_run:
        raise ConfigError("mesh.distributed", True, "False with --dry_run, which measures one process")
    fellows.listen()
    try:
        processes.join(mesh.coordinator, mesh.processes, mesh.process)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError("mesh.distributed", True, f"processes that find each other ({reason})") from error
    fellows.all_are_here()
    for name in ("coordinator", "processes", "process"):
        put(command.values, f"mesh.{name}", getattr(Mesh(), name))
    if not processes.is_first():
        terminal.fall_silent()


def check_same(values: Mapping[str, Any]) -> None:
    """Refuse processes that would not do the same.

    Raises:
        ConfigError: another process of the run has other values.
    """
    from tied_lm.train.processes import is_same_in_all

    if not is_same_in_all(hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()):
        raise ConfigError("mesh.distributed", True, "processes that all have the same config and the same text")


def tell(line: str) -> None:
    """One line on standard error, which harms no terminal."""
    if not terminal.is_silent():
        _complain(line)


def _complain(line: str) -> None:
    """A line that is said by whichever process."""
    terminal.end()
    print(printable(line), file=sys.stderr, flush=True)


def _fail(reason: str, status: int) -> NoReturn:
    """End with an error. Other processes are not waited for, which may wait for this one."""
    _complain(f"error: {reason}")
    if _has_others():
        os._exit(status)
    sys.exit(status)


def _has_others() -> bool:
    return "jax" in sys.modules and bool(sys.modules["jax"].distributed.is_initialized())


class _Stop(threading.Event):
    """What `run` hands to a script."""

    received = int(signal.SIGINT)  # the signal that asked for it


def save_when_stopped(stop: threading.Event) -> None:
    """From here on the first interrupt (or SIGTERM) lets the run save what it has; a second one ends it at once.

    Signals are left alone where it is not `run` that called the script.
    """
    if not isinstance(stop, _Stop):
        return

    def on_signal(number: int, frame: object) -> None:
        stop.received = number
        stop.set()
        if not terminal.is_silent():
            print("\nstopping: saving what there is ...", file=sys.stderr)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)


def run(main: Callable[[list[str], threading.Event], None]) -> NoReturn:
    """Run a script: a mistake of the user's is one line and exit status 2, any other foreseen failure status 1.

    An interrupt (or SIGTERM) ends it at once, until the script says that there is something to save, see
    `save_when_stopped`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what the terminal cannot show
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    stop = _Stop()
    stop_with_parent()
    try:
        main(sys.argv[1:], stop)
    except ConfigError as error:
        _fail(str(error), 2)
    except BrokenPipeError:
        os._exit(1)
    except Exception as error:
        # Not at the top, so that --help and most mistakes answer before the libraries are loaded.
        from tied_lm.files import Damaged
        from tied_lm.train.loop import Diverged, Interrupted

        if isinstance(error, Interrupted):
            tell(f"{error}; the same command continues")
            sys.exit(128 + stop.received)
        # An OSError is a full disk, say: what was saved stays good, and the same command continues.
        if isinstance(error, (Damaged, Diverged, OSError)):
            _fail(str(error), 1)
        if _has_others():
            if fellows.is_told(error):
                fellows.end()
            traceback.print_exc()
            os._exit(1)
        raise
    sys.exit(0)
