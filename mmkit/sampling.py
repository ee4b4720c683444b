"""Where the entry point of an installation before `mmkit.model` was a package looks."""

from .model.sampling import PlaceholderMask as PlaceholderMask
