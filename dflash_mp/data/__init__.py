"""Conversations to packed micro-batches: read, tokenise, pack; and the generator that makes them."""
