"""The console command `tied-lm` and what it can do: flags, wiring, printing.

May import every other room; nothing imports it but the thin scripts in `experiments/`.
"""
