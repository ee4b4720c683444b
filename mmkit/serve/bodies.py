"""What vLLM's own routes read: JSON that was checked here, within the limits of the server.

Here begins a chat request. It makes these calls, in this order; docs/how-it-works.md has the same
list, with the numbers of the steps:

- `answers.AnswerMiddleware.handle`, then `BodyMiddleware.handle`, which calls `read_request`;
- `messages.Messages.move_items_out` puts URLs in place of the items in the messages;
- `engine.Engine.load_media` loads their media, by `mmkit.vllm_api.media.CheckedLoader`;
- vLLM's route reads the body that is left, and renders its messages, in
  `mmkit.vllm_api.patches.wrap_render_chat_async`;
- `mmkit.vllm_api.chat.wrap_read_part` finds the item of each URL in `ITEMS_BY_REFERENCE`, and
  `mmkit.vllm_api.chat.wrap_gather_items` gathers the items;
- `mmkit.vllm_api.patches.wrap_process_tokens` gets the ids of the prompt, with the items;
- the steps 1 to 11 of every request: `mmkit.vllm_api.items.Parser.parse_mm_data`,
  `mmkit.vllm_api.processor.Processor.apply`, `mmkit.vllm_api.pipeline.RequestPipeline.run`,
  `mmkit.vllm_api.admission.admit`, `mmkit.vllm_api.exchange.exchange_features` and
  `mmkit.model.mixin.MultiModalModel.embed_multimodal`.

A body is read by one parser only. What that parser cannot read is refused, and vLLM gets what it
read, encoded again: never the bytes of the client, in which another parser may read something else.
Items in messages are decoded here, with the limits of our own routes; see `mmkit.serve.messages`.

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
from ..vllm_api.chat import ITEMS_BY_REFERENCE, ChatItem
from ..vllm_api.server_request import SERVER_REQUEST, ItemPaths, ServerRequest
from ..wire.decoding import decode_json, make_depth_error, quote
from ..wire.items import MediaPart, find_media
from ..wire.limits import Limits, TooLarge, check_size, count_values
from . import errors
from .messages import MESSAGE_FORMATS, Messages, MovedItem
from .middleware import ServerMiddleware
from .routes import receive_body
from .state import ServerState
from .threads import run_in_thread_if_large

MAX_JSON_VALUES = 2**14
"""Values in the JSON of a request at vLLM's routes, without the prompt's."""

MM_ROUTES = "/v1/mm/"
"""How the paths of our own routes begin, which read their bodies themselves."""

ITEM_FIELDS = ("items", "multi_modal_data", "uuids", "multi_modal_uuids")
"""Fields that vLLM's routes would ignore: a request would be answered without its items."""

_ALLOWED_ITEM_FIELDS = {"/generative_scoring": ("items",)}
"""The routes of vLLM that have such a field of their own."""

_FILE_ROUTES = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""The routes of vLLM that read files, in bodies that are no JSON."""

_TEXT_ROUTES = ("/v1/chat/", "/v1/responses", "/v1/messages")
"""How the paths of the routes begin whose messages become a text."""

_FILE_TYPES = ("multipart/form-data", "application/x-www-form-urlencoded")
"""Content types of bodies with files."""

_METHODS_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")

_WHITE_SPACE = b" \t\n\r"

_FREE_TOOL_CHOICES = (None, "auto", "none", {"type": "auto"}, {"type": "none"})
"""Choices of tools for which the engine compiles no grammar."""

_COMPILED_FIELDS = ("response_format", "structured_outputs", "output_config")
"""Fields that say what a text must be, which the engine compiles."""


# -- the layer -------------------------------------------------------------------------------------


class BodyMiddleware(ServerMiddleware):
    """The second layer: it reads and checks the bodies for vLLM's routes.

    Requests to mmkit's own routes pass: these read their bodies themselves.
    """

    handled_types = ("http", "websocket")

    async def handle(self, scope: Any, receive: Any, send: Any, state: ServerState) -> None:
        """Answer a request; by 400 or 413 if its body is refused."""
        request = CheckedRequest(b"", {}, state.make_server_request())
        if _has_body_for_vllm(scope):
            path = _get_route_path(scope)
            try:
                request = await read_request(Request(scope, receive), path, state)
            except ClientDisconnect:
                return
            except Exception as error:
                # The connection ends: the unread end of the body would count as the next request.
                refusal = errors.make_response(error, state.plan, "vllm", connection="close")
                await refusal(scope, receive, send)
                return
            receive = _make_receive(request.body, receive)
        # uvicorn may begin a request in the context of the one before on its connection, so the
        # variable is set for every request, and reset
        token = SERVER_REQUEST.set(request.server_request)
        ITEMS_BY_REFERENCE.update(request.items)
        try:
            await self.app(scope, receive, send)
        finally:
            SERVER_REQUEST.reset(token)
            for url in request.items:
                del ITEMS_BY_REFERENCE[url]


def _has_body_for_vllm(scope: Mapping[str, Any]) -> bool:
    """Tell whether a request has a body that vLLM reads."""
    if scope["type"] != "http" or scope["method"] in _METHODS_WITHOUT_BODY:
        return False
    return not _get_route_path(scope).startswith(MM_ROUTES)


def _get_route_path(scope: Mapping[str, Any]) -> str:
    """Return the path of a request as routes have it, without the server's --root-path."""
    path = str(scope["path"])
    root = str(scope.get("root_path") or "")
    if root and path.startswith(f"{root}/"):
        return path[len(root) :]
    return path


