"""Media that requests name by URL: which URLs a server follows, on all its routes."""

from __future__ import annotations

import os
from typing import Any

from typing_extensions import override

from ..errors import InputError
from ..vllm_api.moved import find

_MODULES = ("multimodal.media.connector", "multimodal.media")
MediaConnector: Any = find(*(f"{module}:MediaConnector" for module in _MODULES))
REGISTRY: Any = find(*(f"{module}:MEDIA_CONNECTOR_REGISTRY" for module in _MODULES))


class Connector(MediaConnector):
    """vLLM's loader, which follows every http(s) URL unless its flags name hosts. This one follows
    none then, and no redirect, which may lead anywhere."""

    def check(self, url: str, where: str) -> None:
        """Refuse a URL that the server's flags do not allow.

        Raises:
            InputError: it is one.
        """
        schemes = ["data:"]
        if self.allowed_media_domains:
            schemes += ["http:", "https:"]
        if self.allowed_local_media_path:
            schemes += ["file:"]
        if not url[:6].lower().startswith(tuple(schemes)):
            expected = f"a URL that starts with {' or '.join(schemes)}"
            remedy = "Send a data URL, or start the server with --allowed-media-domains."
            raise InputError(where, expected, url[:40], remedy)

    @override
    def load_from_url(self, url: str, *args: Any, **kwargs: Any) -> Any:
        self.check(url, "url")
        return super().load_from_url(url, *args, **kwargs)

    @override
    async def load_from_url_async(self, url: str, *args: Any, **kwargs: Any) -> Any:
        self.check(url, "url")
        return await super().load_from_url_async(url, *args, **kwargs)


def install() -> None:
    """Make vLLM's own routes load media by this loader. Can be called again."""
    REGISTRY.register("http")(Connector)
    os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
