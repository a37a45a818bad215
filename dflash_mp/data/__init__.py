"""Conversations to packed micro-batches: read, tokenise, pack; the generator that makes them."""
