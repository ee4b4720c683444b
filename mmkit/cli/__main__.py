"""``python -m mmkit.cli``: the command `mmkit`."""

from . import main

if __name__ == "__main__":
    main()
