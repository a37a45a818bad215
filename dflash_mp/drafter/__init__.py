"""The draft model: config, blocks, attention, layers, the frozen head it borrows."""
