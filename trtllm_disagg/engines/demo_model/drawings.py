"""Draws what the vision model names: a shape of one colour on a plain grey background."""

from __future__ import annotations

import base64
import io
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 70, 220),
    "yellow": (240, 220, 40),
    "purple": (130, 40, 170),
    "pink": (255, 110, 180),
}
SHAPES = ("circle", "square", "triangle", "cross")
#: (colour, shape), all that `draw` can draw.
KINDS = [(colour, shape) for colour in COLOURS for shape in SHAPES]


def draw(colour: str, shape: str, rng: random.Random, size: int = 64) -> Image.Image:
    """An RGB image of `size` x `size` pixels. `rng` chooses the grey, and the place and size of the shape.

    Raises KeyError for an unknown colour, ValueError for an unknown shape.
    """
    from PIL import Image, ImageDraw

    grey = rng.choice((rng.randint(10, 70), rng.randint(185, 245)))
    image = Image.new("RGB", (size, size), (grey, grey, grey))
    pen, ink = ImageDraw.Draw(image), COLOURS[colour]
    radius = rng.uniform(0.25, 0.4) * size
    x, y = rng.uniform(radius, size - radius), rng.uniform(radius, size - radius)
    left, top, right, bottom = x - radius, y - radius, x + radius, y + radius
    match shape:
        case "circle":
            pen.ellipse((left, top, right, bottom), ink)
        case "square":
            pen.rectangle((left, top, right, bottom), ink)
        case "triangle":
            pen.polygon(((x, top), (right, bottom), (left, bottom)), ink)
        case "cross":
            pen.rectangle((left, y - radius / 3, right, y + radius / 3), ink)
            pen.rectangle((x - radius / 3, top, x + radius / 3, bottom), ink)
        case _:
            raise ValueError(f"{shape!r} is not one of {', '.join(SHAPES)}")
    return image


def data_url(image: Image.Image) -> str:
    """The image as a PNG in a data URL, as a chat request carries it."""
    png = io.BytesIO()
    image.save(png, "PNG")
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
