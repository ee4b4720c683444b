"""Items processed in several processes of a server."""
