"""The engines a job can run on: one file for each, and what they have in common."""
