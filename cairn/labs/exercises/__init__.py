"""Exercises: a skeleton to fill in, cases that grade it, hints, and this project's own file as the solution."""
