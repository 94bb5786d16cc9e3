"""Is a deployment computing the model it says? Fixed texts compared and explained; requests replayed."""
