"""What vLLM's own routes read: JSON that was checked here, within the limits of the server.

A body is read by one parser alone. What it cannot read is refused, and vLLM gets what it read,
written again: never the bytes of the client, in which another parser may read something else. Items
in messages are decoded here, with the limits of our own routes; see `mmkit.serve.messages`.

vLLM collects every mistake of a body, at about a kilobyte each, and checks each number several
times, so values in JSON are counted first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta
from starlette.requests import ClientDisconnect, Request

from ..errors import InputError
from ..vllm_api.chat import SENT, SentItem
from ..vllm_api.incoming import REQUEST, Incoming, Places
from . import errors
from .decoding import decode_json, quote, run_in_thread_if_large
from .messages import ROUTE_FORMS, Messages, Part
from .protocol import Limits, TooLarge
from .routes import read
from .state import ServerState
from .wire import check_size, count_values

FEW = 2**14
"""Values in the JSON that vLLM reads of a request, beside those of a prompt."""

OURS = "/v1/mm/"
"""How the paths of our own routes begin, which read their bodies themselves."""

ITEM_FIELDS = ("items", "multi_modal_data", "uuids", "multi_modal_uuids")
"""Fields that vLLM's routes would ignore: a request would be answered without its items."""

_HAVE_ITEMS = {"/generative_scoring": ("items",)}
"""The routes of vLLM that have such a field of their own."""

FILES = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""The routes of vLLM that read files, in bodies that are no JSON."""

_OF_TEXTS = ("/v1/chat/", "/v1/responses", "/v1/messages")
"""How the paths of the routes begin whose messages become a text."""

_FORMS_OF_FILES = ("multipart/form-data", "application/x-www-form-urlencoded")
_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")
_WHITE_SPACE = b" \t\n\r"
_FREE_TO_CALL = (None, "auto", "none", {"type": "auto"}, {"type": "none"})
"""Choices of tools for which no grammar is compiled."""

_COMPILED = ("response_format", "structured_outputs", "output_config")
"""Fields that say what a text must be, which the engine compiles."""

_Id = Annotated[int, Meta(ge=0)]


class BodyMiddleware:
    """What stands before every route.

    Args:
        app: the routes.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, if need be by 400 or 413."""
        state: ServerState | None = getattr(scope["app"].state, "mmkit", None)
        if state is None or scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        path = _route_path(scope)
        taken = Taken(b"", {}, state.make_incoming())
        has_body = scope["type"] == "http" and scope["method"] not in _WITHOUT_BODY
        if has_body and not path.startswith(OURS):
            try:
                taken = await take(Request(scope, receive), path, state)
            except ClientDisconnect:
                return
            except Exception as error:
                # the rest of its body would be taken for the next request
                refusal = errors.make_response(error, state.plan, "vllm", connection="close")
                await refusal(scope, receive, send)
                return
            receive = _again(taken.body, receive)
        # uvicorn may begin a request in the context of the one before on its connection, so it is
        # set for every request, and given back
        token = REQUEST.set(taken.incoming)
        SENT.update(taken.items)
        try:
            await self._app(scope, receive, send)
        finally:
            REQUEST.reset(token)
            for url in taken.items:
                del SENT[url]


def _route_path(scope: Mapping[str, Any]) -> str:
    """Return the path of a request as routes have it, without the server's --root-path."""
    path, root = str(scope["path"]), str(scope.get("root_path") or "")
    if root and path.startswith(f"{root}/"):
        return path[len(root) :]
    return path


class Taken(NamedTuple):
    """A request to one of vLLM's routes: its body as vLLM may read it, the items of its messages by
    the URLs that stand for them, and what vLLM's functions are to know of it."""

    body: bytes
    items: Mapping[str, SentItem]
    incoming: Incoming


async def take(request: Request, path: str, state: ServerState) -> Taken:
    """Read the body of a request to one of vLLM's routes, check it, and load its items.

    Raises:
        InputError: as `check_body`; or media that vLLM cannot load.
        TooLarge: as `check_body`; or media with too many pixels.
        ClientDisconnect: the client left.
    """
    body = bytes(await read(request, state.limits))
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if path in FILES and kind in _FORMS_OF_FILES:
        return Taken(body, {}, state.make_incoming())
    checked = await run_in_thread_if_large(len(body), check_body, path, body, state)
    form = ROUTE_FORMS.get(path)
    if form is None:
        return Taken(checked.body, {}, state.make_incoming())
    incoming = state.make_incoming(form.field, checked.places, begins_twice=form.begins_twice)
    # media of items and of vLLM's own parts share the pixels of the request
    token = REQUEST.set(incoming)
    try:
        loads = [state.engine.load_media(part.value, part.where) for part in checked.parts]
        values = await asyncio.gather(*loads)
    finally:
        REQUEST.reset(token)
    items = {}
    for part, value in zip(checked.parts, values, strict=True):
        items[part.url] = SentItem(part.modality, value, part.uuid)
    return Taken(checked.body, items, incoming)


