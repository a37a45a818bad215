"""Train DFlash drafters: frozen target ranks stream hidden states to drafter ranks."""

__version__ = "0.1.0"
