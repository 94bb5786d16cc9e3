"""Pages that a person opens from a file: one HTML document each, nothing to download, no server."""
