"""State on disk that survives everything: whole or not there, readable by any layout."""
