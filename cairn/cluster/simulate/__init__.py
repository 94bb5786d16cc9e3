"""What a cluster does with a trace of jobs under a policy: replayed, compared, and explained."""
