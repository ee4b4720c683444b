"""Requests to a server of the LLaVA-like model, and what its routes answer."""

from base64 import b64encode
from io import BytesIO
from typing import Any, NamedTuple

import httpx
import numpy as np
import torch
from PIL import Image

from examples.llava_like.cases import draw_picture
from examples.server import Server
from mmkit.serve import Client, content_part
from mmkit.wire.items import encode

TIMEOUT = 240
"""Seconds for one answer of a busy machine."""

SAMPLING: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
PICTURES = [draw_picture(seed) for seed in range(3)]
PICTURE = {"image": PICTURES[:1]}
QUESTION = "USER: <image>\nwhat is it? ASSISTANT:"
PLACEHOLDER = 3

BOMB = Image.new("1", (6000, 6000))
"""A picture of a few KB, with more pixels than MMKIT_SERVE_PIXELS."""

HALF_A_BOMB = Image.new("1", (5000, 5000))
"""A picture of which two have more pixels together."""


class Answer(NamedTuple):
    """The answer of a route.

    Attributes:
        status: of HTTP.
        text: the generated text, or the message of the refusal.
    """

    status: int
    text: str


# -- pictures ----------------------------------------------------------------------------------------------------------


def encode_pictures(*pictures: Any) -> list[Any]:
    """Return pictures as they stand in a request of mmkit's own routes."""
    encoded: list[Any] = encode({"image": list(pictures)})["image"]
    return encoded


def get_data_url(picture: Any) -> str:
    (part,) = encode_pictures(picture)
    return str(part["image_url"]["url"])


def save_jpeg(picture: Image.Image) -> bytes:
    """Return the bytes of a JPEG file."""
    file = BytesIO()
    picture.save(file, "JPEG")
    return file.getvalue()


def make_jpeg_part(file: bytes) -> dict[str, Any]:
    """Return vLLM's part for a JPEG file."""
    return refer_to(f"data:image/jpeg;base64,{b64encode(file).decode()}")


def refer_to(url: str) -> dict[str, Any]:
    """Return vLLM's part for the picture at a URL."""
    return {"type": "image_url", "image_url": {"url": url}}


def make_url_parts(*pictures: Any) -> list[dict[str, Any]]:
    """Return vLLM's own parts of a chat."""
    return [refer_to(get_data_url(picture)) for picture in pictures]


def make_item(value: Any) -> dict[str, Any]:
    """Return a part of a chat with an item in JSON."""
    return {"type": "image", "image": value}


def make_item_parts(*pictures: Any) -> list[dict[str, Any]]:
    """Return parts of a chat in the forms of mmkit's own routes."""
    return [make_item(part) for part in encode_pictures(*pictures)]


def make_gateway_part(picture: Any) -> dict[str, Any]:
    """Return a part that passes a gateway."""
    return content_part("image", picture, as_url=True)


def make_array(*shape: int, dtype: str = "uint8", data: bytes | None = None) -> dict[str, Any]:
    """Return the JSON of an array; of zeros of one byte without data."""
    if data is None:
        data = bytes(int(np.prod(shape)))
    return {"data": b64encode(data).decode(), "dtype": dtype, "shape": list(shape)}


def save_tensor(tensor: torch.Tensor) -> str:
    """Return a tensor as vLLM's own parts have precomputed embeddings."""
    file = BytesIO()
    torch.save(tensor, file)
    return b64encode(file.getvalue()).decode()


# -- routes ------------------------------------------------------------------------------------------------------------


def generate_ids(client: Client, images: Any = PICTURE, **options: Any) -> list[int]:
    """Return the ids that the client gets for the question."""
    options = SAMPLING | options
    return client.generate(QUESTION, images, **options).choices[0].token_ids


def post(server: Server, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=TIMEOUT)


def ask_chat(server: Server, images: list[Any], text: str = "what is it?", **options: Any) -> Answer:
    """Return the answer of vLLM's own chat route to parts with images, and a text after them."""
    message = {"role": "user", "content": [*images, {"type": "text", "text": text}]}
    body = {"model": "llava", "messages": [message]} | SAMPLING | options
    response = post(server, "/v1/chat/completions", body)
    value = response.json()
    if "error" in value:
        return Answer(response.status_code, value["error"]["message"])
    return Answer(response.status_code, value["choices"][0]["message"]["content"])


def ask_generate(server: Server, images: list[Any]) -> Answer:
    """Return the answer of mmkit's own route to the question; the text is the whole body."""
    body = {"prompt": QUESTION, "items": {"image": images}, "sampling_params": SAMPLING}
    response = post(server, "/v1/mm/generate", body)
    return Answer(response.status_code, response.text)
