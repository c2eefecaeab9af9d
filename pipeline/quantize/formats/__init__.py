"""What checkpoints look like on disk, whoever wrote them."""
