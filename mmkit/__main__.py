"""``python -m mmkit``: the command `mmkit`."""

from .cli import main

if __name__ == "__main__":
    main()
