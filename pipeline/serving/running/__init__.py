"""Start the servers of a launch plan, measure them under load and read their logs."""
