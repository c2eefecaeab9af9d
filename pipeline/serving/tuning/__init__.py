"""Finding the knobs of a launch by measuring: what to try, in which order, within a budget, and what came of it."""
