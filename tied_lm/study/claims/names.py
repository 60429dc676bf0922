"""The studies by name, in the order of their claims."""

import importlib

from tied_lm.study.claims.study import Study

FILES = (
    "movers resemblance words drift lookup_gain cone gate optimizers coupled reversibility spread late bottleneck "
    "depth rare rays probability fixed_size z_loss centring"
)


def studies() -> dict[str, Study]:
    """All of them."""
    modules = (importlib.import_module(f"tied_lm.study.claims.catalogue.{name}") for name in FILES.split())
    return {module.STUDY.name: module.STUDY for module in modules}
