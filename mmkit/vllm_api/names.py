"""Files and names that several API servers of one address share.

vLLM starts them as children of one process, with one folder of metrics for all.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from mmap import mmap
from pathlib import Path
from typing import Any

_PLACES = 2**18
_DIGEST, _CHECK = 24, 16
_SIZE = 2 * _DIGEST + _CHECK


def shared_file(config: Any, kind: str) -> Path | None:
    """Path of a file that the API servers of one address have together; None where there is but
    one.

    Args:
        config: vLLM's, of this API server.
        kind: what the file is for.
    """
    parallel = getattr(config, "parallel_config", None)
    if getattr(parallel, "_api_process_count", 1) == 1:
        return None
    return Path(os.environ["PROMETHEUS_MULTIPROC_DIR"], f"mmkit-{kind}-{os.getppid()}")


class SharedNames:
    """Hashes of items by name, in a file that processes have in memory.

    Each name has one place, and takes it from the name that was there, which nobody knows then. An
    entry that two processes write at once has a wrong check, and stands for no name.

    Args:
        path: made where it is missing.
    """

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(_PLACES * _SIZE)
            self._memory = mmap(file.fileno(), 0)

    def get(self, key: str) -> str | None:
        """The hash that was last set for a name, in whatever process; None for an unknown one.

        Args:
            key: of a name, in hexadecimal digits, as the hash.
        """
        name = bytes.fromhex(key)
        entry = self._memory[_place(name)]
        item_hash = entry[_DIGEST : 2 * _DIGEST]
        return item_hash.hex() if entry == _entry(name, item_hash) else None

    def __setitem__(self, key: str, item_hash: str) -> None:
        name = bytes.fromhex(key)
        self._memory[_place(name)] = _entry(name, bytes.fromhex(item_hash))


def _place(name: bytes) -> slice:
    start = int.from_bytes(name[:8]) % _PLACES * _SIZE
    return slice(start, start + _SIZE)


def _entry(name: bytes, item_hash: bytes) -> bytes:
    both = name + item_hash
    return both + blake2b(both, digest_size=_CHECK).digest()
