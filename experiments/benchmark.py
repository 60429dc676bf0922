"""`tied-lm benchmark`, from the root of the repository."""

from tied_lm.cli.benchmark import main
from tied_lm.cli.command import run

if __name__ == "__main__":
    run(main)
