"""Several checkpoints side by side: accuracy against size against throughput, and which of them nothing beats."""
