"""The scripts: flags, wiring, printing."""
