"""The heat maps of the rows: each value has its colour in its place."""

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from tied_lm.study.heatmap import BOTTOM, GREY, LEFT, RIGHT, TOP, Maps, _scale, draw

STEPS = [0, 1, 20, 3000]


@pytest.mark.parametrize("name", ["share", "push"])
def test_a_value_has_its_colour_in_its_place(name):
    values = np.random.default_rng(0).uniform(0, 1, (len(STEPS), 10))
    values[2, 5] = np.nan
    values[1, 8] = 0
    found = Maps(STEPS, {name: values}, np.repeat([0, 1, 3], [1, 2, 7]), 10)
    norm, colors = _scale(name, [found])
    picture = np.asarray(draw(found, name, "a title", (norm, colors)))
    for step, row in np.ndindex(values.shape):
        x = LEFT + (RIGHT - LEFT) * (step + 0.5) / len(STEPS)
        y = TOP + (BOTTOM - TOP) * (row + 0.5) / 10
        value = values[step, row]
        missing = np.isnan(value) or (name == "push" and not value)
        expected = to_rgb(GREY) if missing else mpl.colormaps[colors](norm(value))[:3]
        np.testing.assert_allclose(picture[int(y), int(x)] / 255, expected, atol=1 / 255)


def test_the_bar_has_the_colours_of_its_numbers():
    found = Maps([0], {"cosine": np.array([[0.5]])}, np.array([0]), 1)
    picture = np.asarray(draw(found, "cosine", "", _scale("cosine", [found])))
    for value in (-0.9, 0.0, 0.9):
        at = picture[round(BOTTOM - (BOTTOM - TOP) * (value + 1) / 2), RIGHT + 20]
        np.testing.assert_allclose(at / 255, mpl.colormaps["RdBu"]((value + 1) / 2)[:3], atol=4 / 255)
