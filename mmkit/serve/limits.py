"""The limits of a server."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from ..wire.limits import Limits, PositiveInt

Seconds = Annotated[float, Meta(ge=1, le=1e9)]


class ServerLimits(Limits, frozen=True, kw_only=True):
    """Limits of each request of a server, and of its sessions.

    Attributes:
        sessions: open sessions of one API server, with the connections of robots. A session holds
            its tokens and items while it waits for its client.
        idle_seconds: seconds for which the server waits for a session's next message, or for its
            client to read one.
        robot_idle_seconds: seconds for which the server waits for a robot's next observation. The
            client of openpi does not connect again, while people arrange the scene.
    """

    sessions: PositiveInt = 256
    idle_seconds: Seconds = 300.0
    robot_idle_seconds: Seconds = 3600.0
