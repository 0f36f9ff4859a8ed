"""Graphs as compiled programs: one evaluator of graphs on arrays, one class for what XLA compiled."""
