"""Measurements of speed and memory, each a command of its own; ``make bench`` runs them."""
