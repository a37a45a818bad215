"""Frames of hidden states from target ranks to drafter ranks."""
