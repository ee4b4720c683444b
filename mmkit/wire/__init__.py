"""Items in JSON, as servers of every engine take them. Nothing here knows an engine.

- `items`: what a client encodes, and a server decodes;
- `decoding`: JSON into values, with one sentence about the first mistake;
- `limits`: what one request may hold, and the size of its JSON.
"""
