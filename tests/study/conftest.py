"""A finished comparison that the tests of its pages share; they leave its runs as they are."""

import threading

import pytest

from configs import toy
from tests import tiny
from tied_lm.config import override
from tied_lm.study import comparison as c


@pytest.fixture(scope="module")
def undrawn():
    """Pages with empty pictures, for tests that have many pages made and look at none: drawing takes long."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tied_lm.study.picture.svg", lambda picture: "<svg></svg>")
        yield


@pytest.fixture(scope="session")
def comparison(tmp_path_factory):
    """A finished one, of which an arm parts its matrices midway."""
    values = toy.get_config().to_dict()
    for text in (*tiny.FIELDS, "compare.seeds=2", "log.tokens=7"):
        override(values, *text.split("="))
    values["compare"]["arms"]["late"] = "model.tying=late_untie scheme.untie_step=9"
    place = tmp_path_factory.mktemp("comparison") / "run"
    c.complete(place, tiny.plan_of(values), threading.Event(), lambda arm, seed: lambda updates: None)
    return place
