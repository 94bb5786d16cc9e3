"""Collectives of our own on GPUs: small all-reduces over memory that the ranks of a node share."""
