"""Publishing of checkpoints that passed: releases, their destinations, cards, signatures and verification."""