def _make_receive(body: bytes, receive: Any) -> Any:
    """Return a function by which a route receives a body that has been read already."""
    is_body_received = False

    async def receive_body_first() -> Any:
        nonlocal is_body_received
        if is_body_received:
            return await receive()
        is_body_received = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_body_first


# -- one request -----------------------------------------------------------------------------------


class CheckedRequest(NamedTuple):
    """An HTTP request that is checked: what vLLM's route and its functions receive of it.

    A request to one of mmkit's routes has an empty body here: the route reads it by itself.

    Attributes:
        body: as vLLM may read it.
        items: the items of its messages, by the URLs that stand for them.
        server_request: what vLLM's functions are to know of it; see `ServerRequest`.
    """

    body: bytes
    items: Mapping[str, ChatItem]
    server_request: ServerRequest


async def read_request(request: Request, path: str, state: ServerState) -> CheckedRequest:
    """Read the body of a request to one of vLLM's routes, check it, and load its items.

    Raises:
        InputError: as `check_body`; or media that vLLM cannot load.
        TooLarge: as `check_body`; or media with too many pixels.
        ClientDisconnect: the client left.
    """
    body = bytes(await receive_body(request, state.limits))
    if path in _FILE_ROUTES and _get_content_type(request) in _FILE_TYPES:
        return CheckedRequest(body, {}, state.make_server_request())
    checked = await run_in_thread_if_large(len(body), check_body, path, body, state)
    message_format = MESSAGE_FORMATS.get(path)
    if message_format is None:
        return CheckedRequest(checked.body, {}, state.make_server_request())
    server_request = state.make_server_request(
        message_format.field,
        checked.item_paths,
        adds_special_tokens_twice=message_format.adds_special_tokens_twice,
    )
    await _load_media(checked.media, server_request, state)
    items = {}
    for moved, value in zip(checked.moved_items, checked.values, strict=True):
        items[moved.url] = ChatItem(moved.modality, value, moved.uuid)
    return CheckedRequest(checked.body, items, server_request)


def _get_content_type(request: Request) -> str:
    """Return the content type of a request without its parameters."""
    content_type: str = request.headers.get("content-type", "")
    return content_type.partition(";")[0].strip().lower()


async def _load_media(
    media: Sequence[Sequence[MediaPart]], server_request: ServerRequest, state: ServerState
) -> None:
    """Load the media of the items of messages in place, several items at once."""
    # media of items and of vLLM's own parts share the pixels of the request
    token = SERVER_REQUEST.set(server_request)
    try:
        await asyncio.gather(*[state.engine.load_media(parts) for parts in media])
    finally:
        SERVER_REQUEST.reset(token)


# -- one body --------------------------------------------------------------------------------------


class CheckedBody(NamedTuple):
    """A body for one of vLLM's routes.

    Attributes:
        body: what was read, encoded again, with references in place of items.
        moved_items: the items of its messages.
        item_paths: the paths of the items, for each conversation.
        values: the values of `moved_items`, in a list of their own: when media are loaded, they
            take the place of what names them, and the tuples of `moved_items` stay as they are.
        media: the media of each of them.
    """

    body: bytes
    moved_items: Sequence[MovedItem] = ()
    item_paths: Sequence[ItemPaths] = ()
    values: Sequence[Any] = ()
    media: Sequence[Sequence[MediaPart]] = ()


def check_body(path: str, body: bytes, state: ServerState) -> CheckedBody:
    """Check a body for one of vLLM's routes, and encode it again without the items in its messages.

    Args:
        path: the path of the route.
        body: from the client; empty for a request without one.
        state: the server's.

    Raises:
        InputError: it is no JSON object in UTF-8; an item is malformed; there are items where
            nothing reads them, or messages, and no tokenizer; or a long prompt is malformed.
        TooLarge: the items, or what is left, are beyond a limit.
    """
    if not body.strip(_WHITE_SPACE):
        return CheckedBody(b"")
    check_size(body, "body", state.limits)
    fields = _decode_object(body)
    _refuse_items(path, fields)
    moved_items: Sequence[MovedItem] = ()
    item_paths: Sequence[ItemPaths] = ()
    message_format = MESSAGE_FORMATS.get(path)
    if message_format is not None:
        if path.startswith(_TEXT_ROUTES) and not state.engine.has_tokenizer:
            expected = "a prompt at /v1/mm/generate, since the server has no tokenizer"
            raise InputError(message_format.field, expected, message_format.field)
        messages = Messages(state, message_format)
        messages.move_items_out(fields)
        moved_items = messages.moved_items
        item_paths = messages.item_paths
    try:
        encoded = msgspec.json.encode(fields)
    except RecursionError:
        raise make_depth_error() from None
    _check_costs(fields, encoded, state.limits)
    values = [moved.value for moved in moved_items]
    media = [find_media(values, index, moved.where) for index, moved in enumerate(moved_items)]
    return CheckedBody(encoded, moved_items, item_paths, values, media)


