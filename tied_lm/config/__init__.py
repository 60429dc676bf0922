"""What is to be done, as frozen dataclasses with defaults: reading it, setting its fields, telling two apart;
and which folder is one's.

May import `model`, whose schemes and bodies declare their own options, and what stands at the root.
"""

from tied_lm.config.arms import ARM_NAMES, Comparison, build_comparison, overrides_of
from tied_lm.config.fields import (
    OPTIONS,
    OWN_DEFAULTS,
    VERSION,
    Checkpoint,
    Config,
    Data,
    Log,
    Mesh,
    Model,
    Optimizer,
    Train,
    build_run,
    defaults,
    read_data,
    read_mesh,
    read_run,
    to_dict,
)
from tied_lm.config.identity import differing_fields, digest
from tied_lm.config.overrides import override
from tied_lm.config.values import completed, flatten, put, resolved

__all__ = [
    "ARM_NAMES",
    "OPTIONS",
    "OWN_DEFAULTS",
    "VERSION",
    "Checkpoint",
    "Comparison",
    "Config",
    "Data",
    "Log",
    "Mesh",
    "Model",
    "Optimizer",
    "Train",
    "build_comparison",
    "build_run",
    "completed",
    "defaults",
    "differing_fields",
    "digest",
    "flatten",
    "override",
    "overrides_of",
    "put",
    "read_data",
    "read_mesh",
    "read_run",
    "resolved",
    "to_dict",
]
