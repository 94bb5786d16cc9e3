"""The page a person looks at: chat, the engine at work, requests, the model. `site.py` serves what `static/` holds."""
