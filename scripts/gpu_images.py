"""Checks on one GPU, in about ten minutes, that each answer is about the image of its own request.

    python -m scripts.gpu_images --model Qwen/Qwen2.5-VL-3B-Instruct --gpus 0

Asks the same question about red and blue images of one size, so that an engine that knows its KV by text alone names
the colour of another request. Please paste gpu-images.txt. Then try llava-hf/llava-v1.6-mistral-7b-hf. Without a GPU:
`--engine embedded --model .cache/demo-vision-model`.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image, ImageDraw

from scripts.gpu_day import Check, Day, Run, parser_for, report, takes
from scripts.gpu_site import AGG, ORDERS, PAIR, ROUTER, TENSORRT_LLM, FailedError, RefusedError, Site, require

QUESTION = "What colour is the circle in this picture? Answer in a few words, and name its colour."
COLOURS = {"red": (1, 0, 0), "blue": (0, 0, 1)}
SIZE = 336
#: Two workers share the GPU.
FRACTION = "--trtllm.kv_cache_config.free_gpu_memory_fraction 0.4"
_SHADES = itertools.count()


def image_url(colour: str, shade: int) -> str:
    """A PNG as a data URL: a circle on white, always of one size. Another of the 50 shades is another image."""
    image = Image.new("RGB", (SIZE, SIZE), "white")
    red, green, blue = ((255 - shade % 50) * part for part in COLOURS[colour])
    ImageDraw.Draw(image).ellipse((SIZE // 6, SIZE // 6, SIZE * 5 // 6, SIZE * 5 // 6), (red, green, blue))
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def asked(site: Site, url: str) -> str:
    """The answer, in lower case. Raises FailedError if it was not served in the site's order."""
    content = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 30, "temperature": 0}
    reply = site.post("/v1/chat/completions", **body, nvext={"extra_fields": ["engine_data"]})
    trace = ((reply.get("nvext") or {}).get("engine_data") or {}).get("disagg") or {}
    is_so = trace.get("strategy") == site.order and not trace.get("fallbacks")
    require(site.order not in ORDERS or is_so, f"served as {trace}, not as {site.order}")
    return str(reply["choices"][0]["message"]["content"]).lower()


def named(site: Site, colour: str, shade: int) -> None:
    text = asked(site, image_url(colour, shade))
    is_right = [each for each in COLOURS if each in text] == [colour]
    require(is_right, f"a {colour} circle is answered with {text[:60]!r}")


def in_turn(site: Site, day: Day) -> str:
    """Both images new, then both again, when their KV may be cached."""
    day.require_model()
    shade = next(_SHADES)
    for colour in [*COLOURS] * 3:
        named(site, colour, shade)
    return "6 of 6 right"


def at_once(site: Site, day: Day) -> str:
    """Sixteen requests, four about each image."""
    day.require_model()
    shades = [next(_SHADES), next(_SHADES)] * 4
    with ThreadPoolExecutor(8) as pool:
        pairs = itertools.product(shades, COLOURS)
        list(pool.map(lambda pair: named(site, pair[1], pair[0]), pairs))
    return "16 of 16 right"


def broken(site: Site, day: Day) -> str:
    """The worker refuses it, and answers the next request."""
    head, _, whole = image_url("red", next(_SHADES)).partition(",")
    try:
        text = asked(site, f"{head},{whole[: len(whole) // 8 * 4]}")
    except RefusedError as error:
        require(400 <= error.status < 500, str(error))
    else:
        raise FailedError(f"half an image is answered with {text[:60]!r}")
    return in_turn(site, day)


IN_EACH: tuple[tuple[str, Run], ...] = (
    ("red and blue in turn", in_turn),
    ("red and blue at once", at_once),
    ("a broken image", broken),
)


def _checks() -> Iterator[Check]:
    for name in (AGG, *ORDERS, ROUTER):
        where = PAIR if name in ORDERS else name
        begin = (("the order", takes(name)),) if where == PAIR else ()
        yield from (Check(f"{name}: {each}", where, run) for each, run in (*begin, *IN_EACH))


CHECKS = tuple(_checks())


def parsed(words: list[str]) -> argparse.Namespace:
    options = parser_for(__doc__, "gpu-images.txt").parse_args(words)
    own = ["--enable-multimodal"]
    if options.engine == TENSORRT_LLM:
        own.append(FRACTION)
        options.engine_configs = options.engine_configs or Path("engine_configs/qwen2.5-vl")
    options.worker_args = " ".join([*own, options.worker_args]).strip()
    return options


if __name__ == "__main__":
    sys.exit(report(parsed(sys.argv[1:]), CHECKS))
