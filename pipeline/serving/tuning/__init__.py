"""Tune the knobs of a launch by measuring: the values to try, their order, the budget and the results."""