def _again(body: bytes, receive: Any) -> Any:
    """The messages by which a route receives a body that has been read."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return left.pop() if left else await receive()

    return again


class Checked(NamedTuple):
    """A body for one of vLLM's routes.

    Attributes:
        body: what was read, written again, with references in place of items.
        parts: the items in its messages.
        places: where the items of its conversations stand.
    """

    body: bytes
    parts: Sequence[Part] = ()
    places: Sequence[Places] = ()


def check_body(path: str, body: bytes, state: ServerState) -> Checked:
    """Check a body for one of vLLM's routes, and write it again without the items in its messages.

    Args:
        path: that of the route.
        body: as it was sent; empty for a request without one.
        state: the server's.

    Raises:
        InputError: it is no JSON object in UTF-8; an item is malformed; there are items where
            nothing reads them, or messages, and no tokenizer; or a long prompt is malformed.
        TooLarge: the items, or what is left, are beyond a limit.
    """
    if not body.strip(_WHITE_SPACE):
        return Checked(b"")
    check_size(body, "body", state.limits)
    request = _read_object(body)
    _refuse_items(path, request)
    form = ROUTE_FORMS.get(path)
    parts: Sequence[Part] = ()
    places: Sequence[Places] = ()
    if form is not None:
        if path.startswith(_OF_TEXTS) and not state.engine.has_tokenizer:
            expected = "a prompt at /v1/mm/generate, since the server has no tokenizer"
            raise InputError(form.field, expected, form.field)
        messages = Messages(state, form)
        messages.take_items(request)
        parts, places = messages.parts, messages.places
    try:
        written = msgspec.json.encode(request)
    except RecursionError:
        expected = "JSON nested at most some hundred deep"
        raise InputError("body", expected, "deeper") from None
    in_prompts = 0
    if len(written) > min(FEW, state.limits.constraint):
        _weigh_constraints(request, state.limits)
        in_prompts = decode_json(_Long, written).count()
    if count_values(written) - in_prompts > FEW:
        raise TooLarge("body", f"at most {FEW} values in JSON beside those of a prompt", "more")
    return Checked(written, parts, places)


def _read_object(body: bytes) -> dict[str, Any]:
    """Return what a body holds, as values of Python.

    Every value is decoded: a part that stays bytes would reach vLLM with numbers, texts and equal
    keys that nobody here has read.
    """
    start = body.lstrip(_WHITE_SPACE)
    if start[:1] != b"{":
        expected = 'a JSON object in UTF-8, which begins with "{"'
        raise InputError("body", expected, repr(start[:8])[1:])
    request: dict[str, Any] = decode_json(dict[str, Any], body)
    return request


def _refuse_items(path: str, request: Mapping[str, Any]) -> None:
    """Refuse items outside of messages, which vLLM would leave out without a word."""
    for name in ITEM_FIELDS:
        if name in request and name not in _HAVE_ITEMS.get(path, ()):
            remedy = "Send items to /v1/mm/generate, or as parts of messages."
            raise InputError(name, f"no items at {quote(path)[1:-1]}", "some", remedy)


def _weigh_constraints(request: Mapping[str, Any], limits: Limits) -> None:
    """Refuse what would take long to compile.

    Raises:
        TooLarge: names the field.
    """
    sampling = request.get("sampling_params")  # of /inference/v1/generate
    for fields, where in ((request, ""), (sampling, "sampling_params.")):
        if not isinstance(fields, Mapping):
            continue
        compiled = set(_COMPILED)
        if isinstance(fields.get("text"), Mapping):  # of /v1/responses
            compiled.add("text")
        if fields.get("tool_choice") not in _FREE_TO_CALL or _has_strict_tools(fields):
            compiled.add("tools")
        for name in sorted(compiled):
            if len(msgspec.json.encode(fields.get(name))) > limits.constraint:
                raise limits.make_error(f"{where}{name}", "constraint", "bytes")


def _has_strict_tools(request: Mapping[str, Any]) -> bool:
    """Whether the calls of a tool must follow its schema, whoever chooses it."""
    tools = request.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        for described in (tool, function):
            if isinstance(described, dict) and described.get("strict"):
                return True
    return False


class _Long(msgspec.Struct):
    """The fields of a long body that may be long, by route, or that vLLM repeats in its refusals;
    what is wrong in them is refused here, at the first mistake, of which vLLM would collect all."""

    prompt: str | list[str | _Id | list[_Id]] | None = None
    tokens: list[_Id] | None = None
    token_ids: list[_Id] | None = None
    model: Annotated[str, Meta(max_length=2**10)] | None = None

    def count(self) -> int:
        """Return the number of values in prompts.

        Raises:
            InputError: a prompt is no list of one kind.
        """
        count = 0
        for prompt in (self.prompt, self.tokens, self.token_ids):
            if not isinstance(prompt, list):
                continue
            if len(set(map(type, prompt))) > 1:
                expected = "a list of ids, of texts or of lists of ids"
                raise InputError("prompt", expected, "a mixed one")
            for part in prompt:
                count += 1 + len(part) if isinstance(part, list) else 1
        return count
