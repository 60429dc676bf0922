"""The scripts of `tied_lm.cli`, to be called from the root of the repository."""
