"""``python -m mmkit.serve DIR ...``: ``vllm serve DIR ...`` with the routes of mmkit.

vLLM loads a plugin that adds routes only if VLLM_PLUGINS names it, and then no other plugin that
the variable does not name. This names mmkit and, unless the variable is set, every installed
plugin.

It ends with exit status 1 if the engine died. ``vllm serve`` with one API server ends with 0 then.

Some metrics of mmkit are counted in the workers, so the processes share a folder of metrics
(PROMETHEUS_MULTIPROC_DIR).
"""

import os
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from tempfile import TemporaryDirectory

from ..errors import MmkitError
from .limits import ServerLimits

DEFAULT_PLUGIN_KINDS = ("general", "io_processor", "platform", "stat_logger")
"""The kinds of plugins that vLLM loads where VLLM_PLUGINS is not set."""


def main() -> None:
    """Run vLLM's command."""
    try:
        check_environment(os.environ)
    except MmkitError as error:
        sys.exit(str(error))
    os.environ["VLLM_PLUGINS"] = list_plugins(os.environ.get("VLLM_PLUGINS"))
    sys.argv.insert(1, "serve")
    with TemporaryDirectory(prefix="mmkit-metrics-") as folder:
        # before prometheus_client is imported, which then decides where its values are
        os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", folder)
        from ..vllm_api.compat import find

        run_vllm = find("entrypoints.cli.main:main")
        run_vllm()
    from .plugin import engine_death

    if engine_death.is_set():
        sys.exit("mmkit.serve: the engine died. The log above says why.")


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse variables with which the server could not work, before it loads the model.

    Raises:
        MmkitError: names the variable.
    """
    ServerLimits.from_environment(environment)
    rust = environment.get("VLLM_USE_RUST_FRONTEND", "")
    if rust not in ("", "0"):
        remedy = "vLLM's front end in Rust runs no spec and has no routes of mmkit: unset it."
        raise MmkitError("VLLM_USE_RUST_FRONTEND", "0", repr(rust), remedy)


def list_plugins(variable: str | None) -> str:
    """Return a value of VLLM_PLUGINS that names mmkit.

    Args:
        variable: the present value, whose plugins are kept; None for all that vLLM would load.
    """
    names: list[str] = []
    if variable is None:
        for kind in DEFAULT_PLUGIN_KINDS:
            for entry in entry_points(group=f"vllm.{kind}_plugins"):
                names.append(entry.name)
    else:
        for name in variable.split(","):
            if name:
                names.append(name)
    names.append("mmkit")
    return ",".join(dict.fromkeys(names))  # each once


if __name__ == "__main__":
    main()
