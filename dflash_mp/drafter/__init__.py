"""The draft model: its shape, its blocks, its attention and its files."""
