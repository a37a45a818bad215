"""Launchers other than torchrun."""
