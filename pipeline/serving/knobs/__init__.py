"""The knobs of a launch: a table with versions, rules, reasons and sources."""
