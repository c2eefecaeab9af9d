"""Accuracy, throughput and the gate: suites, tasks, workloads, statistics, verdicts, reports."""
