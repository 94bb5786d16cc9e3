"""Many servers behind one address: a router that knows their caches, and what starts them. Needs no torch."""
