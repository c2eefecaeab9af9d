"""The layouts of checkpoints on disk, whichever tool wrote them."""