def _decode_object(body: bytes) -> dict[str, Any]:
    """Return the fields of a body, as values of Python.

    Every value is decoded: a part that stays bytes would reach vLLM with numbers, texts and equal
    keys that nobody here has read.
    """
    start = body.lstrip(_WHITE_SPACE)
    if start[:1] != b"{":
        expected = 'a JSON object in UTF-8, which begins with "{"'
        raise InputError("body", expected, repr(start[:8])[1:])
    fields: dict[str, Any] = decode_json(dict[str, Any], body)
    return fields


def _refuse_items(path: str, fields: Mapping[str, Any]) -> None:
    """Refuse items outside of messages, which vLLM would ignore without a message."""
    allowed = _ALLOWED_ITEM_FIELDS.get(path, ())
    for name in ITEM_FIELDS:
        if name in fields and name not in allowed:
            remedy = "Send items to /v1/mm/generate, or as parts of messages."
            raise InputError(name, f"no items at {quote(path)[1:-1]}", "some", remedy)


# -- what a body costs vLLM ------------------------------------------------------------------------


def _check_costs(fields: Mapping[str, Any], encoded: bytes, limits: Limits) -> None:
    """Refuse what vLLM would take long to check or to compile.

    Raises:
        InputError: a long prompt is malformed.
        TooLarge: there are too many values, or a constraint is too long.
    """
    if len(encoded) <= min(MAX_JSON_VALUES, limits.constraint):
        return  # so few bytes hold neither
    _check_constraints(fields, "", limits)
    sampling = fields.get("sampling_params")  # of /inference/v1/generate
    if isinstance(sampling, Mapping):
        _check_constraints(sampling, "sampling_params.", limits)
    num_prompt_values = decode_json(_LongFields, encoded).count_prompt_values()
    if count_values(encoded) - num_prompt_values > MAX_JSON_VALUES:
        expected = f"at most {MAX_JSON_VALUES} values in JSON beside those of a prompt"
        raise TooLarge("body", expected, "more")


def _check_constraints(fields: Mapping[str, Any], prefix: str, limits: Limits) -> None:
    """Refuse a field that the engine would take long to compile.

    Args:
        fields: of a body, or of its sampling parameters.
        prefix: what comes before a field in its path.
        limits: of the server.

    Raises:
        TooLarge: names the field.
    """
    names = list(_COMPILED_FIELDS)
    if isinstance(fields.get("text"), Mapping):  # of /v1/responses
        names.append("text")
    if fields.get("tool_choice") not in _FREE_TOOL_CHOICES or _has_strict_tools(fields):
        names.append("tools")
    for name in sorted(names):
        if len(msgspec.json.encode(fields.get(name))) > limits.constraint:
            raise limits.make_error(f"{prefix}{name}", "constraint", "bytes")


def _has_strict_tools(fields: Mapping[str, Any]) -> bool:
    """Tell whether the calls of a tool must follow its schema, whatever the choice of tools is."""
    tools = fields.get("tools")
    if not isinstance(tools, list):
        return False
    for tool in tools:
        if not isinstance(tool, dict):
            continue
        function = tool.get("function")
        if tool.get("strict") or (isinstance(function, dict) and function.get("strict")):
            return True
    return False


_TokenId = Annotated[int, Meta(ge=0)]


class _LongFields(msgspec.Struct):
    """The fields of a body that may be long, by route, or that vLLM repeats in its refusals.

    A mistake in them is refused here, at the first one: vLLM would collect all.
    """

    prompt: str | list[str | _TokenId | list[_TokenId]] | None = None
    tokens: list[_TokenId] | None = None
    token_ids: list[_TokenId] | None = None
    model: Annotated[str, Meta(max_length=2**10)] | None = None

    def count_prompt_values(self) -> int:
        """Return the number of values in prompts.

        Raises:
            InputError: a prompt is no list of one kind.
        """
        count = 0
        for prompt in (self.prompt, self.tokens, self.token_ids):
            if isinstance(prompt, list):
                count += _count_list(prompt)
        return count


def _count_list(prompt: Sequence[Any]) -> int:
    """Return the number of values in a list of ids, of texts or of lists of ids."""
    kinds = {type(part) for part in prompt}
    if len(kinds) > 1:
        raise InputError("prompt", "a list of ids, of texts or of lists of ids", "a mixed one")
    count = len(prompt)
    if kinds == {list}:
        for part in prompt:
            count += len(part)
    return count
