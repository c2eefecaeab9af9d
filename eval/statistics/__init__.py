"""The statistics of the gate: pure functions of scores and speeds, each with the source of its formula."""
