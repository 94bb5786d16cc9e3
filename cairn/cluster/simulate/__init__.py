"""Simulation of a cluster: replay of a job trace under a policy, comparison and explanation."""
