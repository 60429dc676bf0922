"""`tied-lm geometry`, from the root of the repository."""

from tied_lm.cli.command import run
from tied_lm.cli.geometry import main

if __name__ == "__main__":
    run(main)
